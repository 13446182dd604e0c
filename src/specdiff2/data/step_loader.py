"""Training batches addressed by step number, so that resuming is starting at step k.

Rows come from an endless sequence of shuffled passes over the rollouts; step k of every rank takes its share of the
k-th ``world_size * batch_size`` rows. Nothing is dropped and every rank has the same number of steps, whatever the
number of rollouts. Rows, windows and masks are those of all ranks together, each of which takes its part: two ranks
with batches of 4 train on what one rank with batches of 8 does, and a run may go on with another number of ranks.
A rollout is read when its step comes; what stays in memory is the order of one pass, 4 bytes a rollout. Knows neither
Lightning nor a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from specdiff2.data.lazy_rollouts import ids_digest, joined_ids_digest, row_facts
from specdiff2.data.prompt import check_count
from specdiff2.data.seeding import stable_generator
from specdiff2.data.windows import WindowCollator, num_tokens
from specdiff2.types import ConfigError, MismatchError, Rollout, WindowBatch


class StepLoader:
    """A resumable stream of ``WindowBatch`` for one rank.

    Args:
        rollouts: usable ones only (``windows.usable_rollouts``), the same on every rank.
        collator: chooses the windows of a step.
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
        self.rollouts = rollouts
        self._ids: str | None = None
        self._pass: tuple[int, np.ndarray] | None = None
        self._pool: tuple[int, np.ndarray, np.ndarray] | None = None

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
        rows, facts = self._step_rows(step)
        part = slice(self.rank, None, self.world_size)
        # the 0 was the rank, in the days when each drew for itself: runs of one rank go on drawing what they drew
        return self.collator.share([self.rollouts[row] for row in rows[part].tolist()], facts, part, (0, step))

    def rows(self, step: int) -> list[int]:
        """Indices into ``rollouts`` that this rank trains on at ``step``."""
        return self._step_rows(step)[0][self.rank :: self.world_size].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Plain values, equal on all ranks."""
        return {"step": self.step, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved step; the number of ranks may have changed, the rows of a step may not.

        Raises:
            MismatchError: the state belongs to other settings or other rollouts; names the first difference.
        """
        before = _comparable(state["settings"])
        for key, now in _comparable(self._settings()).items():
            was = before.get(key, "(absent)")
            # checkpoints of before rollouts were read lazily hold another digest
            if was != now and not (key == "rollout_ids" and was == joined_ids_digest(self.rollouts)):
                raise MismatchError(
                    f"resume: data setting {key} was {was!r} in the checkpoint, now it is {now!r}; "
                    "set it back, or start a new run without the checkpoint"
                )
        self.step = int(state["step"])

    def _step_rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a step on all ranks, and their facts."""
        per_step = self.batch_size * self.world_size
        pool, place = divmod(step, self.bucket_batches)
        if self._pool is None or self._pool[0] != pool:
            self._pool = (pool, *self._pool_rows(pool, per_step * self.bucket_batches))
        _, rows, facts = self._pool
        if self.bucket_batches > 1:
            generator = stable_generator("pool", self.seed, pool)
            place = int(torch.randperm(self.bucket_batches, generator=generator)[place])
        part = slice(place * per_step, (place + 1) * per_step)
        return rows[part], facts[part]

    def _pool_rows(self, pool: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the steps of a pool, by length where there are several, and their facts."""
        rows = self._stream(pool * size, (pool + 1) * size)
        facts = row_facts(self.rollouts, rows)
        if self.bucket_batches == 1:
            return rows, facts
        order = np.argsort(num_tokens(facts), kind="stable")
        return rows[order], facts[order]

    def _stream(self, start: int, stop: int) -> np.ndarray:
        """Places ``start`` .. ``stop - 1`` of the endless sequence of shuffled passes."""
        parts = []
        while start < stop:
            epoch, place = divmod(start, len(self.rollouts))
            parts.append(self._shuffled(epoch)[place : place + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def _shuffled(self, epoch: int) -> np.ndarray:
        if self._pass is None or self._pass[0] != epoch:
            self._pass = None  # not two at once
            generator = stable_generator("rows", self.seed, epoch)
            # the same numbers as in 64 bits
            order = torch.randperm(len(self.rollouts), generator=generator, dtype=torch.int32)
            self._pass = (epoch, order.numpy())
        return self._pass[1]

    def _settings(self) -> dict[str, int | str]:
        if self._ids is None:
            self._ids = ids_digest(self.rollouts)
        return {
            "gamma": self.collator.gamma,
            "windows_per_rollout": self.collator.windows_per_rollout,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "bucket_batches": self.bucket_batches,
            "seed": self.seed,
            "masking": self.collator.masking,
            "num_rollouts": len(self.rollouts),
            "rollout_ids": self._ids,
            "steps_per_epoch": self.steps_per_epoch,  # last: it may follow from the number of rollouts
        }


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the number of ranks that a step's rows are shared out to."""
    rest = {key: value for key, value in settings.items() if key not in ("batch_size", "world_size")}
    return {"batch_size * world_size": settings["batch_size"] * settings["world_size"]} | rest
