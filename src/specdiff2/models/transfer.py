"""Small host values to the device the models run on, without making the host wait.

A copy from pageable memory to a GPU blocks the host; one from pinned memory is queued behind the work before it. On
the CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``values`` as an int64 tensor on ``device``."""
    if device.type == "cuda":
        return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, device=device)
