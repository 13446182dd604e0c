"""Sequences of rollouts that are read one at a time: length and id of every row are known without reading it.

Training needs only these facts beforehand (which rows are usable, how long they are, whose they are). They are numbers
in arrays, so that ten million rollouts cost a few bytes each; lists of rollouts give the same facts. Knows no file.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from specdiff2.data.id_digests import digest
from specdiff2.types import Rollout

# of one row: tokens of prompt and completion, and 8 bytes for its id
FACTS = np.dtype([("num_prompt", "<i4"), ("num_completion", "<i4"), ("digest", "<u8")])
CHUNK = 1 << 16  # rows whose facts are in memory at once


class LazyRollouts(Sequence[Rollout], ABC):
    """Rollouts of which ``facts`` are cheap and reading is not."""

    @abstractmethod
    def facts(self, rows: np.ndarray) -> np.ndarray:
        """``[row]`` with the fields of ``FACTS`` (and maybe more) for these rows, each in 0 .. len - 1."""

    @abstractmethod
    def read(self, row: int) -> Rollout:
        """The rollout of a row in 0 .. len - 1."""

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        rows = range(len(self))[index]
        return self.read(rows) if isinstance(rows, int) else [self.read(row) for row in rows]


class ChosenRollouts(LazyRollouts):
    """Some rows of another sequence, in the order given."""

    def __init__(self, rollouts: Sequence[Rollout], rows: np.ndarray) -> None:
        self._rollouts, self._rows = rollouts, rows

    def __len__(self) -> int:
        return len(self._rows)

    def facts(self, rows: np.ndarray) -> np.ndarray:
        return row_facts(self._rollouts, self._rows[rows])

    def read(self, row: int) -> Rollout:
        return self._rollouts[int(self._rows[row])]


def row_facts(rollouts: Sequence[Rollout], rows: np.ndarray) -> np.ndarray:
    """Facts ``[row]`` of these rows of any sequence of rollouts."""
    if isinstance(rollouts, LazyRollouts):
        return rollouts.facts(rows)
    return np.array([rollout_facts(rollouts[int(row)]) for row in rows], dtype=FACTS)


def rollout_facts(rollout: Rollout) -> tuple[int, int, int]:
    """The fields of ``FACTS``."""
    return len(rollout.prompt_ids), len(rollout.completion_ids), digest(rollout.rollout_id)


def fact_chunks(rollouts: Sequence[Rollout]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``(rows, facts)`` of all rows in order, ``CHUNK`` at a time."""
    for start in range(0, len(rollouts), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(rollouts)), dtype=np.int32)
        yield rows, row_facts(rollouts, rows)


def ids_digest(rollouts: Sequence[Rollout]) -> str:
    """16 hex digits that change with the ids of the rollouts and their order."""
    whole = hashlib.sha256()
    for _, facts in fact_chunks(rollouts):
        whole.update(facts["digest"].tobytes())
    return whole.hexdigest()[:16]


def joined_ids_digest(rollouts: Sequence[Rollout]) -> str:
    """What checkpoints held in its place before: the ids themselves, hashed. Reads every rollout."""
    whole = hashlib.sha256()
    for row, rollout in enumerate(rollouts):
        whole.update(b"\n" * (row > 0) + rollout.rollout_id.encode("utf-8"))
    return whole.hexdigest()[:16]
