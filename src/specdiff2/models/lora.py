"""Low-rank adapters by peft: put into a causal LM in place, taken out as peft's own tensors, merged into its weights.

An adapted linear layer computes ``W x + alpha / rank * B A x`` (LoRA, arXiv 2106.09685). Defaults are those of
SpecDiff-2 (arXiv 2511.00606, B.3): rank 32, alpha 32, dropout 0.05 on all seven projections of a layer. Adapters are
float32 whatever the base is, so that small updates are not rounded away. Reads and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from specdiff2.models.drafter_files import check_tensors
from specdiff2.types import ConfigError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # peft's own files name modules from the PeftModel around the model
_ADAPTER = "default"  # peft's name for the only adapter; not part of tensor names in files


def add_lora(
    model: nn.Module, *, rank: int = 32, alpha: float = 32, dropout: float = 0.05, targets: Sequence[str] = TARGETS
) -> None:
    """Adapters beside every linear layer whose name ends in one of ``targets``; everything else is frozen.

    B starts at zero, so the model computes what it did before. A is drawn from torch's global generator.

    Raises:
        ConfigError: a value out of range, a target that no layer has, or the model has adapters already.
    """
    config = lora_config(rank=rank, alpha=alpha, dropout=dropout, targets=targets)
    if has_lora(model):
        raise ConfigError("add_lora: the model has adapters already; merge them first (merge_lora)")
    linears = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    unknown = [target for target in targets if target not in linears]
    if unknown:
        raise ConfigError(
            f"lora.targets: no linear layer is called {unknown[0]!r}; expected some of {', '.join(sorted(linears))}"
        )
    inject_adapter_in_model(config, model)
    for _, tensor in _adapter_tensors(model):
        tensor.data = tensor.data.float()  # peft gives them the dtype of the layer that they adapt
    model.train(model.training)  # new dropouts are active, whatever mode the model is in


def lora_config(
    *, rank: int, alpha: float, dropout: float, targets: Sequence[str], base_name: str | None = None
) -> LoraConfig:
    """peft's description of the adapters; ``base_name`` tells peft's readers which model they belong to.

    Raises:
        ConfigError: rank < 1, alpha <= 0, dropout outside [0, 1), or no targets.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"lora.rank={rank!r}: expected an integer >= 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"lora.alpha={alpha!r}: expected a finite number > 0; equal to the rank scales by 1")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"lora.dropout={dropout!r}: expected 0 <= dropout < 1")
    if isinstance(targets, str) or not targets or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"lora.targets={targets!r}: expected a list of layer names such as {', '.join(TARGETS)}")
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft annotates int and divides it by the rank
        lora_dropout=dropout,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
    )


def has_lora(model: nn.Module) -> bool:
    """Whether any layer of ``model`` has an adapter that is not merged."""
    return any(True for _ in _lora_layers(model))


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters under the names of peft's files, ``base_model.model.<module>.lora_A.weight`` [rank, in] and B.

    Raises:
        ConfigError: the model has none.
    """
    _require_lora(model, "save adapters")
    return {name: tensor.detach() for name, tensor in _adapter_tensors(model)}


def adapter_name(parameter: str) -> str:
    """What ``adapter_state`` calls the parameter of an adapter that ``named_parameters`` calls so."""
    return PREFIX + parameter.replace(f".{_ADAPTER}.weight", ".weight")


@torch.no_grad()
def load_adapter_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill the adapters of ``model`` (made by ``add_lora``) with ``tensors``, named as by ``adapter_state``.

    Raises:
        MismatchError: a tensor is missing, unknown or misshapen; the model is untouched then.
    """
    own = dict(_adapter_tensors(model))
    check_tensors(own, tensors, "the adapter")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Replace every adapted layer by a plain one with ``W + alpha / rank * B A``; in place.

    Computed on the CPU in float32 (or the layer's wider dtype) layer by layer and then rounded once to the layer's
    dtype: rounded products added to rounded weights would lose the small updates (SpecDiff-2, B.3).

    Raises:
        ConfigError: nothing is injected: merging would silently return the base.
    """
    _require_lora(model, "merge")
    for name, layer in list(_lora_layers(model)):
        base: Any = layer.get_base_layer()
        width = torch.promote_types(base.weight.dtype, torch.float32)
        down, up = (part[_ADAPTER].weight.to("cpu", width) for part in (layer.lora_A, layer.lora_B))
        base.weight.copy_(base.weight.to("cpu", width) + layer.scaling[_ADAPTER] * (up @ down))
        model.set_submodule(name, base)
    del model.peft_config  # peft marks an adapted model with it


# ---------------------------------------------------------------- inside
def _require_lora(model: nn.Module, action: str) -> None:
    if not has_lora(model):
        raise ConfigError(
            f"cannot {action}: no layer of the model has an adapter (merged already, or full fine-tuning); "
            "load the drafter with trainable=True to keep its adapters apart"
        )


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _adapter_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, layer in _lora_layers(model):
        yield f"{PREFIX}{name}.lora_A.weight", layer.lora_A[_ADAPTER].weight
        yield f"{PREFIX}{name}.lora_B.weight", layer.lora_B[_ADAPTER].weight
