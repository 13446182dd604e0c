"""EAGLE heads in the layout of published checkpoints: a folder (or cached hub repository) with ``config.json`` and
``model.safetensors`` or ``pytorch_model.bin``.

Layout (SafeAILab/EAGLE, eagle/model/cnets.py before EAGLE-3 and eagle/train/*_config.json): ``fc.weight`` and perhaps
``fc.bias``, ``layers.N.*`` without ``layers.0.input_layernorm``, and ``embed_tokens.weight``, a copy of the verifier's
frozen embedding, by which a head is told from that of another verifier. Nothing else names the verifier. Such a head
drafts every token. EAGLE-3 heads read other features and have a head of their own: they are refused.

Knows no decoding; our own format is ``models.pretrained``.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from specdiff2.models.drafter_files import check_tensors
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.hub import cached_folder, download_command
from specdiff2.models.json_object import read_json_object
from specdiff2.models.layer_stack import stack_config
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.safe_folder import is_taken, replace_folder
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

GAMMA = 5  # drafted positions of a head whose checkpoint does not say
EMBEDDING = "embed_tokens.weight"
MAX_DIFFERENCE = 0.02  # of the embeddings, relative: they are stored in another number format, no more
EAGLE3_PARTS = ("midlayer.", "d2t", "t2d")  # its one layer and its draft vocabulary
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta")
UNUSED = "rotary_emb.inv_freq"  # a buffer that old versions stored


def is_eagle_source(source: str | Path) -> bool:
    """Whether ``source`` is a folder, or a hub id in the local cache, that holds a published EAGLE head (of any
    version). Reads names only; False for what is not there or cannot be read."""
    folder = _folder(source)
    if folder is None or not (folder / "config.json").is_file():
        return False
    try:
        if "format" in read_json_object(folder / "config.json"):  # one of ours
            return False
        names = _names(folder)
    except CorruptFileError:
        return False
    return "fc.weight" in names or _is_eagle3(names)


def check_eagle_source(source: str | Path) -> None:
    """Refuse, before any model loads, a head that cannot be read.

    Raises:
        ConfigError: it is not there, an EAGLE-3 head, or of a kind of layers that is not known.
        CorruptFileError: a file is missing or damaged.
    """
    folder = _existing(source)
    read_public_config(folder)
    names = _names(folder)
    if _is_eagle3(names):
        raise ConfigError(
            f"{source}: an EAGLE-3 head (it reads hidden states of several layers and has a head of its own); only "
            "heads of EAGLE and EAGLE-2 are read: fc, layers.N and embed_tokens"
        )


def load_eagle_checkpoint(source: str | Path, verifier: HFVerifier, dtype: torch.dtype | None = None) -> EagleDrafter:
    """The published head in ``source`` around ``verifier``, in eval mode; it drafts every token.

    Args:
        dtype: of its weights; None takes the verifier's.

    Raises:
        ConfigError, CorruptFileError: see ``check_eagle_source``.
        MismatchError: a tensor is missing, unknown or misshapen, or the head is another verifier's (by its hidden size
            and its copy of the embedding).
    """
    check_eagle_source(source)
    folder = _existing(source)
    base_config, tensors = read_public_config(folder), _tensors(folder)
    hidden_size = verifier.config.hidden_size
    if base_config.hidden_size != hidden_size:
        raise MismatchError(
            f"EAGLE head {source}: hidden_size={base_config.hidden_size}, verifier {verifier.name} has {hidden_size}; "
            "use the verifier it was trained for"
        )
    num_layers = base_config.num_hidden_layers
    base_config = stack_config(base_config, list(range(num_layers)))
    config = EagleConfig(
        gamma=GAMMA,
        num_layers=num_layers,
        layer_indices=[],
        vocab_size=verifier.vocab_size,
        base_config=json.loads(base_config.to_json_string(use_diff=False)),
        fc_bias="fc.bias" in tensors,
        verifier_name=verifier.name,
        verifier_fingerprint=verifier.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(verifier.tokenizer),
    )
    _check_embedding(source, tensors.pop(EMBEDDING, None), verifier)
    drafter = EagleDrafter(config, verifier, base_config, dtype=dtype or verifier.dtype)
    renamed = {f"stack.{name}" if name.startswith("layers.") else name: t for name, t in tensors.items()}
    check_tensors(drafter.state_dict(), renamed, f"EAGLE head {source}")
    drafter.load_state_dict(renamed)
    pack_linears(drafter)
    return drafter.eval()


def export_eagle(drafter: EagleDrafter, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write ``drafter`` in the public layout, with a copy of the verifier's embedding. Its draft vocabulary is not part
    of it: other programs draft every token.

    Raises:
        ConfigError: ``folder`` holds something, or the layers have parts that the layout has no place for.
        SpecDiffError: writing failed; nothing is left behind.
    """
    folder = Path(folder).absolute()
    if is_taken(folder):
        raise ConfigError(f"{folder}: is not an empty folder; choose another one")
    verifier, config = drafter.context.verifier, drafter.stack.config
    embedding = verifier.model.get_input_embeddings().weight
    tensors = {name.removeprefix("stack."): tensor for name, tensor in drafter.state_dict().items()}
    tensors[EMBEDDING] = embedding
    tensors = {name: tensor.detach().to("cpu", dtype or drafter.dtype).contiguous() for name, tensor in tensors.items()}
    rope = dict(config.rope_parameters or {})
    qkv_bias = "layers.0.self_attn.q_proj.bias" in tensors
    odd = [name for name in tensors if name.endswith((".q_norm.weight", "o_proj.bias", "mlp.down_proj.bias"))]
    same_width = getattr(config, "head_dim", None) in (None, config.hidden_size // config.num_attention_heads)
    if odd or not same_width or rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"EAGLE head of {config.model_type!r} layers with {odd[:1] or rope}, head_dim="
            f"{getattr(config, 'head_dim', None)}: the public layout has no place for it; keep it in the format of "
            "save_drafter"
        )
    record = {name: getattr(config, name) for name in (*SIZES, *OPTIONAL) if hasattr(config, name)}
    record |= {"rope_theta": rope.get("rope_theta", 10000.0), "bias": drafter.config.fc_bias}
    record |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": embedding.shape[0]}
    record |= {"qkv_bias": True} if qkv_bias else {}

    def write(new: Path) -> None:
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    return replace_folder(folder, write, "EAGLE head")


