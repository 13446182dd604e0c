"""A callback for trainings that a test interrupts: a quick machine would end them before the test has had its turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

PAUSE_S = 0.15


def brake_options(file: Path) -> list[str]:
    """Of ``train.py``, whose process must find ``tests``; the test removes the file."""
    file.touch()
    return ["+callbacks.brake._target_=tests.braked_steps.Brake", f"+callbacks.brake.file={file}"]


class Brake(pl.Callback):
    """Waits before each step while ``file`` is there; what is trained stays the same."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._file.exists():
            time.sleep(PAUSE_S)
