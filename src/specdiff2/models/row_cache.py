"""A cache of several texts of different lengths, each row of which is also a cache of its own.

A pass over all rows writes behind the longest one; what it wrote for a row stands at the same slots for all, with a gap
that nobody may see behind the shorter rows (``functional.ragged_masks``). The row then gathers what it keeps to its own
end. So no attention layer has to know of lengths, and a row alone can be prefilled, scored and moved as any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdiff2.models.kv_cache import PreallocatedCache


class SharedCache(PreallocatedCache):
    """``rows[i]`` is row i, in the same memory; ``length`` counts the slots that a pass over all rows comes behind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows = [RowCache(self, row) for row in range(self.batch)]

    def begin(self, lengths: Sequence[int], width: int) -> int:
        """Be ready for a pass of ``width`` columns behind rows of these lengths; the first slot it writes."""
        start = max(lengths)
        self.reserve(start + width)
        self.filled(start)
        return start

    def reserve(self, capacity: int) -> None:
        self._cover_rows()
        super().reserve(capacity)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._cover_rows()
        self.rows = [self.rows[row] for row in rows]
        super().keep_rows(rows)

    def row_storages(self, row: int) -> list[Tensor]:
        """The memory of one row."""
        return [storage[:, row : row + 1] for storage in self._storages]

    def _cover_rows(self) -> None:
        """Let ``length``, which says how much is copied when memory moves, reach over every row."""
        self.filled(max(self.length, *(row.length for row in self.rows)))

    def _set_storages(self, storages: list[Tensor]) -> None:
        super()._set_storages(storages)
        for row, cache in enumerate(self.rows):
            cache._set_storages(self.row_storages(row))


class RowCache(PreallocatedCache):
    """One row of a ``SharedCache``, as a cache of one text. Follows its row when that moves."""

    def __init__(self, shared: SharedCache, row: int) -> None:
        self.shared = shared
        self._adopt(shared.row_storages(row))

    def reserve(self, capacity: int) -> None:
        self.shared.reserve(capacity)
