"""Write a (trained, merged) model back in the layout of its family's authors, so that their own tools read it.

Tensors go back under the authors' names, in safetensors shards with an index; config.json (with its ``auto_map``),
tokenizer files, remote code files and licence are copied from the base checkpoint as they are. Nothing of them is run.
Knows nothing of adapters: merge them first.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdiff2.models.families import FamilyModel
from specdiff2.models.family_config import to_target_config
from specdiff2.models.family_loading import read_config, skeleton
from specdiff2.models.family_weights import (
    BIN_INDEX,
    SAFE_FILE,
    SAFE_INDEX,
    check_tensors,
    family_tensor_name,
    optional_names,
    target_shapes,
)
from specdiff2.models.safe_folder import is_taken, replace_folder
from specdiff2.types import ConfigError

MAX_SHARD_BYTES = 5 * 10**9  # what the hub's own tools use
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py")
_COPIED_STEMS = ("LICENSE", "NOTICE")


def write_family_layout(
    model: PreTrainedModel, base: FamilyModel, out: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """Write ``model``, a changed copy of ``base.model``, to the new or empty folder ``out``; its absolute path.

    Args:
        max_shard_bytes: of tensor data in one file; a larger tensor gets a file of its own.

    Raises:
        ConfigError: ``out`` holds something, or ``max_shard_bytes`` is not positive.
        MismatchError: the model has other tensors than the base (adapters that were not merged).
        SpecDiffError: writing failed; nothing is left behind.
    """
    out = Path(os.path.abspath(out))
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes}: expected at least 1")
    if is_taken(out):
        raise ConfigError(f"{out}: is not an empty folder; choose another one")
    raw = read_config(base.folder / "config.json")
    config = to_target_config(raw, base.family, base.folder)
    state = model.state_dict()
    check_tensors(
        {family_tensor_name(name, base.family): tuple(tensor.shape) for name, tensor in state.items()},
        target_shapes(skeleton(config)),
        optional_names(config),
        base.family,
        "the model to be written",
    )
    left_out = optional_names(config)  # a tied head is stored once, as the embedding
    tensors = {family_tensor_name(name, base.family): t for name, t in state.items() if name not in left_out}
    return replace_folder(out, partial(_write, tensors, raw, base.folder, max_shard_bytes), "model")


def _write(tensors: dict[str, Tensor], config: dict[str, Any], base: Path, limit: int, out: Path) -> None:
    for file in sorted(base.iterdir()):
        if file.is_file() and (file.suffix in _COPIED_SUFFIXES or file.stem.upper().startswith(_COPIED_STEMS)):
            shutil.copyfile(file, out / file.name)  # a hub cache holds links: their targets are copied
    for index in (SAFE_INDEX, BIN_INDEX):
        (out / index).unlink(missing_ok=True)
    _fix_dtype(out / "config.json", config, next(iter(tensors.values())).dtype)
    shards = _shards(tensors, limit)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = SAFE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        table = {name: tensors[name].detach().to("cpu").contiguous() for name in names}
        save_file(table, out / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_num_bytes, tensors.values()))}, "weight_map": weight_map}
        (out / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _fix_dtype(path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json stays byte for byte, unless it names another dtype than the weights now have."""
    stored = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if config.get(key) not in (None, stored)]
    if keys:
        path.write_text(json.dumps({**config, **dict.fromkeys(keys, stored)}, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut so that no group exceeds ``limit`` bytes unless it is one tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + _num_bytes(tensor) > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _num_bytes(tensor)
    return groups


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
