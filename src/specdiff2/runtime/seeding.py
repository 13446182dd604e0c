"""Seeds and threads of a run: one call before anything random or numeric happens."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices). Decoding has its own source: ``rng.TorchRandomSource``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_threads(threads: int | None) -> int:
    """Use ``threads`` CPU threads; None leaves torch's choice (``OMP_NUM_THREADS``, else all cores)."""
    if threads is not None:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    return torch.get_num_threads()
