"""DrafterExport: write the drafter in its own format at the moments that matter.

    before/   at the end of the first (warm-up) stage: the drafter without streak-distillation
    best/     highest monitored value from then on (the drafter that ``before/`` holds takes part)
    last/     at the end of training
    step-N/   after every n-th step, where asked for: to measure how a drafter grows

A folder is only replaced by a complete one (``save_drafter`` writes atomically). A run that is resumed in another
folder takes all but ``last`` over from the one it continues.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from specdiff2.training.callbacks.streak_monitor import StreakMonitor
from specdiff2.training.strategies import whole_weights
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
DRAFTER_NAMES = ("before", "best", "last")


class DrafterExport(pl.Callback):
    """Exports on rank 0. Must stand behind the ``StreakMonitor`` in the list of callbacks, whose values it reads.

    Args:
        folder: where ``before``, ``best`` and ``last`` are written.
        save_drafter: ``save_drafter(drafter, folder, facts)``, e.g. ``models.pretrained.save_drafter``; facts are the
            step, the objective and, for ``best``, the monitored value.
        monitor: metric of the ``StreakMonitor`` to maximise.
        keep_every_n_steps: keep the drafter of every n-th optimizer step as ``step-N``; None keeps none of them.

    Attributes:
        exported: names of what this run has written or taken over.

    Raises:
        ConfigError: ``keep_every_n_steps`` is below 1, no ``StreakMonitor`` before this callback, or it has no such
            metric.
    """

    def __init__(
        self,
        folder: str | Path,
        save_drafter: Callable[[Any, Path, dict[str, Any]], Any],
        *,
        monitor: str = "val/streak",
        keep_every_n_steps: int | None = None,
    ) -> None:
        if keep_every_n_steps is not None and keep_every_n_steps < 1:
            raise ConfigError(f"drafter export: keep_every_n_steps={keep_every_n_steps}: expected at least 1, or null")
        self.folder, self.monitor, self.keep_every_n_steps = Path(folder), monitor, keep_every_n_steps
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.exported: set[str] = set()
        self._save_drafter = save_drafter
        self._exported_before = False
        self._kept: list[str] = []
        self._earlier: Path | None = None
        self._source: StreakMonitor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        earlier = trainer.callbacks[: trainer.callbacks.index(self)]
        self._source = next((callback for callback in earlier if isinstance(callback, StreakMonitor)), None)
        if self._source is None:
            raise ConfigError("drafter export: no StreakMonitor before it: list the StreakMonitor first in callbacks")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """The monitor has evaluated already (or remembers it): a metric that it lacks is found before training."""
        if self._source and self._source.history:
            self._value_of(self._source.history[-1])
        if self._earlier is not None:
            self._take_over(trainer, self._earlier)

    def _take_over(self, trainer: pl.Trainer, earlier: Path) -> None:
        before, best = ["before"] * self._exported_before, ["best"] * (self.best_value is not None)
        for name in [*before, *best, *self._kept]:
            source, target = earlier / name, self.folder / name
            if trainer.is_global_zero and not (target / "config.json").is_file() and (source / "config.json").is_file():
                scratch = self.folder / f".{name}.{os.getpid()}.tmp"
                shutil.copytree(source, scratch)
                scratch.replace(target)
            if trainer.strategy.broadcast((target / "config.json").is_file()):  # what rank 0 sees
                self.exported.add(name)
                continue
            log.warning("%s: not there any more, so this run goes on without it", source)
            if name == "best":
                self.best_value = self.best_step = None  # the next evaluation is the best one there is
            elif name in self._kept:
                self._kept.remove(name)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, warmup_steps = trainer.global_step, pl_module.schedule.warmup_steps
        if warmup_steps and step == warmup_steps and not self._exported_before:
            self._exported_before = True
            self._export(trainer, pl_module, "before")
        if step >= warmup_steps:
            self._export_if_best(trainer, pl_module)
        name = f"step-{step}"
        # several batches make one step under gradient accumulation
        if self.keep_every_n_steps and step and step % self.keep_every_n_steps == 0 and name not in self._kept:
            self._kept.append(name)
            self._export(trainer, pl_module, name)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._export_if_best(trainer, pl_module)
        self._export(trainer, pl_module, "last")

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_value": self.best_value,
            "best_step": self.best_step,
            "exported_before": self._exported_before,
            "kept": list(self._kept),
            "folder": str(self.folder.resolve()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_value, self.best_step = state_dict["best_value"], state_dict["best_step"]
        self._exported_before = state_dict["exported_before"]
        self._kept = list(state_dict.get("kept", ()))
        self._earlier = Path(state_dict["folder"]) if "folder" in state_dict else None

    def _export_if_best(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Only right after an evaluation of these very weights."""
        latest = self._source.history[-1] if self._source and self._source.history else None
        if latest is None or latest["step"] != trainer.global_step:
            return
        value = self._value_of(latest)
        if value is not None and (self.best_value is None or value > self.best_value):
            self.best_value, self.best_step = value, trainer.global_step
            self._export(trainer, pl_module, "best")

    def _value_of(self, point: dict[str, Any]) -> float | None:
        if self.monitor not in point:
            raise ConfigError(f"drafter export: monitor={self.monitor!r}: expected one of {sorted(point)[:4]} ...")
        return point[self.monitor]

    def _export(self, trainer: pl.Trainer, pl_module: Any, name: str) -> None:
        self.exported.add(name)
        stage = pl_module.schedule.stage_at(max(0, trainer.global_step - 1))
        facts: dict[str, Any] = {"step": trainer.global_step, "objective": repr(stage.objective)}
        if name == "best":
            facts[self.monitor] = self.best_value
        with whole_weights(trainer.strategy):  # of all ranks
            if trainer.is_global_zero:
                self._save_drafter(pl_module.drafter, self.folder / name, facts)