def read_public_config(folder: Path) -> PreTrainedConfig:
    """The layers' configuration from a public ``config.json``.

    Raises:
        CorruptFileError: not there, or a size is missing.
        ConfigError: rotary positions that published heads do not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CorruptFileError(f"EAGLE head {folder}: config.json does not exist; fetch the head again")
    record = read_json_object(path)
    missing = [name for name in SIZES if not isinstance(record.get(name), int)]
    if missing:
        raise CorruptFileError(f"{path}: {missing[0]}={record.get(missing[0])!r}: expected an integer")
    values = {name: record[name] for name in (*SIZES, *OPTIONAL) if record.get(name) is not None}
    scaling = record.get("rope_scaling")
    if scaling:
        if scaling.get("type") not in ("linear", "dynamic"):
            raise ConfigError(f"{path}: rope_scaling={scaling!r}: expected null, or type linear or dynamic")
        # as the authors' code has it: a scaled head ignores rope_theta
        values |= {"rope_scaling": {"rope_type": scaling["type"], "factor": scaling["factor"]}, "rope_theta": 10000.0}
    # both have the same layers; Qwen2's have biases for queries, keys and values alone, which "qkv_bias" means
    return (Qwen2Config if record.get("qkv_bias") else LlamaConfig)(**values)


def _check_embedding(source: str | Path, stored: Tensor | None, verifier: HFVerifier) -> None:
    """A head belongs to the verifier whose embedding it was trained with."""
    if stored is None:
        return
    own = verifier.model.get_input_embeddings().weight
    count = verifier.vocab_size
    if stored.shape[-1] != own.shape[-1] or stored.shape[0] < count:
        found = f"shape {tuple(stored.shape)}, expected at least {count} rows of {own.shape[-1]}"
    else:
        own, stored = own[:count].float().cpu(), stored[:count].float()
        difference = float((own - stored).norm() / own.norm().clamp(min=1e-12))
        if difference <= MAX_DIFFERENCE:
            return
        found = f"values {difference:.2f} apart (relative), expected below {MAX_DIFFERENCE}"
    raise MismatchError(
        f"EAGLE head {source}: {EMBEDDING} is not the embedding of verifier {verifier.name}: {found}; use the verifier "
        "it was trained for"
    )


def _folder(source: str | Path) -> Path | None:
    path = Path(source).expanduser()
    return path if path.is_dir() else cached_folder(str(source))


def _existing(source: str | Path) -> Path:
    folder = _folder(source)
    if folder is None:
        raise ConfigError(
            f"EAGLE head {str(source)!r}: no such folder, and not in the local hub cache; correct the path, or fetch a "
            f"hub id: {download_command(str(source))}"
        )
    return folder


def _weights(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise CorruptFileError(f"EAGLE head {folder}: no model.safetensors or pytorch_model.bin; fetch the head again")


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head's file. A pickle is read with ``weights_only``: it can hold tensors, and run nothing."""
    path = _weights(folder)
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CorruptFileError(f"{path}: not a complete file of tensors ({error}); fetch the head again") from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CorruptFileError(f"{path}: expected a table of tensors; fetch the head again")
    return {name: tensor for name, tensor in found.items() if not name.endswith(UNUSED)}


def _names(folder: Path) -> set[str]:
    """Names of the tensors; of a safetensors file without reading them."""
    path = _weights(folder)
    if path.suffix != ".safetensors":
        return set(_tensors(folder))
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path}: not a complete safetensors file ({error}); fetch the head again") from error


def _is_eagle3(names: set[str]) -> bool:
    return any(name.startswith(EAGLE3_PARTS) for name in names)
