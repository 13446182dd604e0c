"""A set of ids that takes 8 bytes an id, and one that has been seen is never forgotten.

Ten million ids as Python strings take over a gigabyte. Here each is its 64-bit digest, most of them in a sorted array.
Two ids of ten million have the same digest with probability 3e-6; the later one would be taken for the earlier one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_MAX_PENDING = 1 << 16  # ids in a Python set until they are sorted in


def digest(rollout_id: str) -> int:
    """64 bits that stand for the id, the same in every process."""
    return int.from_bytes(hashlib.blake2b(rollout_id.encode("utf-8"), digest_size=8).digest(), "big")


class IdDigests:
    """Remembers ids."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._pending: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._pending)

    def holds(self, ids: Sequence[str]) -> list[bool]:
        """Which of the ids are there."""
        return self._known([digest(one) for one in ids])

    def add(self, rollout_id: str) -> bool:
        """Whether it is new. Returns False for an id that is there already."""
        one = digest(rollout_id)
        (known,) = self._known([one])
        if not known:
            self._pending.add(one)
            # sorting in costs time with all ids: less often, the more there are
            if len(self._pending) > max(_MAX_PENDING, len(self._sorted) // 16):
                new = np.fromiter(self._pending, dtype=np.uint64, count=len(self._pending))
                self._sorted = np.sort(np.concatenate([self._sorted, new]))
                self._pending.clear()
        return not known

    def _known(self, wanted: list[int]) -> list[bool]:
        known = self._sorted_in(np.array(wanted, dtype=np.uint64)).tolist()
        return [old or one in self._pending for old, one in zip(known, wanted, strict=True)]

    def _sorted_in(self, wanted: np.ndarray) -> np.ndarray:
        if len(self._sorted) == 0:
            return np.zeros(len(wanted), dtype=bool)
        place = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        return self._sorted[place] == wanted
