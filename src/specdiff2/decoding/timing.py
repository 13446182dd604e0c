"""Wall-clock laps of a decoding round.

Knows nothing of decoding: it only makes sure that work queued on an accelerator is finished before the
clock is read, so that a forward pass is charged to the stage that started it.
"""

from __future__ import annotations

from time import perf_counter

import torch


class Stopwatch:
    """Consecutive laps; every moment between construction and the latest lap belongs to exactly one lap."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        """``device``: where the models run; CUDA is synchronised at every lap, None means CPU."""
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._last = self._now()

    def lap(self) -> float:
        """Seconds since the previous lap (or since construction)."""
        now = self._now()
        elapsed_s, self._last = now - self._last, now
        return elapsed_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()
