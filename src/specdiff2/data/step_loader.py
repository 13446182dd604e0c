"""Training batches addressed by step number, so that resuming is starting at step k.

Rows come from an endless sequence of shuffled passes over the rollouts; step k of every rank takes its share of the
k-th ``world_size * batch_size`` rows. Nothing is dropped and every rank has the same number of steps, whatever the
number of rollouts. Knows neither Lightning nor a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specdiff2.data.prompt import check_count
from specdiff2.data.seeding import stable_generator
from specdiff2.data.windows import WindowCollator
from specdiff2.types import ConfigError, MismatchError, Rollout, WindowBatch


class StepLoader:
    """A resumable stream of ``WindowBatch`` for one rank.

    Args:
        rollouts: usable ones only (``windows.usable_rollouts``), the same list on every rank.
        collator: chooses the windows; its key is (rank, step).
        batch_size: rollouts per rank and step.
        steps_per_epoch: length of one iteration; the stream continues in the next.
        bucket_batches: rows of so many consecutive steps are sorted by length to save padding; 1 sorts nothing.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        collator: WindowCollator,
        *,
        batch_size: int,
        steps_per_epoch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        bucket_batches: int = 8,
    ) -> None:
        counts = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch, "bucket_batches": bucket_batches}
        for name, value in counts.items():
            check_count(name, value, 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: expected 0 .. world_size - 1 = {world_size - 1}")
        self.collator, self.batch_size, self.steps_per_epoch = collator, batch_size, steps_per_epoch
        self.seed, self.rank, self.world_size, self.bucket_batches = seed, rank, world_size, bucket_batches
        self.step = 0
        self.set_rollouts(rollouts)

    def set_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Use these from the next batch on.

        Raises:
            ConfigError: an empty list.
        """
        if not rollouts:
            raise ConfigError("training rollouts: an empty list; sample rollouts first")
        self.rollouts = list(rollouts)
        self._shuffled: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[WindowBatch]:
        """The rest of the epoch the next step lies in."""
        for _ in range(self.steps_per_epoch - self.step % self.steps_per_epoch):
            batch = self.batch(self.step)
            self.step += 1  # before the yield: a state taken while the batch is in use counts it
            yield batch

    def batch(self, step: int) -> WindowBatch:
        """The batch of any step, whatever was read before."""
        return self.collator([self.rollouts[row] for row in self.rows(step)], (self.rank, step))

    def rows(self, step: int) -> list[int]:
        """Indices into ``rollouts`` that this rank trains on at ``step``."""
        per_step = self.batch_size * self.world_size
        pool, place = divmod(step, self.bucket_batches)
        pool_size = per_step * self.bucket_batches
        rows = [self._row(index) for index in range(pool * pool_size, (pool + 1) * pool_size)]
        if self.bucket_batches > 1:
            rows.sort(key=lambda row: len(self.rollouts[row].prompt_ids) + len(self.rollouts[row].completion_ids))
            generator = stable_generator("pool", self.seed, pool)
            place = int(torch.randperm(self.bucket_batches, generator=generator)[place])
        return rows[place * per_step : (place + 1) * per_step][self.rank :: self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, equal on all ranks."""
        return {"step": self.step, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved step.

        Raises:
            MismatchError: the state belongs to other settings or other rollouts; names the first difference.
        """
        for key, now in self._settings().items():
            before = state["settings"].get(key, "(absent)")
            if before != now:
                raise MismatchError(
                    f"resume: data setting {key} was {before!r} in the checkpoint, now it is {now!r}; "
                    "set it back, or start a new run without the checkpoint"
                )
        self.step = int(state["step"])

    def _row(self, index: int) -> int:
        num_rollouts = len(self.rollouts)
        epoch, place = divmod(index, num_rollouts)
        if epoch not in self._shuffled:
            generator = stable_generator("rows", self.seed, epoch)
            kept = {old: rows for old, rows in self._shuffled.items() if old >= epoch - 1}
            self._shuffled = kept | {epoch: torch.randperm(num_rollouts, generator=generator).tolist()}
        return self._shuffled[epoch][place]

    def _settings(self) -> dict[str, int | str]:
        digest = hashlib.sha256("\n".join(rollout.rollout_id for rollout in self.rollouts).encode("utf-8"))
        return {
            "gamma": self.collator.gamma,
            "windows_per_rollout": self.collator.windows_per_rollout,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "bucket_batches": self.bucket_batches,
            "seed": self.seed,
            "masking": self.collator.masking,
            "num_rollouts": len(self.rollouts),
            "rollout_ids": digest.hexdigest()[:16],
            "steps_per_epoch": self.steps_per_epoch,  # last: it may follow from the number of rollouts
        }
