"""StreakMonitor: streaks and both acceptance curves on held-out windows, during training.

Two views of the same fully masked windows, under the teacher's tokens x:

    val/streak, val/accept_rate@j, val/survival@j    expected: position k is accepted with probability q_k(x_k)
    val/streak_greedy, val/accept_rate_greedy@j, ..  T = 0: accepted iff argmax q_k equals x_k

``accept_rate@j`` is conditional (denominator: rounds that reached j), ``survival@j`` is not. Held-out windows are
windows of stored rollouts, not real decoding: ``DecodingProbe`` measures that.

Where the drafter offers its states, the logits of ``pl_module.loss_chunk_windows`` windows exist at once, as in
training; any other drafter gives those of a batch in one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.functional.streak import AcceptanceCurves, acceptance_sums, curves_from_sums, token_log_probs
from specdiff2.protocols import StatesDrafter
from specdiff2.training.callbacks.metric_log import StepTrigger, log_now
from specdiff2.training.chunked import even_chunks, select_windows
from specdiff2.training.strategies import whole_weights
from specdiff2.types import ConfigError, WindowBatch


class StreakMonitor(pl.Callback):
    """Evaluates the drafter every n optimizer steps, before the first, after the warm-up stage and after the last.

    Args:
        every_n_steps: optimizer steps between evaluations.
        max_batches: use only the first batches of held-out windows; None uses all.
        batches: held-out windows; None takes ``trainer.datamodule.val_dataloader()``.

    Attributes:
        history: one dict per evaluation: ``{"step": ..., "val/streak": ..., ...}``; undefined values are None.

    Raises:
        ConfigError: ``every_n_steps`` < 1, or no held-out windows.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        max_batches: int | None = None,
        batches: Iterable[WindowBatch] | None = None,
    ) -> None:
        self.max_batches = max_batches
        self.history: list[dict[str, Any]] = []
        self._batches = batches
        self._cached: list[WindowBatch] = []
        self._trigger = StepTrigger("streak monitor", every_n_steps)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step == 0:  # a resumed run has this point already
            self._run(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: WindowBatch, batch_idx: int
    ) -> None:
        # also right at the end of the warm-up stage, which reports compare with
        if self._trigger.due(trainer.global_step, extra_step=pl_module.schedule.warmup_steps):
            self._run(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not self.history or self.history[-1]["step"] != trainer.global_step:
            self._run(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "last_step": self._trigger.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self._trigger.last_step = state_dict["history"], state_dict["last_step"]

    def _run(self, trainer: pl.Trainer, pl_module: Any) -> None:
        metrics = self.evaluate(trainer, pl_module)
        self.history.append({"step": trainer.global_step, **metrics})
        log_now(trainer, metrics)

    @torch.no_grad()
    def evaluate(self, trainer: pl.Trainer, pl_module: Any) -> dict[str, float | None]:
        """Metrics over the held-out windows of all ranks."""
        if not self._cached:  # the same windows in every evaluation, collated once
            source = self._batches
            if source is None:
                source = trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
            self._cached = [batch for batch in islice(source, self.max_batches) if batch.num_windows]
        drafter = pl_module.drafter
        sums = torch.zeros((2, 3, drafter.gamma), dtype=torch.float64, device=pl_module.device)
        was_training = drafter.training
        drafter.eval()
        with trainer.precision_plugin.val_step_context(), whole_weights(trainer.strategy):
            for batch in self._cached:
                sums += batch_sums(drafter, batch.to(pl_module.device), pl_module.loss_chunk_windows)
        drafter.train(was_training)
        expected, greedy = trainer.strategy.reduce(sums, reduce_op="sum")
        curves = curves_from_sums(expected)
        if curves.num_windows == 0:
            raise ConfigError("streak monitor: 0 held-out windows: expected some; give the data module a val split")
        counts: dict[str, float | None] = {"val/num_windows": float(curves.num_windows)}
        return counts | _named(curves, "") | _named(curves_from_sums(greedy), "_greedy")


def batch_sums(drafter: Any, batch: WindowBatch, chunk_windows: int) -> Tensor:
    """Acceptance sums (``functional.streak.acceptance_sums``) of a batch: expected ones, then greedy ones."""
    batch = dataclasses.replace(batch, revealed=torch.zeros_like(batch.revealed))
    if not isinstance(drafter, StatesDrafter):
        return _sums(drafter, batch, drafter(batch))
    states, previous = drafter.window_states(batch), previous_tokens(batch)
    chunks = even_chunks(batch.num_windows, chunk_windows)
    return torch.stack(
        [
            _sums(drafter, select_windows(batch, chunk), drafter.states_logits(states[chunk], previous[chunk]))
            for chunk in chunks
        ]
    ).sum(0)


def _sums(drafter: Any, batch: WindowBatch, logits: Tensor) -> Tensor:
    targets = drafter.to_draft_vocab(batch.targets).masked_fill(~batch.valid, -1)
    expected = token_log_probs(logits, targets).exp()
    greedy = logits.argmax(-1) == targets
    return torch.stack([acceptance_sums(expected, batch.valid), acceptance_sums(greedy, batch.valid)])


def _named(curves: AcceptanceCurves, suffix: str) -> dict[str, float | None]:
    named: dict[str, float | None] = {f"val/streak{suffix}": curves.mean_streak}
    for position, (rate, survived) in enumerate(zip(curves.accept_rate, curves.survival, strict=True), start=1):
        named[f"val/accept_rate{suffix}@{position}"] = rate
        named[f"val/survival{suffix}@{position}"] = survived
    return named
