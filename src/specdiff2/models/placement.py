"""Where a verifier's weights lie, and therefore where its keys and values must lie.

Three ways: one device (``device``), layers spread over devices (``device_map``, by accelerate, which moves activations
between them), and every matrix split over processes (``tp_plan``, by transformers under ``torchrun``; each process
holds its share of the heads and runs the same program). It decides nothing about memory: that is preflight's business.

Sources: transformers 5.24, integrations/accelerate.py and distributed/ (``tp_plan`` as an argument of
``from_pretrained`` is deprecated there in favour of ``DistributedConfig``); accelerate 1.15, big_modeling.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdiff2.launch import local_rank
from specdiff2.models.dtypes import pick_device
from specdiff2.models.kv_cache import Devices
from specdiff2.models.layer_stack import base_of
from specdiff2.types import ConfigError

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
DeviceMap = str | Mapping[str, int | str] | None
TensorPlan = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Placement:
    """``options`` for ``from_pretrained``, ``device`` that number formats are chosen for."""

    options: dict[str, Any]
    device: torch.device
    num_ranks: int = 1

    def check_model(self, config: PreTrainedConfig, name: str) -> None:
        """Raises ConfigError where heads or feed-forward columns cannot be split evenly over the ranks, or a map of
        modules names one that is not there or leaves some out."""
        device_map = self.options.get("device_map")
        if isinstance(device_map, Mapping) and "" not in device_map:
            _check_map(device_map, config, name)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            size = getattr(config, key, None)
            if size is not None and size % self.num_ranks:
                raise ConfigError(
                    f"verifier.tp_plan: {name} has {key}={size}, which {self.num_ranks} processes cannot share evenly; "
                    f"start as many as divide it (torchrun --nproc-per-node N)"
                )


def plan_placement(device: str | torch.device, device_map: DeviceMap = None, tp_plan: TensorPlan = None) -> Placement:
    """How to load onto ``device``, or by ``device_map``, or by ``tp_plan``.

    A GPU gets its tensors straight from the file (``device_map={"": device}``): never a whole model in main memory.

    Raises:
        ConfigError: two of them at once, a value that means nothing, a GPU that is not there, or no ``torchrun``.
    """
    if device_map is not None and tp_plan is not None:
        raise ConfigError("verifier.device_map and verifier.tp_plan are both set: choose one, set the other to null")
    if device_map is None and tp_plan is None:
        target = _numbered(pick_device(device))
        return Placement({} if target.type == "cpu" else {"device_map": {"": target}}, target)
    if device != "auto":
        chosen = f"device_map={device_map!r}" if tp_plan is None else f"tp_plan={tp_plan!r}"
        raise ConfigError(f"device={str(device)!r} and {chosen}: expected device=auto, or {chosen.split('=')[0]}=null")
    return _by_ranks(tp_plan) if device_map is None else _by_map(device_map)


def _by_map(device_map: str | Mapping[str, int | str]) -> Placement:
    if isinstance(device_map, str):
        if device_map in AUTOMATIC:
            _check_one_process(device_map)
            return Placement({"device_map": device_map}, pick_device("auto"))
        device_map = {"": device_map}
    if not device_map:
        raise ConfigError("device_map={}: expected null, a text or {module: device}")
    places: dict[str, int | str] = {}
    first = torch.device("cpu")
    for module, place in device_map.items():
        if place == "disk":
            places[module] = place
            continue
        try:
            device = _numbered(pick_device(f"cuda:{place}" if isinstance(place, int) else place))
        except ConfigError as error:
            raise ConfigError(
                f"device_map: {module!r}: {error}; a whole map may also be one of {', '.join(AUTOMATIC)}"
            ) from error
        # accelerate compares with the texts "cpu" and "disk", and numbers GPUs
        places[module] = str(device) if device.index is None else device.index
        first = device if first.type == "cpu" else first
    return Placement({"device_map": places}, first)


def _check_one_process(device_map: str) -> None:
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1 and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"device_map={device_map!r} spreads a verifier over all GPUs, and each of {num_processes} processes would "
            "do so: they cannot all hold one; use one process (trainer.devices=1), or verifier.device_map=null where "
            "the verifier fits on one GPU"
        )


def _check_map(device_map: Mapping[str, int | str], config: PreTrainedConfig, name: str) -> None:
    with torch.device("meta"):  # names alone
        model = AutoModelForCausalLM.from_config(config)
    names = {key for key, _ in (*model.named_modules(), *model.named_parameters())}
    unknown = sorted(device_map.keys() - names)
    if unknown:
        raise ConfigError(
            f"device_map: {unknown[0]!r}: {name} has no such module; its parts: {', '.join(_parts(model))}"
        )
    for tensor, _ in (*model.named_parameters(), *model.named_buffers()):
        if not any(tensor == key or tensor.startswith(f"{key}.") for key in device_map):
            raise ConfigError(f"device_map covers no {tensor} of {name}: name a place for each of {_parts(model)}")


def _parts(model: nn.Module) -> list[str]:
    """Modules that a map usually names, the layers shortened to one."""
    parts = [f"{top}.{name}" for top, module in model.named_children() for name, _ in module.named_children()]
    tops = [top for top, module in model.named_children() if not list(module.children())]
    return [f"{part}.N" if part.endswith(".layers") else part for part in parts] + tops


def _numbered(device: torch.device) -> torch.device:
    """``cuda`` with its number: that of this process where a launcher gave it one, so that ranks do not share GPU 0."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def _by_ranks(tp_plan: str | Mapping[str, str] | None) -> Placement:
    if isinstance(tp_plan, str) and tp_plan != "auto":
        raise ConfigError(f"tp_plan={tp_plan!r}: expected null, auto, or {{module: style}} as transformers has it")
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks < 2:
        script, gpus = Path(sys.argv[0]).name, max(torch.cuda.device_count(), 2)
        raise ConfigError(
            f"verifier.tp_plan={tp_plan!r} splits the verifier over processes, and this is a single one; start them: "
            f"torchrun --nproc-per-node {gpus} {script} ... (or set verifier.device_map=auto, which needs one process)"
        )
    plan = dict(tp_plan) if isinstance(tp_plan, Mapping) else tp_plan
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        distributed = DistributedConfig(tp_plan=plan, tp_size=num_ranks)
    except (ImportError, TypeError) as error:  # early 5.x had other arguments
        raise ConfigError(
            f"tp_plan: this transformers is too old ({error}); pip install 'transformers>=5.24'"
        ) from error
    return Placement({"distributed_config": distributed}, _numbered(pick_device("auto")), num_ranks)


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate moves activations (and offloaded weights) of this model: it must stay as it lies."""
    return hasattr(model, "_hf_hook")


def num_ranks(model: nn.Module) -> int:
    """Processes that share each matrix of the model; 1 for a whole one."""
    return getattr(model, "_tp_size", None) or 1


def is_movable(model: PreTrainedModel) -> bool:
    """Whether ``model.to(device)`` does what it says: one device, whole matrices, plain weights."""
    return not is_dispatched(model) and num_ranks(model) == 1 and not getattr(model, "is_quantized", False)


def check_copyable(model: PreTrainedModel, who: str) -> None:
    """A drafter made of the verifier's own layers, or reading their cache, needs them whole, plain and on one device.

    Raises:
        ConfigError: spread, split or quantised weights.
    """
    if is_movable(model):
        return
    found = "quantised" if getattr(model, "is_quantized", False) else "spread over devices or processes"
    raise ConfigError(
        f"{who} works on the verifier's own layers, and these are {found}: load the verifier plainly on one device "
        "(verifier.device_map=null, tp_plan=null, quantization=null), or use a drafter with weights of its own, such "
        "as model=diffucoder, with runtime.compile=false"
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where inputs go and outputs come back; weights may be elsewhere, or not in memory at all (``disk``)."""
    return _hook_device(model) or model.device


