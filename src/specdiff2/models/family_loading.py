"""Load a masked-diffusion language model into the plain transformers class of its family. No remote code.

config.json is translated (``family_config``), tensors are compared with what the model needs before any value is
read, and the model is built without memory of its own and given the file's tensors, so 7B weights exist once. A
local folder never touches the network; a hub id is fetched by huggingface_hub. Knows no verifier and no drafter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdiff2.models.dtypes import pick_device, pick_dtype
from specdiff2.models.families import Family, FamilyModel, detect_family, get_family
from specdiff2.models.family_config import to_target_config
from specdiff2.models.family_tokenizers import find_mask_id, forbidden_ids, load_family_tokenizer
from specdiff2.models.family_weights import (
    EMBEDDING,
    HEAD,
    WeightFiles,
    check_tensors,
    is_derived,
    optional_names,
    target_name,
    target_shapes,
)
from specdiff2.models.hub import cached_folder, download_command, find_on_hub
from specdiff2.models.json_object import read_json_object
from specdiff2.models.loading import check_attention, resolve_source
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

# what a model folder needs: not the bin twins of safetensors, no images, no checkpoints of other frameworks
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*"]


def load_family_model(
    source: str | Path,
    *,
    revision: str | None = None,
    family: str | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str = "sdpa",
) -> FamilyModel:
    """The checkpoint ``source``, on the CPU, in eval mode.

    Args:
        source: a folder or a hub id like owner/name.
        revision: commit, tag or branch of a hub id.
        family: name in ``families.FAMILIES``; None tells it from config.json.
        dtype: of the weights; ``auto`` as for verifiers: bfloat16 where the machine's accelerator or CPU multiplies it.

    Raises:
        ConfigError: the checkpoint is missing (names the command that fetches it), of no known family, or its config
            asks for something that the family's class does not compute.
        CorruptFileError: a file is damaged.
        MismatchError: tensors or tokenizer are not those that config.json and the family promise.
    """
    check_attention(attn_implementation)
    torch_dtype = pick_dtype(dtype, pick_device("auto"))
    folder, commit = fetch_folder(source, revision)
    raw = read_config(folder / "config.json")
    kind = get_family(family) if family else detect_family(raw, source)
    config = to_target_config(raw, kind, source)
    tokenizer = load_family_tokenizer(folder)
    rows = int(config.vocab_size)
    mask_id = find_mask_id(raw, tokenizer, kind, rows, source)
    remedy = "fetch the model again" if commit is None else f"run `{download_command(str(source), revision)}`"
    model = build_model(config, WeightFiles(folder, remedy), kind, torch_dtype, attn_implementation)
    return FamilyModel(
        model=model,
        tokenizer=tokenizer,
        family=kind,
        mask_token_id=mask_id,
        forbidden_ids=forbidden_ids(raw, tokenizer, kind, mask_id, rows),
        name=str(source),
        revision=commit,
        folder=folder,
    )


def read_family_config(
    source: str | Path, *, revision: str | None = None, family: str | None = None
) -> tuple[PreTrainedConfig, Family]:
    """The transformers config and the family of a checkpoint; of a hub id only config.json is fetched.

    Raises:
        ConfigError, CorruptFileError: as ``load_family_model``.
    """
    where = resolve_source(source)
    folder = Path(where) if Path(where).is_dir() else cached_folder(where, revision)
    if folder is None:
        folder = _download(find_on_hub(where, revision), revision, ["config.json"])
    raw = read_config(folder / "config.json")
    kind = get_family(family) if family else detect_family(raw, source)
    return to_target_config(raw, kind, source), kind


def fetch_folder(source: str | Path, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder with ``source``'s files, and its commit when it came from the hub.

    Raises:
        ConfigError: no such folder, or not in the cache and not to be had from the hub.
    """
    where = resolve_source(source)
    folder = Path(where if Path(where).is_dir() else find_on_hub(where, revision))
    if not folder.is_dir():
        folder = _download(where, revision, _WANTED)
        if not any(folder.glob("*.safetensors")):
            folder = _download(where, revision, [*_WANTED, "pytorch_model*.bin"])
    return folder, folder.name if folder.parent.name == "snapshots" else None


def build_model(
    config: PreTrainedConfig, weights: WeightFiles, family: Family, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    """The model of ``config`` with the tensors of ``weights``, checked by name first; its rotary buffers stay float32.

    Raises:
        MismatchError: tensors are missing, unknown or misshapen.
        CorruptFileError: a weight file cannot be read.
    """
    model = skeleton(config, attn_implementation)
    check_tensors(weights.shapes(), target_shapes(model), optional_names(config), family, weights.folder)
    stored = weights.load()
    tensors: dict[str, Tensor] = {}
    while stored:  # taken out one by one, so that a conversion holds one tensor twice and not the model
        name, tensor = stored.popitem()
        if not is_derived(name):
            tensors[target_name(name, family)] = tensor.to(dtype)
    if config.tie_word_embeddings:
        _tie(tensors, weights.folder)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    _restore_buffers(model)
    model.config.dtype = dtype
    return model.eval()


def skeleton(config: PreTrainedConfig, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """The model of ``config`` on the meta device: every name and shape, no memory and no values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)


def _tie(tensors: dict[str, Tensor], folder: Path) -> None:
    """One tensor for embedding and head, which a file may hold once or twice."""
    embedding = tensors[EMBEDDING]
    if HEAD in tensors and not torch.equal(tensors[HEAD], embedding):
        raise MismatchError(f"{folder}: config.json ties head and embedding, but their stored values differ")
    tensors[HEAD] = embedding


def _restore_buffers(model: PreTrainedModel) -> None:
    """Buffers that no file holds (rotary frequencies) were built without memory: build their modules again."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, child = name.rpartition(".")
            rebuilt: nn.Module = type(module)(config=model.config)  # type: ignore[call-arg]
            setattr(model.get_submodule(parent), child, rebuilt)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise CorruptFileError(f"{left[0]}: neither the checkpoint nor the config gives it a value")


def read_config(path: Path) -> dict[str, Any]:
    """config.json as it is.

    Raises:
        ConfigError: there is none.
        CorruptFileError: it is not a JSON object.
    """
    if not path.is_file():
        raise ConfigError(f"{path.parent}: holds no config.json; expected a model folder, fetch the model again")
    return read_json_object(path)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of a hub repository's files, fetched now (``models.hub`` has just asked that it is there)."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: fetching it failed: {error}\nTry: {download_command(name, revision)}, and copy the Hugging Face "
            "cache, or the folder, to this machine"
        ) from error
