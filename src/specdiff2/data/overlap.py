"""Whether prompts to be measured are among the prompts trained on, exactly or nearly; and leaving such prompts out.

Exact: the same text but for case, white space and punctuation. Nearly: at least half of the word 8-grams of the shorter
text, and three at least, are in the other (Tulu 3 flags an instance at half of its tokens in common 8-grams,
arXiv 2411.15124, section 3.2). So a text of less than ten words is only ever compared as a whole. Grams that many
prompts of a set share are its template, not its content, and do not count.

Prompts of one generator (``gsm_symbolic``, ``code_stubs``, ``open_questions``) overlap only as whole texts: other
numbers in a template that was trained on are another question. For gsm_symbolic ``templates: held_out`` is the clean
split. GSM-Symbolic's templates were made from GSM8K's test questions (arXiv 2410.05229), so against GSM8K they are
compared in full.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdiff2.data.prompt import Prompt
from specdiff2.data.signatures import Signatures, sign_prompts
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
MIN_SHARE = 0.5
MIN_COMMON = 3
_TEMPLATE_SHARE = 0.1  # in more of a set's prompts (and in five at least), a gram is its template
_TEMPLATE_COUNT = 5
_BLOCK = 1024  # prompts compared at once: bounds the memory

Array = np.ndarray[Any, Any]
PromptSet = Sequence[Prompt] | Signatures


@dataclass(frozen=True)
class Overlap:
    """The prompt trained on that is nearest to a prompt to be measured. ``share`` of common 8-grams, 1 if the same."""

    evaluation_id: str
    train_id: str
    share: float
    exact: bool


def find_overlaps(train: PromptSet, evaluation: PromptSet) -> list[Overlap]:
    """One for each prompt of ``evaluation`` that overlaps, in their order."""
    train, evaluation = _signed(train), _signed(evaluation)
    whole = {int(code): entry for entry, code in enumerate(train.whole)}
    best: dict[str, Overlap] = {}
    pairs = [(e, whole[int(code)], 1.0, True) for e, code in enumerate(evaluation.whole) if int(code) in whole]
    for entry, trained, share, exact in [*pairs, *_near(train, evaluation)]:
        found = Overlap(evaluation.ids[entry], train.ids[trained], share, exact)
        known = best.get(found.evaluation_id)
        if known is None or (found.exact, found.share) > (known.exact, known.share):
            best[found.evaluation_id] = found
    order = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(evaluation.ids))}
    return sorted(best.values(), key=lambda found: order[found.evaluation_id])


def check_no_overlap(train: Mapping[str, PromptSet], evaluation: Mapping[str, Sequence[Prompt]], remedy: str) -> None:
    """Numbers on prompts that were trained on mean nothing.

    Args:
        train: what was trained on, by name.
        evaluation: what is measured, by name.
        remedy: what to do, for the message.

    Raises:
        ConfigError: a prompt of ``evaluation`` is in ``train``, exactly or nearly; names both sets and prompts.
    """
    for train_name, trained in train.items():
        signed = _signed(trained)
        for name, prompts in evaluation.items():
            found = find_overlaps(signed, prompts)
            if found:
                raise ConfigError(f"{explain(found, train_name, name, prompts)}; {remedy}")


def leave_out(train: PromptSet, train_name: str, prompts: Sequence[Prompt], name: str) -> list[Prompt]:
    """The prompts called ``name`` that are not among those trained on; how many are is counted in the log."""
    found = find_overlaps(train, prompts)
    if found:
        log.warning("left out: %s", explain(found, train_name, name, prompts))
    return without(prompts, found)


def explain(found: Sequence[Overlap], train_name: str, name: str, prompts: Sequence[Prompt]) -> str:
    """How many prompts, and the nearest one with the beginning of its text."""
    worst = max(found, key=lambda one: (one.exact, one.share))
    text = next(prompt.messages[-1]["content"] for prompt in prompts if prompt.prompt_id == worst.evaluation_id)
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    how = "the same text" if worst.exact else f"{worst.share:.0%} of its word 8-grams in common"
    num_exact = sum(one.exact for one in found)
    return (
        f"{name}: {len(found)} of {len(prompts)} prompts are among those of {train_name} ({num_exact} the same, "
        f"{len(found) - num_exact} nearly; the nearest: {worst.evaluation_id!r}, there {worst.train_id!r}, {how}: "
        f"{shown!r})"
    )


def without(prompts: Sequence[Prompt], overlaps: Sequence[Overlap]) -> list[Prompt]:
    """The prompts of the evaluation side that do not overlap."""
    dropped = {found.evaluation_id for found in overlaps}
    return [prompt for prompt in prompts if prompt.prompt_id not in dropped]


def _signed(prompts: PromptSet) -> Signatures:
    return prompts if isinstance(prompts, Signatures) else sign_prompts(prompts)


def _near(train: Signatures, evaluation: Signatures) -> Iterator[tuple[int, int, float, bool]]:
    """``(evaluation entry, train entry, share, False)`` for the pairs that have enough grams in common."""
    template = np.union1d(_template(train), _template(evaluation))
    train_grams, train_owners = _content(train, template)
    grams, owners = _content(evaluation, template)
    train_sizes = np.bincount(train_owners, minlength=len(train))
    sizes = np.bincount(owners, minlength=len(evaluation))
    for family in set(evaluation.families):
        here = evaluation.families == family
        there = np.ones(len(train), dtype=bool) if family == "" else train.families != family
        use = there[train_owners]
        index = np.argsort(train_grams[use], kind="stable")
        sorted_grams, sorted_owners = train_grams[use][index], train_owners[use][index]
        for start in range(0, len(evaluation), _BLOCK):
            part = (owners >= start) & (owners < start + _BLOCK) & here[owners]
            first, second, common = _count_common(grams[part], owners[part], sorted_grams, sorted_owners)
            share = common / np.minimum(sizes[first], train_sizes[second])
            for k in np.flatnonzero((common >= MIN_COMMON) & (share >= MIN_SHARE)):
                yield int(first[k]), int(second[k]), float(share[k]), False


def _count_common(grams: Array, owners: Array, train_grams: Array, train_owners: Array) -> tuple[Array, Array, Array]:
    """(entry, train entry, number of common grams) of all pairs with one in common; ``train_grams`` is sorted."""
    low = np.searchsorted(train_grams, grams, side="left")
    counts = np.searchsorted(train_grams, grams, side="right") - low
    starts = np.cumsum(counts) - counts
    places = np.arange(counts.sum()) - np.repeat(starts, counts) + np.repeat(low, counts)
    num_train = int(train_owners.max(initial=0)) + 1
    pairs, common = np.unique(np.repeat(owners, counts) * num_train + train_owners[places], return_counts=True)
    return pairs // num_train, pairs % num_train, common


def _template(signatures: Signatures) -> Array:
    """Grams that are in so many prompts of the set that they tell nothing about any of them."""
    grams, counts = np.unique(signatures.grams, return_counts=True)
    return grams[counts >= max(_TEMPLATE_COUNT, _TEMPLATE_SHARE * len(signatures))]


def _content(signatures: Signatures, template: Array) -> tuple[Array, Array]:
    keep = ~np.isin(signatures.grams, template)
    return signatures.grams[keep], signatures.owners[keep]
