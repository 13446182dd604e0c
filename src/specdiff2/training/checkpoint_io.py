"""Checkpoint files that are whole or not there.

Lightning writes through fsspec, whose temporary file lies in ``TMPDIR``; moving it to a run folder on another file
system is a copy over the old checkpoint, and a kill half way leaves neither. Here the temporary file lies beside the
target, is on disk before it is renamed, and a refused write is an error (Lightning's drops a ``PermissionError``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy


class PlainCheckpoints(Strategy):
    """For a strategy that cuts tensors up: checkpoints as every other one has them, one file of whole tensors, loaded
    before its own set-up."""

    restore_checkpoint_after_setup = Strategy.restore_checkpoint_after_setup
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict


class WholeFiles(TorchCheckpointIO):
    """Checkpoints of every strategy (``training.strategies``), on a local or shared file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Replace ``path`` in one step.

        Raises:
            OSError, RuntimeError: the disk is full or refuses (``runtime.storage`` tells); an old file is untouched.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
