"""The weight files of a checkpoint: which files, which tensors, under which names; read and written in shards.

Reads safetensors (through ``model.safetensors.index.json`` or one file) or, where there are none,
``pytorch_model*.bin`` with ``weights_only=True``. Names and shapes are compared before a value is read. It knows the
one family that has names of its own (LLaDA) and nothing of tokenizers.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdiff2.models.families import Family
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

SAFE_INDEX, SAFE_FILE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX, BIN_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 4  # names listed in an error
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old Llama checkpoints store what rope_theta says anyway

# LLaDA name -> Llama name; "N" stands for the layer number
_LLADA_BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LLADA_TOP = {
    "model.transformer.wte.weight": EMBEDDING,
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": HEAD,
}
_LLADA_LAYER = re.compile(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.weight")
_LLAMA_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")


def target_name(name: str, family: Family) -> str:
    """A tensor's name in the transformers class; ``name`` itself where it is not known."""
    if family.name != "llada":
        return name
    match = _LLADA_LAYER.fullmatch(name)
    if match and match[2] in _LLADA_BLOCK:
        return f"model.layers.{match[1]}.{_LLADA_BLOCK[match[2]]}.weight"
    return _LLADA_TOP.get(name, name)


def family_tensor_name(name: str, family: Family) -> str:
    """The inverse of ``target_name``: the authors' name of a tensor of the transformers class."""
    if family.name != "llada":
        return name
    match = _LLAMA_LAYER.fullmatch(name)
    if match and match[2] in _BLOCK_BACK:
        return f"model.transformer.blocks.{match[1]}.{_BLOCK_BACK[match[2]]}.weight"
    return _TOP_BACK.get(name, name)


_BLOCK_BACK = {value: key for key, value in _LLADA_BLOCK.items()}
_TOP_BACK = {value: key for key, value in _LLADA_TOP.items()}


def target_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of ``model`` holds."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def optional_names(config: PreTrainedConfig) -> frozenset[str]:
    """Tensors that a file may leave out: the head, where it is the embedding."""
    return frozenset([HEAD] if config.tie_word_embeddings else [])


class WeightFiles:
    """The weight files of one folder, opened only as far as asked.

    Attributes:
        files: in order, without duplicates.
        is_safetensors: the kind of all of them.

    Args:
        remedy: what to do when something is missing.

    Raises:
        ConfigError: no weights, or a file named by the index is missing.
        CorruptFileError: an index that is not JSON.
    """

    def __init__(self, folder: Path, remedy: str = "fetch the model again") -> None:
        self.folder = folder
        for index, single, self.is_safetensors in ((SAFE_INDEX, SAFE_FILE, True), (BIN_INDEX, BIN_FILE, False)):
            if (folder / index).is_file():
                self.listed = _read_index(folder / index)
                self.files = [folder / name for name in sorted(set(self.listed.values()))]
                break
            if (folder / single).is_file():
                self.listed, self.files = {}, [folder / single]
                break
        else:
            raise ConfigError(f"{folder}: holds no weights ({SAFE_FILE} or {SAFE_INDEX}); {remedy}")
        absent = [file.name for file in self.files if not file.is_file()]
        if absent:
            raise ConfigError(f"{folder}: lacks the weight file {absent[0]} ({len(absent)} missing); {remedy}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor. Reads headers only (safetensors).

        Raises:
            CorruptFileError: a damaged file, a tensor in two files, or an index that does not say what the files hold.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name, shape in self._shapes_of(file).items():
                if name in found:
                    raise CorruptFileError(f"{file}: holds {name} a second time; fetch the model again")
                found[name] = shape
        if self.listed:
            lost = sorted(set(self.listed) - set(found))
            if lost:
                raise CorruptFileError(
                    f"{self.folder}: {self.listed[lost[0]]} lacks {lost[0]} that the index promises; fetch it again"
                )
        return found

    def load(self) -> dict[str, Tensor]:
        """Every tensor, on the CPU, as stored.

        Raises:
            CorruptFileError: a file cannot be read.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            tensors.update(self._load_file(file))
        return tensors

    def _shapes_of(self, file: Path) -> dict[str, tuple[int, ...]]:
        if not self.is_safetensors:
            return {name: tuple(tensor.shape) for name, tensor in self._load_file(file).items()}
        try:
            with safe_open(file, framework="pt") as opened:
                return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(f"{file}: a damaged safetensors file ({error}); fetch it again") from error

    def _load_file(self, file: Path) -> dict[str, Tensor]:
        try:
            if self.is_safetensors:
                with safe_open(file, framework="pt") as opened:
                    return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CorruptFileError(f"{file}: cannot be read ({error}); fetch it again") from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise CorruptFileError(f"{file}: is no table of tensors; expected a state dict, fetch it again")
        return found


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    optional: frozenset[str],
    family: Family,
    source: object,
) -> None:
    """Compare what a checkpoint holds with what the model needs, under the model's names.

    Args:
        found: name in the file -> shape.
        expected: name in the model -> shape.
        optional: names that may be missing (a tied head).

    Raises:
        MismatchError: a tensor is missing, unknown (renamed, or of another architecture) or misshapen; names them as
            the authors do.
    """
    have = {target_name(name, family): shape for name, shape in found.items() if not _DERIVED.search(name)}
    missing = sorted(set(expected) - set(have) - optional)
    unknown = sorted(name for name in found if target_name(name, family) not in expected and not _DERIVED.search(name))
    wrong = [name for name in expected if name in have and have[name] != expected[name]]
    problems = []
    if missing:
        problems.append(f"missing: {_some([family_tensor_name(name, family) for name in missing])}")
    if unknown:
        problems.append(f"unknown: {_some(unknown)}")
    if wrong:
        told = [f"{family_tensor_name(n, family)} is {list(have[n])}, expected {list(expected[n])}" for n in wrong]
        problems.append(f"misshapen: {_some(told)}")
    if problems:
        raise MismatchError(
            f"{source}: its tensors are not those of a {family.name} model with this config.json. {'; '.join(problems)}"
            ". Nothing was loaded; fetch the model again, or name its family with family=..."
        )


def is_derived(name: str) -> bool:
    """Whether a stored tensor only repeats what the config says."""
    return _DERIVED.search(name) is not None


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{path}: no readable weight_map ({error}); fetch it again") from error
    if not isinstance(found, dict) or not found or any(Path(str(file)).name != file for file in found.values()):
        raise CorruptFileError(f"{path}: its weight_map should give a file name for each tensor; fetch it again")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
