"""Rollouts of a store, read one line at a time through a table of where each line is.

Only a few numbers stay in memory, whatever the size of the store: facts are read from the table and rollouts from
their shards when they are asked for. A snapshot: lines appended later are not seen. Building the table is
``data.rollout_indexing``; what the rollouts are for is nobody's business here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from specdiff2.data.lazy_rollouts import FACTS, LazyRollouts, rollout_facts
from specdiff2.data.rollout_files import decode_rollout
from specdiff2.types import CorruptFileError, Rollout

# of one line: where it is in its shard, and the facts of its rollout
ROW = np.dtype([("offset", "<i8"), ("num_bytes", "<i4"), *FACTS.descr])
MAX_OPEN_SHARDS = 256  # the usual limit of open files is 1024


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """What the table holds of one shard.

    Attributes:
        name: file name in the store.
        num_rows, num_bytes: complete lines, from the start of the file.
        digest: of these bytes.
        size, mtime_ns: of the file just before it was read; as long as they stay, so do its bytes.
    """

    name: str
    num_rows: int
    num_bytes: int
    digest: str
    size: int
    mtime_ns: int


class RolloutIndex(LazyRollouts):
    """All complete lines of a store, in the order of its shards.

    Args:
        folder: the store.
        table: ``ROW`` records of all shards, one after another, from the start of the file.
        shards: in the order of the table.
    """

    def __init__(self, folder: Path, table: IO[bytes], shards: Sequence[IndexedShard]) -> None:
        self.folder, self.shards = folder, tuple(shards)
        self._table = table
        self._first_rows = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self._open: dict[int, IO[bytes]] = {}

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def facts(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) == 0:
            return np.empty(0, dtype=ROW)
        first, stop = int(rows.min()), int(rows.max()) + 1
        if stop - first <= 4 * len(rows):  # close together: one read
            return self.records(first, stop)[rows - first]
        return np.concatenate([self.records(int(row), int(row) + 1) for row in rows])

    def read(self, row: int) -> Rollout:
        """Raises:
        CorruptFileError: the line has changed since it was indexed; names file and line.
        """
        number, where = self._place(row)
        offset, num_bytes, *facts = self.records(row, row + 1)[0].item()
        rollout = decode_rollout(os.pread(self._shard(number).fileno(), num_bytes, offset), where)
        if rollout_facts(rollout) != tuple(facts):
            raise CorruptFileError(f"{where}: the file has changed since it was indexed; run the same command again")
        return rollout

    def __iter__(self) -> Iterator[Rollout]:
        for shard in self.shards:
            with open(self.folder / shard.name, "rb") as file:
                for number in range(1, shard.num_rows + 1):
                    yield decode_rollout(file.readline(), f"{file.name}:{number}")

    def where(self, row: int) -> str:
        """File and line of a row."""
        return self._place(row)[1]

    def _place(self, row: int) -> tuple[int, str]:
        """Number of the shard that a row is in, and file and line as errors name them."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return number, f"{self.folder / self.shards[number].name}:{row - int(self._first_rows[number]) + 1}"

    def records(self, first: int, stop: int) -> np.ndarray:
        """The table from row ``first`` to the row before ``stop``."""
        # read, not mapped: mapped pages would count as this process's memory, more of them with every row it visits
        size = ROW.itemsize
        return np.frombuffer(os.pread(self._table.fileno(), (stop - first) * size, first * size), dtype=ROW)

    def _shard(self, number: int) -> IO[bytes]:
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_SHARDS:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = open(self.folder / self.shards[number].name, "rb", buffering=0)  # noqa: SIM115
        return self._open[number]
