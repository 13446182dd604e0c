"""DistillationModule: wires drafter, frozen verifier, objective schedule and optimizer into Lightning.

No mathematics here: losses come from ``objectives``, windows from the data module, metrics on held-out windows
from the callbacks. Three things need care and have their own files: what a checkpoint holds
(``training.checkpointing``), how losses are normalised (``training.window_mean``) and how the memory of head and loss
stays flat (``training.chunked``).

The verifier stays outside module registration: it is in no state_dict and no optimizer, and always in eval mode.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from specdiff2.data.seeding import stable_seed
from specdiff2.objectives import ObjectiveSchedule, part_names
from specdiff2.protocols import Objective, StatesDrafter
from specdiff2.training.checkpointing import TrainableOnlyState, describe_drafter, signature_of, verify_signature
from specdiff2.training.chunked import VerifierProbs, chunked_cross_entropy, chunked_objective, cross_entropy_sum
from specdiff2.training.fsdp import Fsdp
from specdiff2.training.optim import OptimizerFactory, SchedulerFactory, parameter_groups
from specdiff2.training.strategies import DeepSpeed, runs_in_step
from specdiff2.training.window_mean import WindowTotals, divide_gradients, one_window
from specdiff2.types import ConfigError, ObjectiveOutput, SamplingParams, SpecDiffError, WindowBatch


class Teacher(Protocol):
    """What training needs of the verifier (``models.verifier.HFVerifier`` has it)."""

    model: nn.Module

    def move_to(self, device: torch.device) -> None:
        """Move the weights where they can be moved."""
        ...

    def window_probs(self, batch: WindowBatch, draft_vocab_ids: Tensor, sampling: SamplingParams) -> Tensor:
        """Verifier probabilities along the teacher path, ``[window, gamma, draft_vocab]``."""
        ...


class DistillationModule(TrainableOnlyState, pl.LightningModule):
    """Trains a drafter on windows of the verifier's rollouts.

    Args:
        drafter: an ``nn.Module`` with the methods of ``protocols.TrainableDrafter``.
        verifier: needed by objectives with verifier probabilities (``streak_expected``, ``tv``, ``lk``) and online
            rollouts; None otherwise saves its memory.
        schedule: which objective trains at which optimizer step.
        optimizer: called with parameter groups, e.g. ``partial(torch.optim.AdamW, lr=1e-3)``.
        scheduler: called with the optimizer, e.g. ``partial(warmup_cosine, num_steps=2000)``; stepped with it.
        verifier_sampling: the law that ``verifier_probs`` follow; T=1 by default.
        refresh_rollouts: called as ``refresh_rollouts(step)`` after optimizer steps n, 2n, ...; it replaces the
            rollouts that the loader reads (online mode).
        refresh_every_n_steps: n above.
        prefix_loss_weight: adds this times the next-token cross-entropy of every sampled token of the prefix. A
            shifted drafter computes those rows anyway, and each is one more example of a window's first position.
        loss_chunk_windows: windows whose logits exist at once (``training.chunked``), for drafters that offer their
            states; fewer need less memory, many are a little faster.
        settings_digest: kept in checkpoints; a run in the same folder with the same one goes on with them.

    Raises:
        ConfigError: the schedule needs verifier probabilities and there is no verifier, a bad refresh interval, a
            negative prefix loss weight, or a bad chunk size.
    """

    def __init__(
        self,
        drafter: nn.Module,
        verifier: Teacher | None,
        schedule: ObjectiveSchedule,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        *,
        verifier_sampling: SamplingParams | None = None,
        refresh_rollouts: Callable[[int], None] | None = None,
        refresh_every_n_steps: int = 0,
        prefix_loss_weight: float = 0.0,
        loss_chunk_windows: int = 64,
        settings_digest: str | None = None,
    ) -> None:
        super().__init__()
        if not prefix_loss_weight >= 0.0:
            raise ConfigError(f"prefix_loss_weight={prefix_loss_weight!r}: expected >= 0; 0 leaves the prefix loss out")
        if schedule.needs_verifier_probs and verifier is None:
            raise ConfigError(f"{_names_of(schedule)}: verifier=None: expected one, to read its probabilities")
        if refresh_rollouts is not None and refresh_every_n_steps < 1:
            raise ConfigError(f"refresh_every_n_steps={refresh_every_n_steps!r}: expected >= 1 for online rollouts")
        if isinstance(loss_chunk_windows, bool) or loss_chunk_windows < 1:
            raise ConfigError(f"loss_chunk_windows={loss_chunk_windows!r}: expected an integer >= 1")
        self.drafter: Any = drafter
        object.__setattr__(self, "_verifier", verifier)  # never registered: see the module docstring
        self.schedule, self.prefix_loss_weight = schedule, prefix_loss_weight
        self.totals, self.num_windows_seen = WindowTotals(), 0
        self.loss_chunk_windows, self.settings_digest = loss_chunk_windows, settings_digest
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self._verifier_sampling = verifier_sampling or SamplingParams()
        self._refresh_rollouts, self._refresh_every_n_steps = refresh_rollouts, refresh_every_n_steps
        self._refreshed_at = 0
        self._group_started_s = 0.0
        self._dropout_seed, self._has_dropout = 0, False

    @property
    def verifier(self) -> Teacher | None:
        """The frozen teacher; not a submodule."""
        return self.__dict__["_verifier"]

    @property
    def _deepspeed(self) -> DeepSpeed | None:
        """The strategy, where it owns gradients and accumulation."""
        return self.trainer.strategy if isinstance(self.trainer.strategy, DeepSpeed) else None

    # -- set-up -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, Fsdp):
            self.trainer.strategy.partition()

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self.drafter.parameters())
        self.trained_groups = [list(group["params"]) for group in groups]
        optimizer = self._make_optimizer(groups)
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._dropout_seed = torch.initial_seed()
        self._has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0.0 for m in self.drafter.modules())
        if self.verifier is not None:
            self.verifier.model.requires_grad_(False).eval()
            self.verifier.move_to(self.device)

    def train(self, mode: bool = True) -> DistillationModule:
        super().train(mode)
        if self.verifier is not None:
            self.verifier.model.eval()
        return self

    # -- one micro-batch ----------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: WindowBatch, batch_idx: int) -> None:
        if self.totals.is_empty_group:
            self._group_started_s = time.perf_counter()
        self._refresh_if_due(self.global_step)
        if self._has_dropout:
            # from the place in the training, not from the generator's history: a resumed run drops the same values
            place = self.global_step, batch_idx % self.trainer.accumulate_grad_batches, self.global_rank
            torch.manual_seed(stable_seed("dropout", self._dropout_seed, *place))

    def _refresh_if_due(self, step: int) -> None:
        """Once per optimizer step, not once per accumulated batch."""
        if self._refresh_rollouts is None or step == self._refreshed_at or step % self._refresh_every_n_steps:
            return
        self._refreshed_at = step
        self._refresh_rollouts(step)

    def training_step(self, batch: WindowBatch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that Lightning's and DDP's own averaging cancel: a sum over windows."""
        if batch.num_windows == 0:
            self.totals.add_empty()
            return self._zero_loss(batch)
        output = self.objective_output(batch, self.schedule.stage_at(self.global_step).objective)
        self.totals.add(output)
        loss = output.loss_sum * (self.trainer.accumulate_grad_batches * self.trainer.world_size)
        alike = self.trainer.world_size == 1 or runs_in_step(self.trainer.strategy)
        return loss if alike else loss + self._zero_loss(batch)

    def objective_output(self, batch: WindowBatch, objective: Objective) -> ObjectiveOutput:
        """Drafter forward and objective. Only ``mdm``-like objectives see revealed tokens."""
        if objective.masking == "full":
            batch = dataclasses.replace(batch, revealed=torch.zeros_like(batch.revealed))
        use_prefix = self.prefix_loss_weight > 0.0 and self.training
        probs = self._verifier_probs if objective.needs_verifier_probs else None
        compute = self._loss_in_chunks if isinstance(self.drafter, StatesDrafter) else self._loss_at_once
        output, added = compute(batch, objective, probs, use_prefix)
        if not added:
            return output
        weights = self._added_weights()
        return dataclasses.replace(
            output,
            loss_sum=output.loss_sum + sum(weights[name] * loss for name, loss in added.items()),
            parts=(output.parts or {objective.name: output.loss_sum.detach()})
            | {name: loss.detach() for name, loss in added.items()},
        )

    def _added_weights(self) -> dict[str, float]:
        """Weights above 0 of the losses beside the objective: that of the prefix, and one that the drafter brings
        (``auxiliary_loss(batch, states)``, a sum over windows)."""
        weights = {"prefix": self.prefix_loss_weight}
        if hasattr(self.drafter, "auxiliary_loss"):
            weights[self.drafter.auxiliary_name] = self.drafter.auxiliary_weight
        return {name: weight for name, weight in weights.items() if weight > 0.0}

    def _loss_in_chunks(
        self, batch: WindowBatch, objective: Objective, probs: VerifierProbs | None, use_prefix: bool
    ) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
        """Objective and added losses, by name, of a drafter that offers its states."""
        drafter, added = self.drafter, dict[str, Tensor]()
        if use_prefix:
            states, prefix_states, next_tokens = drafter.window_and_prefix_states(batch)
            chunk_tokens = self.loss_chunk_windows * batch.targets.shape[1]
            added["prefix"] = chunked_cross_entropy(drafter, prefix_states, next_tokens, chunk_tokens)
        else:
            states = drafter.window_states(batch)
        if self.training and getattr(drafter, "auxiliary_name", None) in self._added_weights():
            added[drafter.auxiliary_name] = drafter.auxiliary_loss(batch, states)
        return chunked_objective(drafter, batch, states, objective, probs, self.loss_chunk_windows), added

    def _loss_at_once(
        self, batch: WindowBatch, objective: Objective, probs: VerifierProbs | None, use_prefix: bool
    ) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
        """The same for any other drafter: all logits in one piece."""
        drafter = self.drafter
        logits, *prefix = drafter.forward_with_prefix(batch) if use_prefix else (drafter(batch),)
        targets = drafter.to_draft_vocab(batch.targets)
        verifier_probs = None if probs is None else probs(batch)
        output = objective(logits, targets, batch.valid & ~batch.revealed, verifier_probs)
        if not use_prefix:
            return output, {}
        prefix_logits, next_tokens = prefix
        return output, {"prefix": cross_entropy_sum(prefix_logits, drafter.to_draft_vocab(next_tokens))}

    @torch.no_grad()
    def _verifier_probs(self, batch: WindowBatch) -> Tensor:
        assert self.verifier is not None  # checked at construction
        # the verifier keeps its own dtype: autocast would change the law it defines
        with torch.autocast(self.device.type, enabled=False):
            return self.verifier.window_probs(batch, self.drafter.draft_vocab_ids, self._verifier_sampling)

    def _zero_loss(self, batch: WindowBatch) -> Tensor:
        """Exactly 0 with a zero gradient for every parameter, so that no DDP rank waits for a missing one.

        Where weights are partitioned all ranks must also call the same modules, in the same order: one window, times 0.
        """
        if runs_in_step(self.trainer.strategy):
            output = self.objective_output(one_window(batch), self.schedule.stage_at(self.global_step).objective)
            return torch.nan_to_num(output.loss_sum) * 0.0
        trainable = (parameter for parameter in self.drafter.parameters() if parameter.requires_grad)
        return torch.stack([parameter.flatten()[0].float() * 0.0 for parameter in trainable]).sum()

    # -- one optimizer step -------------------------------------------------------------------------------------

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Runs after backward and before clipping: turn the sum over windows into the mean over all of them."""
        if self._deepspeed is not None and not self._deepspeed.ends_group:
            return  # it accumulates itself, and Lightning takes each micro-batch for a step
        elapsed_s = time.perf_counter() - self._group_started_s
        objective = self.schedule.stage_at(self.global_step).objective
        totals = self.totals.take(self.trainer.strategy, self.device, self._part_names(objective))
        if not math.isfinite(totals.loss_sum):  # before the step: parameters and earlier checkpoints stay usable
            raise SpecDiffError(
                f"train/loss={totals.loss_sum} at step {self.global_step}: expected a finite number; training "
                "diverged: start a new run with a lower optimizer.lr (a resumed run keeps that of its checkpoint)"
            )
        divide_gradients(self.trainer.strategy, optimizer, totals.num_windows)
        self.num_windows_seen += totals.num_windows
        metrics = totals.metrics()
        if objective.masking != "full":
            metrics.pop("train/streak", None)
        metrics["train/stage"] = float(self.schedule.index_at(self.global_step))
        metrics["train/lr"] = optimizer.param_groups[0]["lr"]
        metrics["train/windows_per_s"] = totals.num_windows / elapsed_s
        self.log_dict(metrics)

    def _part_names(self, objective: Objective) -> tuple[str, ...]:
        """What ``objective_output`` reports apart: the parts of a sum, and added losses beside their objective."""
        names, added = part_names(objective), self._added_weights()
        return (*(names or (objective.name,)), *added) if added else names

    def on_train_epoch_end(self) -> None:
        if self.num_windows_seen == 0:
            raise ConfigError(
                "training data: 0 trainable windows in a whole epoch: expected rollouts with at least one completion "
                "token inside the draft vocabulary; check the rollout store and gamma"
            )

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["specdiff2"] = signature_of(self.drafter) | {
            "schedule": self.schedule.describe(),
            "num_windows_seen": self.num_windows_seen,
            "refreshed_at": self._refreshed_at,
            "settings": self.settings_digest,
            "drafter": describe_drafter(self.drafter),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        verify_signature(self.drafter, checkpoint.get("specdiff2", {}))
        self.num_windows_seen = checkpoint["specdiff2"]["num_windows_seen"]
        self._refreshed_at = checkpoint["specdiff2"]["refreshed_at"]


def _names_of(schedule: ObjectiveSchedule) -> str:
    """The objectives that need verifier probabilities, for a message."""
    return ", ".join(f"objective {s.objective.name}" for s in schedule.stages if s.objective.needs_verifier_probs)
