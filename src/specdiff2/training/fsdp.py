"""FSDP2 as one of Lightning's strategies: weights, gradients and optimizer states in equal parts on all ranks.

As ZeRO-3 (``training.strategies.DeepSpeed``), with torch alone. Lightning offers it as ``ModelParallelStrategy``; its
older ``FSDPStrategy`` cannot clip by norm. What differs from Lightning's:

- the module is cut up here: one part per layer of the drafter, all the rest with the module as a whole. The last layer
  belongs to the rest: it is read piece by piece (``models.layer_stack.run_plain``), and first again in backward;
- in bf16-mixed weights are gathered in bfloat16, as DeepSpeed does; the parts stay float32, gradients are summed so;
- a checkpoint is one plain file with whole tensors, as every other strategy writes it, so a run goes on with another
  number of processes or another strategy.

Runs on GPUs and, through gloo, on CPU processes. torch: pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from specdiff2.training.checkpoint_io import PlainCheckpoints
from specdiff2.training.zero_state import is_scalar

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")  # where torch puts those of ``fully_shard``


class Fsdp(PlainCheckpoints, ModelParallelStrategy):
    """Everything that is trained, and what is frozen below it, in one part per rank.

    Args:
        timeout_minutes: after which a collective that not all ranks have reached fails.
    """

    def __init__(self, *, timeout_minutes: float = 30.0) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=timedelta(minutes=timeout_minutes)
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def partition(self) -> None:
        """Cut the module up, when it has its final weights' shapes (``LightningModule.configure_model``)."""
        module: Any = self.lightning_module
        half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False),
        }
        for layer in module.drafter.stack.layers[:-1]:
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(module, reshard_after_forward=False, **options)
        register_fsdp_forward_method(module, "training_step")  # all that reads weights in training

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """As ``DeepSpeed.whole_weights``, but in the dtype of the parts: float32 also in bf16-mixed."""
        module: Any = self.lightning_module
        modules = list(module.modules())
        parts = [
            (owner, name, part)
            for owner in modules
            for name, part in owner._parameters.items()
            if isinstance(part, DTensor)
        ]
        whole = {part: nn.Parameter(part.full_tensor(), part.requires_grad) for _, _, part in parts}
        hooks = [(one, kind, getattr(one, kind)) for one in modules for kind in HOOKS]
        for one, kind, _ in hooks:  # each would gather a module again, or cut it up
            setattr(one, kind, OrderedDict())
        for owner, name, part in parts:
            owner._parameters[name] = whole[part]
        try:
            yield
        finally:
            for owner, name, part in parts:
                owner._parameters[name] = part
            for one, kind, found in hooks:
                setattr(one, kind, found)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        saved = optimizer.state_dict()
        return saved | {"state": {index: self._whole(entry) for index, entry in saved["state"].items()}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module: Any = self.lightning_module
        parameters = dict(module.named_parameters())
        parts = {
            name: _part(tensor, parameters[name]) if name in parameters else tensor  # unknown ones are refused there
            for name, tensor in checkpoint["state_dict"].items()
        }
        module.load_state_dict(parts, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module: Any = self.lightning_module
        parameters = [parameter for group in module.trained_groups for parameter in group]
        (optimizer,), (saved,) = self.optimizers, checkpoint["optimizer_states"]
        state = {
            index: {key: value if is_scalar(value) else _part(value, parameters[index]) for key, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        optimizer.load_state_dict(saved | {"state": state})

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """On rank 0 whole tensors on the CPU, elsewhere nothing, but every rank takes part."""
        whole = {}
        for name, tensor in tensors.items():  # one at a time: never all of them on one device
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.is_global_zero:
                whole[name] = full.detach().cpu().clone() if isinstance(full, Tensor) else full
        return whole


def _part(whole: Tensor, like: Any) -> DTensor:
    """This rank's part of a tensor that all ranks have read."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
