"""Held-out windows for validation: always the same, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdiff2.data.prompt import check_count
from specdiff2.data.windows import WindowCollator
from specdiff2.types import ConfigError, Rollout, WindowBatch


class FixedLoader:
    """This rank's share of the held-out windows: the same batches every time, the same number on every rank.

    Rows are dealt out in turn; at most ``world_size - 1`` rows at the end are left out so that no rank waits for
    another (with fewer rows than ranks they are repeated instead).
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        collator: WindowCollator,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_count("batch_size", batch_size, 1)
        if not rollouts:
            raise ConfigError("validation rollouts: an empty list; give some, or none at all (null)")
        self._rollouts, self._collator, self._batch_size = rollouts, collator, batch_size
        num_rows = len(rollouts) * max(1, -(-world_size // len(rollouts)))
        self._rows = range(rank, num_rows // world_size * world_size, world_size)

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[WindowBatch]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield self._collator([self._rollouts[row % len(self._rollouts)] for row in rows])
