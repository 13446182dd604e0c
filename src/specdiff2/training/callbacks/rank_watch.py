"""RankWatch: when a process of a training with several is killed, fails or hangs, the others say so and end.

Without it they wait half an hour in a collective and tell nothing. See ``training.rank_watch`` (what is told) and
``training.rank_watcher`` (the watching thread); this is their place in Lightning's loop.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed

from specdiff2.training.rank_watch import RankLostError
from specdiff2.training.rank_watcher import RankWatcher
from specdiff2.types import ConfigError

PAUSE_SHARE = 0.9  # of the process group's timeout: said before its own, less clear error
WORDS = ("gloo", "nccl", "connection", "timed out", "collective")  # of errors that a lost rank leads to


class RankWatch(pl.Callback):
    """Stands first in the list, so that the time which other callbacks take counts as a pause. Idle with one process.

    Args:
        run_folder: heartbeats go to its ``ranks/``; that of rank 0 counts for all.
        hang_timeout_s: a rank that does not move for so long hangs, in a training step; evaluations, exports and
            checkpoints have nearly the timeout of the process group.

    Raises:
        ConfigError: ``hang_timeout_s`` is below 1, or (in ``setup``) not below the process group's timeout.
    """

    def __init__(self, run_folder: str | Path, *, hang_timeout_s: float = 600.0) -> None:
        if not hang_timeout_s >= 1.0:
            raise ConfigError(f"rank watch: hang_timeout_s={hang_timeout_s!r}: expected at least 1 (second)")
        self.run_folder, self.hang_timeout_s = Path(run_folder), float(hang_timeout_s)
        self._watcher: RankWatcher | None = None
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # read when the process group is made

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        for thread in threading.enumerate():
            if isinstance(thread, RankWatcher):  # of an earlier job of a sweep, one that failed
                thread.retire()
        if trainer.world_size == 1:
            return
        timeout_s = (getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30)).total_seconds()
        if self.hang_timeout_s >= timeout_s:
            raise ConfigError(
                f"rank watch: hang_timeout_s={self.hang_timeout_s:g}: expected less than the process group's timeout "
                f"of {timeout_s:g} s"
            )
        run_folder, run = trainer.strategy.broadcast((str(self.run_folder.resolve()), uuid.uuid4().hex))
        pause_timeout_s = max(self.hang_timeout_s, PAUSE_SHARE * timeout_s)
        self._watcher = RankWatcher(
            Path(run_folder), run, trainer.global_rank, trainer.world_size, self.hang_timeout_s, pause_timeout_s
        )
        self._watcher.folder.mkdir(parents=True, exist_ok=True)
        retire_launcher_observer()
        self._watcher.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._move(trainer, "before the first step", is_pause=True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._move(trainer, "in the forward pass")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
        self._move(trainer, "in the backward pass, which sums gradients over ranks")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self._move(trainer, "in the optimizer step, which sums losses over ranks")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._move(trainer, "between two batches (evaluation, export, checkpoint, next batch)", is_pause=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._move(trainer, "at the end of training (evaluation, export)", is_pause=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Raises:
        RankLostError: instead of the error of a collective, where another rank turns out to be missing.
        """
        if self._watcher is None:
            return
        message = self._watcher.explain() if is_collective_error(exception) else None
        if message is not None:
            if "TORCHELASTIC_RUN_ID" in os.environ:  # the agent asks for what this rank does already
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for logger in trainer.loggers:  # Lightning does so after this hook
                logger.finalize("failed")
            raise RankLostError(message) from exception
        self._watcher.leave(f"{type(exception).__name__}: {str(exception).strip()[:500]}")

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self._watcher is not None and not self._watcher.is_leaving:
            self._watcher.finish()

    def _move(self, trainer: pl.Trainer, phase: str, *, is_pause: bool = False) -> None:
        if self._watcher is not None:
            self._watcher.move(trainer.global_step, phase, is_pause=is_pause)


def is_collective_error(error: BaseException) -> bool:
    """Whether an error may come from another rank's end. gloo raises plain ``RuntimeError``."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)


def retire_launcher_observer() -> None:
    """Send Lightning's own observer of the processes that it started home: it kills all of them without a word, the
    speaking one included, up to five seconds after one has ended. Without children to observe its thread ends."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._child_processes = []  # type: ignore[attr-defined]
