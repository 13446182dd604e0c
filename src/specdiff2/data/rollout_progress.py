"""How far the filling of a store is: a bar on the terminal, and a small JSON file a writer in the store's folder."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdiff2.data.rollout_files import write_json_atomic

_SECONDS_BETWEEN_FILES = 5.0


class Progress:
    """Use as a context.

    Args:
        folder: of the store. The file is ``progress-<writer>.json``.
        num_planned, num_there: rollouts of the store in the end, and now.
        facts: what else the file says, such as the engine, as of the moment it is written; JSON-ready.
        visible: with the bar.
    """

    def __init__(
        self,
        folder: Path,
        writer: int,
        num_planned: int,
        num_there: int,
        *,
        facts: Mapping[str, Any],
        visible: bool,
    ) -> None:
        self._path = folder / f"progress-{writer:03d}.json"
        self._who, self._facts = {"writer": writer, "host": socket.gethostname(), "pid": os.getpid()}, facts
        self._num_planned, self._num_at_start = num_planned, num_there
        self._started, self._written = time.monotonic(), 0.0
        self._state: tuple[int, int, int] = (num_there, 0, 0)
        self._bar = tqdm(total=num_planned, initial=num_there, desc="rollouts", unit="rollout",
                         disable=not visible or num_there >= num_planned)  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._state[1]:
            write_json_atomic(self._path, self.record())

    def show(self, num_there: int, num_new: int | None = None, num_new_tokens: int | None = None) -> None:
        """``num_there``: of all writers; the others: of this process. None: as before.

        Raises:
            StorageError: the disk is full or refuses.
        """
        old = self._state
        self._state = (
            num_there,
            old[1] if num_new is None else num_new,
            old[2] if num_new_tokens is None else num_new_tokens,
        )
        now = time.monotonic()
        self._bar.set_postfix_str(f"{self._state[2] / max(now - self._started, 1e-9):.0f} tokens/s", refresh=False)
        self._bar.update(num_there - old[0])
        if now - self._written > _SECONDS_BETWEEN_FILES:
            self._written = now
            write_json_atomic(self._path, self.record())

    def record(self) -> dict[str, Any]:
        """Rates of this process, and the seconds left at the rate of all of them; JSON-ready."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        num_there, num_new, num_new_tokens = self._state
        all_per_s = (num_there - self._num_at_start) / elapsed
        left = max(self._num_planned - num_there, 0)
        return {
            **self._who,
            **self._facts,
            "num_planned": self._num_planned,
            "num_there": num_there,
            "num_new": num_new,
            "num_new_tokens": num_new_tokens,
            "wall_time_s": round(elapsed, 3),
            "rollouts_per_s": round(num_new / elapsed, 3),
            "tokens_per_s": round(num_new_tokens / elapsed, 3),
            "eta_s": 0.0 if not left else round(left / all_per_s, 1) if all_per_s else None,
        }


def read_progress(folder: Path) -> list[dict[str, Any]]:
    """The files of all writers that the store has had; of one that wrote several times, the last."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("progress-*.json"))]
