"""Wall-clock laps of a decoding round.

Knows nothing of decoding: it only makes sure that work queued on an accelerator is charged to the stage that started
it. A lap waits for that work; the stages of a round are marked in the queue itself (CUDA events) and read once, at the
end of the round, so that the host may run ahead in between.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Consecutive laps; every moment between construction and the latest lap belongs to exactly one lap."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        """``device``: where the models run; None means CPU. ``lap`` and ``laps`` wait for CUDA, ``mark`` does not."""
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._marks: list[Any] = []
        self._last = self._now()
        self._last_event = self._event()

    def mark(self) -> None:
        """The end of a stage, without waiting for queued work; ``laps`` tells its length."""
        self._marks.append(self._event())

    def laps(self) -> list[float]:
        """Seconds of the stages since the previous ``laps`` (or ``lap``): one per ``mark``, and the time after the
        last. Waits for queued work once."""
        self.mark()
        times, self._marks = self._marks, []
        if self._device.type != "cuda":
            points = [self._last, *times]
            self._last = points[-1]
            return [end - start for start, end in pairwise(points)]
        now = self._now()  # synchronises: every event has happened
        events = [self._last_event, *times]
        self._last, self._last_event = now, events[-1]
        return [start.elapsed_time(end) / 1000.0 for start, end in pairwise(events)]

    def lap(self) -> float:
        """Seconds since the previous lap (or since construction)."""
        now = self._now()
        elapsed_s, self._last = now - self._last, now
        self._last_event = self._event()
        return elapsed_s

    def _event(self) -> Any:
        """Now, on the clock of the device."""
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()
