"""The batches of a plan that are still to be sampled, shared out among any number of processes without a coordinator.

A batch is claimed by locks on its rows (``data.rollout_locks``) before it is sampled, and looked up in the store again
after that: so no rollout is sampled twice, and the batch of a process that dies is free for the others at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdiff2.data.rollout_locks import RowClaims
from specdiff2.data.rollout_plan import PlannedRollout, RolloutPlan
from specdiff2.data.rollout_progress import Progress
from specdiff2.data.rollouts import RolloutStore
from specdiff2.types import Rollout

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of the plan that this process has claimed; ``missing``: which of them the store lacks."""

    rows: range
    items: list[PlannedRollout]
    missing: list[bool]

    @property
    def wanted(self) -> list[PlannedRollout]:
        return [item for item, missing in zip(self.items, self.missing, strict=True) if missing]


class OpenBatches:
    """What is left to do of ``plan``. Use as a context: on leaving it, what is claimed is free for other processes.

    Args:
        store: this process is one of its writers.
    """

    def __init__(self, store: RolloutStore, plan: RolloutPlan, batch_size: int, progress: Progress) -> None:
        self.store, self.plan, self.progress = store, plan, progress
        self._claims = RowClaims(store.folder)
        self._ahead = plan.batches(batch_size)
        self._held_by_others: deque[range] = deque()
        self.num_new = self.num_new_tokens = 0

    def __enter__(self) -> OpenBatches:
        return self

    def __exit__(self, *error: object) -> None:
        self._claims.close()

    def take(self, *, wait: bool) -> Batch | None:
        """The next batch with something missing, claimed until ``release``.

        Args:
            wait: also for batches that other processes are at, until they are done or dead; None then means that the
                store is complete. Only while nothing is claimed here: two processes could wait for each other.
        """
        for rows in self._ahead:
            if batch := self._claim(rows):
                return batch
        if not wait:
            return None
        self.store.refresh()
        while self._held_by_others:
            self.progress.show(self.store.num_known)
            if batch := self._claim(self._held_by_others.popleft(), wait=True):
                return batch
        return None

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Into the store, on disk when this returns."""
        self.store.append(rollouts)
        self.num_new += len(rollouts)
        self.num_new_tokens += sum(len(rollout.completion_ids) for rollout in rollouts)
        self.progress.show(self.store.num_known, self.num_new, self.num_new_tokens)

    def release(self, batch: Batch) -> None:
        """Done, or given up."""
        self._claims.release(batch.rows)

    def _claim(self, rows: range, *, wait: bool = False) -> Batch | None:
        items = [self.plan[row] for row in rows]
        ids = [item.rollout_id for item in items]
        if all(self.store.holds(ids)):
            return None
        if not self._claims.claim(rows, wait=wait):
            self._held_by_others.append(rows)
            return None
        self.store.refresh()  # whoever had the claim before has synced what it sampled
        missing = [not there for there in self.store.holds(ids)]
        if any(missing):
            return Batch(rows, items, missing)
        self._claims.release(rows)
        return None
