"""Preemption: a scheduler's warning becomes a checkpoint at the end of the step, and the job goes on from there.

    SIGUSR2  the time limit is near, or the job is preempted (submitit, ``sbatch --signal=USR2@...``): checkpoint, end,
             and submitit's own handler gives the job back to the queue
    SIGTERM  the last seconds before Slurm kills the job: checkpoint and go on. Slurm requeues a preempted job itself
             when its grace time is over, but only if it still runs then; one that is cancelled is killed. A process
             cannot tell the two apart, and a requeue of its own would bring a cancelled job back.

Tried on Slurm 22.05. Idle outside a job of submitit or Slurm: Ctrl-C and SIGTERM do there what Lightning does.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class Preempted(SystemExit):
    """This run has written its checkpoint and ends, to be continued by the job that the scheduler starts next."""


class Preemption(pl.Callback):
    """Stands last in the list: what the other callbacks do at the end of a step belongs into the checkpoint.

    Raises:
        ConfigError: (in ``on_train_start``) no ``ModelCheckpoint``, so nothing says where to save.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._replaced: dict[int, Any] = {}
        self._step = 0
        self._saved = self._ends = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Lightning has installed its handlers before; it restores what it found when training ends."""
        if not {"SUBMITIT_EXECUTOR", "SLURM_STEP_ID"} & os.environ.keys():
            return
        if trainer.checkpoint_callback is None:
            raise ConfigError("preemption: no callbacks.checkpoint, whose folder the checkpoint goes to: keep it, or "
                              "set callbacks.preemption=null")  # fmt: skip
        self._step = trainer.global_step
        self._replaced = {number: signal.signal(number, self._note) for number in SIGNALS}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if not self._replaced or step in (self._step, trainer.max_steps):  # within a step; what is left is the export
            return
        self._step, received = step, self._received
        if not self._any_rank(trainer, received is not None):
            return
        self._ends = self._any_rank(trainer, received == signal.SIGUSR2)
        if self._received == received:  # else the next step handles what has come meanwhile
            self._received = None
        checkpoint = trainer.checkpoint_callback
        path = Path(str(checkpoint.dirpath)) / f"{checkpoint.CHECKPOINT_NAME_LAST}{checkpoint.FILE_EXTENSION}"
        trainer.save_checkpoint(path)
        self._saved = True
        if trainer.is_global_zero:
            log.warning("signal from the scheduler: step %d is in %s", step, path)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The step's metrics are logged after the callbacks have seen its end; only now they are there to be kept.

        Raises:
            Preempted: on all ranks after a SIGUSR2 to any of them; the job waits in the queue.
        """
        if not self._saved:
            return
        self._saved = False
        for logger in trainer.loggers:
            logger.save()
        if self._ends:
            self._end(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}

    def _note(self, number: int, frame: Any) -> None:
        if self._received != signal.SIGUSR2:  # the stronger one
            self._received = number

    def _any_rank(self, trainer: pl.Trainer, mine: bool) -> bool:
        """All ranks stop at the same step, though signals reach them at different ones."""
        return trainer.strategy.reduce_boolean_decision(mine, all=False)

    def _end(self, trainer: pl.Trainer) -> None:
        """Hand over to the handler that was there before: submitit's gives the job back and exits on rank 0."""
        code: Any = 128 + signal.SIGUSR2
        error: Exception | None = None
        requeue: Callable[[int, Any], Any] | Any = self._replaced[signal.SIGUSR2]
        if trainer.is_global_zero and callable(requeue):
            try:
                requeue(signal.SIGUSR2, None)
            except SystemExit as end:
                code = end.code
            except Exception as refused:  # "timed-out too many times": a failure of the job, told by rank 0
                error = refused
        trainer.strategy.barrier("preemption")  # a rank that ends earlier takes the others with it
        if error is not None:
            raise error
        raise Preempted(code)
