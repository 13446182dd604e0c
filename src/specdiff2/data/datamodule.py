"""The Lightning data module: rollouts in, resumable window batches out.

Wiring only: rows and steps are ``data.step_loader``, windows ``data.windows``, sampling ``data.generate`` and
``data.online``. Of a store only an index is open (``data.rollout_indexing``), so its size does not matter. Use it with
``Trainer(use_distributed_sampler=False)``; its loaders know their rank.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import LightningDataModule

from specdiff2.data.fixed_loader import FixedLoader
from specdiff2.data.online import OnlineRollouts
from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.step_loader import StepLoader
from specdiff2.data.windows import Masking, WindowCollator, usable_rollouts
from specdiff2.types import ConfigError, Rollout

RolloutSource = RolloutStore | str | Path | Sequence[Rollout]
_log = logging.getLogger(__name__)


class RolloutDataModule(LightningDataModule):
    """Windows of training rollouts (drawn anew each step) and of held-out ones (always the same).

    Args:
        train: a store, its folder, or rollouts (a list, or read lazily).
        val: likewise; None for no validation.
        gamma: drafted positions of a window.
        batch_size: rollouts per step and rank; the windows of a step depend on batch_size * ranks only.
        windows_per_rollout: windows drawn in each.
        val_windows_per_rollout: evenly spaced windows in each held-out rollout.
        masking: ``random`` when an objective of the schedule wants revealed tokens (``mdm``), else ``full``.
        max_length: longer rollouts are dropped (prompt + completion tokens).
        steps_per_epoch: None takes one pass over the data, rounded up to whole accumulation groups.
        bucket_batches: sort rows by length within so many steps.
        seed: decides rows, anchors and masks together with the step.
        expected: fingerprint keys (verifier, tokenizer) that stores must have.
        online: source of fresh rollouts for ``refresh``.

    Raises (in ``setup``):
        ConfigError: no usable rollout in ``train`` or ``val``, or no store in a folder.
        MismatchError: a store was sampled from another verifier or tokenizer.
        CorruptFileError: a store holds a line that is no rollout, or an id twice.
    """

    def __init__(
        self,
        train: RolloutSource,
        val: RolloutSource | None = None,
        *,
        gamma: int,
        batch_size: int = 8,
        windows_per_rollout: int = 12,
        val_windows_per_rollout: int = 8,
        masking: Masking = "full",
        max_length: int | None = None,
        steps_per_epoch: int | None = None,
        bucket_batches: int = 8,
        seed: int = 0,
        expected: Mapping[str, Any] | None = None,
        online: OnlineRollouts | None = None,
    ) -> None:
        super().__init__()
        self.train_collator = WindowCollator(gamma, windows_per_rollout, masking, seed)
        self.val_collator = WindowCollator(gamma, val_windows_per_rollout, seed=seed, fixed=True)
        self.batch_size, self.max_length, self.bucket_batches, self.seed = batch_size, max_length, bucket_batches, seed
        self.steps_per_epoch, self.expected, self.online = steps_per_epoch, expected, online
        self._train_source, self._val_source = train, val
        self.train_rollouts: Sequence[Rollout] = []
        self.val_rollouts: Sequence[Rollout] = []
        self._loader: StepLoader | None = None
        self._num_refreshes = 0

    def setup(self, stage: str | None = None) -> None:
        if not self.train_rollouts:
            self.train_rollouts = self._load("train", self._train_source)
            if self._val_source is not None:
                self.val_rollouts = self._load("val", self._val_source)

    def train_dataloader(self) -> StepLoader:
        rank, world_size = self._place()
        self._loader = StepLoader(
            self.train_rollouts, self.train_collator, batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch or self._one_pass(world_size), seed=self.seed,
            rank=rank, world_size=world_size, bucket_batches=self.bucket_batches,
        )  # fmt: skip
        return self._loader

    def val_dataloader(self) -> FixedLoader | list[Any]:
        if not self.val_rollouts:
            return []
        rank, world_size = self._place()
        return FixedLoader(
            self.val_rollouts, self.val_collator, batch_size=self.batch_size, rank=rank, world_size=world_size
        )

    def set_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Train on these from the next batch on; every rank must pass the same list.

        Raises:
            ConfigError: none of them is usable.
        """
        self.train_rollouts = self._usable("online", rollouts)
        self._num_refreshes += 1
        if self._loader is not None:
            self._loader.set_rollouts(self.train_rollouts)

    def refresh(self, step: int) -> None:
        """Online mode: replace the training rollouts by fresh ones; each rank samples its part.

        Raises:
            ConfigError: the module was built without ``online``.
        """
        if self.online is None:
            raise ConfigError("data.online=null: no source of fresh rollouts; give the data module an OnlineRollouts")
        rank, world_size = self._place()
        parts: list[list[Rollout]] = [self.online.sample(self._num_refreshes, rank, world_size)]
        if world_size > 1:
            mine, parts = parts[0], [[] for _ in range(world_size)]
            torch.distributed.all_gather_object(parts, mine)
        _log.info("step %d: %d fresh rollouts", step, sum(map(len, parts)))
        self.set_rollouts([rollout for part in parts for rollout in part])

    def state_dict(self) -> dict[str, Any]:
        """Refreshed rollouts are nowhere on disk, so the checkpoint keeps them (lists and numbers only)."""
        rows = [dataclasses.asdict(rollout) for rollout in self.train_rollouts] if self._num_refreshes else []
        length = self.steps_per_epoch if self._loader is None else self._loader.steps_per_epoch
        return {"num_refreshes": self._num_refreshes, "rollouts": rows, "steps_per_epoch": length}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_refreshes = state_dict["num_refreshes"]
        if self._num_refreshes:
            self.train_rollouts = [Rollout(**row) for row in state_dict["rollouts"]]
            if self.steps_per_epoch is None:  # one pass over the rollouts the run began with
                self.steps_per_epoch = state_dict["steps_per_epoch"]

    def _load(self, split: str, source: RolloutSource) -> Sequence[Rollout]:
        if isinstance(source, (str, Path)):
            source = RolloutStore.open(source, self.expected)
        return self._usable(split, open_index(source.folder) if isinstance(source, RolloutStore) else source)

    def _usable(self, split: str, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        usable, drops = usable_rollouts(rollouts, self.max_length)
        if drops.total:
            _log.warning(
                "%s rollouts: %d usable, %d dropped (%d without a completion token, %d longer than max_length=%s)",
                split, len(usable), drops.total, drops.num_empty, drops.num_too_long, self.max_length,
            )  # fmt: skip
        return usable

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _one_pass(self, world_size: int) -> int:
        """Steps until every row was seen once. Lightning steps the optimizer at the end of an epoch even in the
        middle of an accumulation group, so an epoch holds whole groups."""
        group = 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)
        num_steps = -(-len(self.train_rollouts) // (self.batch_size * world_size))
        return -(-num_steps // group) * group
