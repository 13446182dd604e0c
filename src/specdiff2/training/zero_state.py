"""Whole weights and optimizer states of a DeepSpeed (ZeRO) engine, in the layout that torch gives a single process.

ZeRO cuts every parameter group into one flat piece per rank. Here the pieces become tensors by name again, and back, so
that a checkpoint neither knows how many processes wrote it nor by which strategy. All ranks must call these functions
together. Only trainable parameters have such state; frozen ones are never touched. Uses DeepSpeed's own accessors
(``deepspeed.utils.safe_get_full_fp32_param`` and its siblings) and knows no Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

Groups = Sequence[Sequence[nn.Parameter]]


def full_weights(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """float32 weights of the trainable parameters, on the CPU; empty where not ``keep`` (which still takes part)."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:  # one at a time: never all of them on one device
            whole = safe_get_full_fp32_param(parameter)
            if keep:
                weights[name] = whole.detach().cpu().clone()
    return weights


def full_optimizer_state(zero: Any, groups: Groups, *, keep: bool) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` of torch holds, over the parameters of ``groups`` (those the optimizer got)."""
    from deepspeed.utils import safe_get_full_optimizer_state

    flat_state = zero.optimizer.state.get(_flat_parts(zero)[0], {})  # of all parts: the same keys and step counts
    _link_states(zero)
    parameters = [parameter for group in groups for parameter in group]
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        entry: dict[str, Any] = {}
        for key, value in flat_state.items():
            if is_scalar(value):
                entry[key] = copy.deepcopy(value)
                continue
            whole = safe_get_full_optimizer_state(parameter, key)
            if keep:
                entry[key] = whole.detach().cpu().clone()
        if entry and keep:
            state[index] = entry
    return {"state": state, "param_groups": _group_records(zero, groups)}


def set_state(zero: Any, module: nn.Module, groups: Groups, weights: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Put what the two functions above gave into this rank's pieces, whatever number of ranks gave it."""
    for group, record in zip(zero.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in record.items() if key != "params"})
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _put(parameter, weights[name])
    if not saved["state"]:  # saved before the first step
        return
    example = saved["state"][0]
    for flat in _flat_parts(zero):
        zero.optimizer.state[flat] = {
            key: copy.deepcopy(value) if is_scalar(value) else torch.zeros_like(flat) for key, value in example.items()
        }
    _link_states(zero)
    for index, parameter in enumerate(parameter for group in groups for parameter in group):
        for key, value in saved["state"][index].items():
            if not is_scalar(value):
                _put(parameter, value, key)


def _flat_parts(zero: Any) -> list[Tensor]:
    """This rank's flat float32 pieces: what the wrapped torch optimizer really optimizes."""
    found = getattr(zero, "fp32_partitioned_groups_flat", None)  # stage 3
    return list(zero.single_partition_of_fp32_groups if found is None else found)


def _link_states(zero: Any) -> None:
    """Let stages 1 and 2 find the states of single parameters: they look once, after stepping the first group alone."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def is_scalar(value: Any) -> bool:
    """A step count, not a moment."""
    return not isinstance(value, Tensor) or value.dim() == 0


def _group_records(zero: Any, groups: Groups) -> list[dict[str, Any]]:
    """Learning rate, weight decay, ... of each group, with the numbers of its parameters."""
    records, start = [], 0
    for group, parameters in zip(zero.param_groups, groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        records.append(settings | {"params": list(range(start, start + len(parameters)))})
        start += len(parameters)
    return records


def _put(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """This rank's piece of a weight, or of an optimizer state."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):  # stages 1 and 2
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return
    # stage 3: the pieces are equally long, the last one padded, which DeepSpeed's own setter of whole tensors forgets
    group = parameter.ds_process_group  # type: ignore[attr-defined]
    size, flat = parameter.ds_tensor.numel(), value.flatten()  # type: ignore[attr-defined]
    rank = torch.distributed.get_rank(group)
    missing = size * torch.distributed.get_world_size(group) - flat.numel()
    piece = nn.functional.pad(flat, (0, missing))[rank * size : (rank + 1) * size]
    if key is None:
        utils.safe_set_local_fp32_param(parameter, piece)
    else:
        utils.safe_set_local_optimizer_state(parameter, piece, key)