def cache_devices(model: PreTrainedModel) -> Devices:
    """The device of all layers, or one per layer: where each computes its attention.

    Raises:
        ConfigError: a spread model without the usual parts (``layers``, ``norm``, ``rotary_emb``).
    """
    if not is_dispatched(model):
        return model.device
    return [_layer_device(layer) for layer in base_of(model).layers]


def heads_per_rank(model: PreTrainedModel) -> int | None:
    """Key/value heads in this process, from the projection that makes them; None for a whole model.

    Raises:
        ConfigError: a split model whose attention has no ``k_proj`` of split rows.
    """
    if num_ranks(model) == 1:
        return None
    projection = getattr(getattr(base_of(model).layers[0], "self_attn", None), "k_proj", None)
    local = getattr(getattr(projection, "weight", None), "to_local", None)
    if local is None:
        raise ConfigError(f"tp_plan: {type(model).__name__} keeps no split k_proj; use device_map=auto for it")
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(local().shape[0]) // int(head_dim)


def _layer_device(layer: nn.Module) -> torch.device:
    attention = getattr(layer, "self_attn", layer)
    for module in (*attention.modules(), layer):
        device = _hook_device(module)
        if device is not None:
            return device
    return next(layer.parameters()).device


def _hook_device(module: nn.Module) -> torch.device | None:
    """Where accelerate's hook of this very module runs it."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        place = getattr(part, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return None
