"""From rollouts to draft windows: which rollouts can train, where windows start, how a batch is laid out.

A window after anchor ``a`` has the targets ``a+1 .. a+gamma``. Anchors run from the last prompt token to the token
before the last, so that every window has at least one completion token to predict; targets past the end of the
rollout are not valid. Knows no model; anchors and masks depend only on the key given to the collator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from specdiff2.data.lazy_rollouts import ChosenRollouts, LazyRollouts, fact_chunks, row_facts
from specdiff2.data.prompt import check_count
from specdiff2.data.seeding import stable_generator
from specdiff2.functional.masking import random_reveal
from specdiff2.types import ConfigError, Rollout, WindowBatch

Masking = Literal["full", "random"]


@dataclass(frozen=True, slots=True)
class DropCounts:
    """Rollouts left out before training, by reason."""

    num_empty: int = 0
    num_too_long: int = 0

    @property
    def total(self) -> int:
        return self.num_empty + self.num_too_long


def usable_rollouts(rollouts: Sequence[Rollout], max_length: int | None = None) -> tuple[Sequence[Rollout], DropCounts]:
    """The rollouts with at least one token to train on and at most ``max_length`` tokens, and what was dropped.

    Lazy rollouts stay lazy; none is read. Where some are dropped, the numbers of the others are kept (4 bytes each).

    Raises:
        ConfigError: none is left.
    """
    check_count("max_length", max_length, 2)
    kept: list[np.ndarray] = []
    num_empty = num_too_long = 0
    for rows, facts in fact_chunks(rollouts):
        empty = anchor_counts(facts) == 0
        too_long = ~empty & (num_tokens(facts) > (max_length or np.inf))
        num_empty, num_too_long = num_empty + int(empty.sum()), num_too_long + int(too_long.sum())
        kept.append(rows[~(empty | too_long)])
    drops = DropCounts(num_empty, num_too_long)
    if drops.total == len(rollouts):
        raise ConfigError(
            f"no rollout to train on: of {drops.total}, {num_empty} have no completion token and {num_too_long} are "
            f"longer than max_length={max_length}; sample more rollouts or raise max_length"
        )
    if drops.total == 0:
        return rollouts, drops
    chosen = ChosenRollouts(rollouts, np.concatenate(kept))
    return chosen if isinstance(rollouts, LazyRollouts) else list(chosen), drops


def first_anchor(rollout: Rollout) -> int:
    """The last prompt token (of a rollout without a prompt: its first token)."""
    return max(len(rollout.prompt_ids) - 1, 0)


def first_anchors(facts: np.ndarray) -> np.ndarray:
    """``first_anchor`` of each row."""
    return np.maximum(facts["num_prompt"] - 1, 0)


def num_tokens(facts: np.ndarray) -> np.ndarray:
    """Tokens of prompt and completion, by row."""
    return facts["num_prompt"] + facts["num_completion"]


def anchor_counts(facts: np.ndarray) -> np.ndarray:
    """How many anchors each row has; 0: nothing to train on."""
    return np.maximum(num_tokens(facts) - 1 - first_anchors(facts), 0)


class WindowCollator:
    """Chooses windows in rollouts and packs them into a ``WindowBatch``.

    Args:
        gamma: drafted positions of a window.
        windows_per_rollout: anchors drawn per rollout, without replacement (fewer where a rollout is shorter).
        masking: ``full`` masks the whole window, ``random`` reveals a random part of it (``functional.masking``).
        seed: with the key of a batch it decides anchors and masks.
        fixed: anchors evenly spaced instead of drawn, for validation.
    """

    def __init__(
        self, gamma: int, windows_per_rollout: int, masking: Masking = "full", seed: int = 0, *, fixed: bool = False
    ) -> None:
        check_count("gamma", gamma, 1)
        check_count("windows_per_rollout", windows_per_rollout, 1)
        if masking not in get_args(Masking):
            raise ConfigError(f"masking={masking!r}: expected one of {', '.join(get_args(Masking))}")
        self.gamma, self.windows_per_rollout, self.masking = gamma, windows_per_rollout, masking
        self.seed, self.fixed = seed, fixed

    def __call__(self, rollouts: Sequence[Rollout], key: Sequence[int] = ()) -> WindowBatch:
        """The batch for these rollouts and ``key``; equal keys give equal batches.

        Raises:
            ConfigError: no rollout, or one without anything to train on (see ``usable_rollouts``).
        """
        return self.share(rollouts, row_facts(rollouts, np.arange(len(rollouts))), slice(None), key)

    def share(
        self, rollouts: Sequence[Rollout], facts: np.ndarray, part: slice, key: Sequence[int] = ()
    ) -> WindowBatch:
        """One rank's part of a batch: the windows and masks are those that the whole batch has in these rows.

        So they do not depend on the number of ranks. Drawing for the rows of the other ranks needs only their lengths.

        Args:
            rollouts: the rows ``part`` of the batch.
            facts: of all its rows (``lazy_rollouts.FACTS``).
            key: decides windows and masks together with the seed.

        Raises:
            ConfigError: as ``__call__``.
        """
        available = anchor_counts(facts)
        if not rollouts or not available.all():
            raise ConfigError("batch: a rollout without any token to train on; drop those first (usable_rollouts)")
        generator = stable_generator("windows", self.seed, *key)
        offsets = [self._offsets(count, generator) for count in available.tolist()]
        row = torch.repeat_interleave(torch.tensor([len(chosen) for chosen in offsets]))
        first, length = (
            torch.from_numpy(count.astype(np.int64)) for count in (first_anchors(facts), num_tokens(facts))
        )
        anchor = torch.cat(offsets) + first[row]
        position = anchor[:, None] + torch.arange(1, self.gamma + 1)
        valid = position < length[row][:, None]
        revealed = random_reveal(valid, generator) if self.masking == "random" else torch.zeros_like(valid)

        place = torch.full((len(facts),), -1)  # of each row of the batch in this part
        place[part] = torch.arange(len(rollouts))
        mine = place[row] >= 0
        window_row, anchor, position = place[row][mine], anchor[mine], position[mine]
        valid, revealed = valid[mine], revealed[mine]
        input_ids, lengths = pad_rows([rollout.prompt_ids + rollout.completion_ids for rollout in rollouts])
        targets = input_ids[window_row[:, None], position.clamp(max=input_ids.shape[1] - 1)].masked_fill(~valid, 0)
        return WindowBatch(input_ids, lengths, window_row, anchor, targets, valid, revealed, first[part] + 1)

    def _offsets(self, available: int, generator: torch.Generator) -> Tensor:
        """Anchors in a rollout that has so many, counted from its first one."""
        count = min(self.windows_per_rollout, available)
        if self.fixed:
            return torch.arange(count) * available // count
        return torch.randperm(available, generator=generator)[:count].sort().values


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ``[batch, length]`` with 0 and the lengths ``[batch]``."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros((len(rows), int(lengths.max())), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row)
    return padded, lengths


def draft_vocabulary(
    rollouts: Iterable[Rollout], size_limit: int | None = None, eos_ids: Iterable[int] = ()
) -> list[int]:
    """Sorted ids a drafter may propose: EOS always, then the most frequent completion tokens up to ``size_limit``.

    Equal frequencies are decided by the smaller id. Tokens left out have q = 0: exact, only never drafted.

    Raises:
        ConfigError: ``size_limit`` does not leave room for EOS, or there is no token at all.
    """
    check_count("size_limit", size_limit, 1)
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        counts.update(rollout.completion_ids)
    chosen = set(eos_ids)
    if size_limit is not None and len(chosen) > size_limit:
        raise ConfigError(f"size_limit={size_limit}: expected at least {len(chosen)}, the number of EOS ids")
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if size_limit is not None and len(chosen) >= size_limit:
            break
        chosen.add(token)
    if not chosen:
        raise ConfigError("draft vocabulary: the rollouts hold no completion token; sample rollouts first")
    return sorted(chosen)
