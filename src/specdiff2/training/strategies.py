"""DeepSpeed as one of Lightning's strategies, exact over windows and with checkpoints that fit any strategy.

What differs from ``lightning.pytorch.strategies.DeepSpeedStrategy``:

- it runs on the accelerator ``ds_cpu`` (``training.ds_cpu``) as well as on GPUs;
- the gradient of a step, a sum over windows, is divided by their number before clipping. DeepSpeed owns the gradients,
  but divides by a loss scale before it clips, and that scale may be set: ``divide_step``;
- a checkpoint is one plain file with whole tensors (``training.zero_state``), as every other strategy writes it. So a
  run goes on with another number of processes, another ZeRO stage or none at all, and it is read without running code;
- ``whole_weights`` gives all weights of a ZeRO-3 drafter to each rank for a while, to evaluate, decode or save it.

Only trainable parameters are in the optimizer, in gradient buckets and in checkpoints. The verifier is no part of the
module (``training.module``), so nothing of it is partitioned either. Checkpoints are gathered parameter by parameter
onto rank 0: fine for drafters (84 GB for all weights of a 7B model), not for models that no host memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from specdiff2.training.checkpoint_io import PlainCheckpoints
from specdiff2.training.ds_cpu import DeepSpeedCPU
from specdiff2.training.fsdp import Fsdp
from specdiff2.training.zero_state import full_optimizer_state, full_weights, set_state

REFUSALS = (MisconfigurationException, ValueError)  # what Lightning's Trainer raises for settings it cannot combine


class DeepSpeed(PlainCheckpoints, DeepSpeedStrategy):
    """ZeRO stage 1 (optimizer states partitioned), 2 (gradients too) or 3 (weights too).

    Args:
        stage: 1, 2 or 3.
        offload_optimizer: optimizer states and their step in main memory.
        offload_parameters: stage 3 only: weights wait in main memory.
        persistence_threshold: stage 3: smaller parameters stay whole on every rank; None is DeepSpeed's default.
        reduce_bucket_size: numbers reduced at once.
        timeout_minutes: after which a collective that not all ranks have reached fails.
    """

    def __init__(
        self,
        stage: int = 2,
        *,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        persistence_threshold: int | None = None,
        reduce_bucket_size: int = 200_000_000,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(
            stage=stage, offload_optimizer=offload_optimizer, offload_parameters=offload_parameters,
            pin_memory=offload_optimizer, reduce_bucket_size=reduce_bucket_size, logging_batch_size_per_gpu=1,
            timeout=timedelta(minutes=timeout_minutes),
        )  # fmt: skip
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = False  # torch's optimizer, the one that optimizer=... names
        if persistence_threshold is not None:
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = persistence_threshold
        if stage > 1:  # with stage 1 DeepSpeed would switch to an optimizer that cannot divide by the windows
            self.config["data_types"] = {"grad_accum_dtype": "fp32"}

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, DeepSpeedCPU):
            super(DeepSpeedStrategy, self).setup_environment()  # all but the check for CUDA
        else:
            super().setup_environment()

    def init_deepspeed(self) -> None:
        super().init_deepspeed()
        if not self.zero_stage_3:
            return
        import deepspeed

        # What stands before and behind the layers is read outside of its own modules' forward, in the loss too, and
        # the loss in chunks needs it whole from the start: gathered with the module as a whole, once a pass.
        layers = {id(parameter) for parameter in self._module.drafter.stack.layers.parameters()}
        for parameter in self._module.parameters():
            if id(parameter) not in layers:
                deepspeed.zero.register_external_parameter(self._module, parameter)
                parameter.is_external_param = True  # not cut up again by the module that owns it

    # -- one optimizer step -------------------------------------------------------------------------------------

    @property
    def ends_group(self) -> bool:
        """Whether the micro-batch at hand is the last one before an optimizer step."""
        return bool(self.deepspeed_engine.is_gradient_accumulation_boundary())

    def divide_step(self, num_windows: int) -> None:
        """Sum of window gradients -> mean, for the step that follows; no step at all without any window.

        Skipping leaves gradients of exactly 0 behind, which the next group adds to.
        """
        if num_windows:
            self.deepspeed_engine.optimizer.override_loss_scale(float(num_windows))
        else:
            self.deepspeed_engine.set_gradient_accumulation_boundary(False)

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        result = super().optimizer_step(*arguments, **options)
        self.deepspeed_engine.optimizer.override_loss_scale(1.0)  # it would multiply the next losses
        self.deepspeed_engine.set_gradient_accumulation_boundary(None)  # the engine counts micro-batches itself
        return result

    # -- checkpoints --------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return full_weights(self._module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full_optimizer_state(optimizer, self._module.trained_groups, keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Also the float32 weights: those that DeepSpeed made itself are rounded to bfloat16."""
        (optimizer,), (saved,) = self.optimizers, checkpoint["optimizer_states"]
        set_state(optimizer, self._module, self._module.trained_groups, checkpoint["state_dict"], saved)

    # -- ZeRO-3 -------------------------------------------------------------------------------------------------

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """All weights on every rank, and no collective inside, so that ranks may do different things with them.

        They must not be changed. All ranks enter and leave together.
        """
        if not self.zero_stage_3:
            yield
            return
        import deepspeed

        offload = self.deepspeed_engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self._module.parameters())):
            offload._remove_module_hooks()  # each would cut a module up again as soon as it has run
            offload.forward_hooks.clear()
            offload.backward_hooks.clear()
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module


def ddp(*, timeout_minutes: float = 30.0) -> DDPStrategy:
    """Lightning's DDP; every trained parameter gets a gradient on every rank (``training.module``)."""
    return DDPStrategy(timeout=timedelta(minutes=timeout_minutes))


def runs_in_step(strategy: Strategy) -> bool:
    """Whether all ranks must call the same modules: they gather each other's weights, or count gradients."""
    return isinstance(strategy, DeepSpeed | Fsdp)


@contextmanager
def whole_weights(strategy: Strategy) -> Iterator[None]:
    """``DeepSpeed.whole_weights`` and that of ``Fsdp``; every other strategy here has whole weights anyway."""
    if isinstance(strategy, DeepSpeed | Fsdp):
        with strategy.whole_weights(), torch.no_grad():
            yield
    else:
        yield
