"""Send metrics of one step to every logger at once, whatever ``log_every_n_steps`` says."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch

from specdiff2.types import ConfigError


def log_now(trainer: pl.Trainer, metrics: Mapping[str, float | None]) -> None:
    """Log to all loggers, and make the values readable in ``trainer.callback_metrics`` (checkpoint monitors).

    Undefined values (None) are left out: files never hold NaN.
    """
    defined = {name: float(value) for name, value in metrics.items() if value is not None}
    for logger in trainer.loggers:
        logger.log_metrics(defined, step=trainer.global_step)
    # the property hands out Lightning's own dictionary; module.log would not reach it outside of batches
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in defined.items()})


class StepTrigger:
    """Due once for each optimizer step that is a multiple of ``every_n_steps``, not once per accumulated batch.

    Raises:
        ConfigError: ``every_n_steps`` < 1.
    """

    def __init__(self, owner: str, every_n_steps: int) -> None:
        if isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ConfigError(f"{owner}: every_n_steps={every_n_steps!r}: expected an integer >= 1")
        self.every_n_steps = every_n_steps
        self.last_step = 0

    def due(self, step: int, extra_step: int = 0) -> bool:
        if step == self.last_step or (step % self.every_n_steps and step != extra_step):
            return False
        self.last_step = step
        return True
