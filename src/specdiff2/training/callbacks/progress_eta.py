"""ProgressEta: one progress line over optimizer steps with the time left, the stage, loss and streak."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

from specdiff2.training.callbacks.metric_log import StepTrigger


class ProgressEta(pl.Callback):
    """Replaces Lightning's per-epoch bar (``enable_progress_bar=False``), whose time left is that of an epoch.

    In a log file (no terminal) it writes a line every 30 s instead of redrawing.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._trigger = StepTrigger("progress", 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        self._bar = tqdm(
            total=int(steps) if steps != float("inf") else None,
            initial=trainer.global_step,
            desc="train",
            unit="step",
            file=sys.stderr,
            disable=not trainer.is_global_zero,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
            dynamic_ncols=True,
        )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._trigger.due(trainer.global_step):
            return
        self._bar.set_description(pl_module.schedule.stage_at(trainer.global_step - 1).label, refresh=False)
        shown = {name: trainer.callback_metrics.get(name) for name in ("train/loss", "train/streak", "val/streak")}
        postfix = {name: f"{float(value):.3f}" for name, value in shown.items() if value is not None}
        self._bar.set_postfix(postfix, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
