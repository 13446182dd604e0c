"""Small verifier and draft tables on which wrong acceptance rules give themselves away.

``worst_case_gap(rule)`` runs ``losslessness.exact_output_law`` on all of them: the one-line answer to
"is my rule lossless?". Three tokens, laws that depend on the prefix, zeros on either side, one-hot rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.evaluation.losslessness import Prefix, Table, exact_output_law, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.protocols import AcceptanceRule, Selector
from specdiff2.types import ConfigError, SamplingParams


@dataclass(frozen=True)
class LosslessCase:
    """A verifier and a position-factorised drafter, as functions of the prefix (``[vocab]``, ``[gamma, vocab]``)."""

    name: str
    verifier_table: Table
    draft_table: Table


def random_table(seed: int, shape: Sequence[int], sampling: SamplingParams | None = None) -> Table:
    """A float64 law per prefix, ``[*shape]`` normalised over the last axis, made from N(0, 1) logits."""

    @functools.cache
    def table(prefix: Prefix) -> Float[Tensor, "..."]:
        number = functools.reduce(lambda value, token: (value * 31 + token + 1) % 2**61, prefix, seed)
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return logits_to_probs(logits, sampling or SamplingParams())

    return table


def fixed_table(rows: Sequence[float] | Sequence[Sequence[float]]) -> Table:
    """The same law after every prefix."""
    law = torch.tensor(rows, dtype=torch.float64)
    return lambda prefix: law


def lossless_cases(gamma: int) -> list[LosslessCase]:
    """Cases for windows of ``gamma`` positions. Nucleus settings differ between verifier and drafter on purpose."""
    window = (gamma, 3)
    verifier, draft = random_table(1, (3,)), random_table(2, window)
    top_2, top_p = SamplingParams(top_k=2), SamplingParams(temperature=0.7, top_p=0.6)
    greedy = SamplingParams(temperature=0.0)
    p, q = (0.2, 0.3, 0.5), (0.7, 0.2, 0.1)
    return [
        LosslessCase("random", verifier, draft),
        LosslessCase("opposed", fixed_table(p), fixed_table([q] * gamma)),
        LosslessCase("equal", fixed_table(p), fixed_table([p] * gamma)),
        LosslessCase("draft_top_k", verifier, random_table(3, window, top_2)),
        LosslessCase("verifier_top_p", random_table(4, (3,), top_p), draft),
        LosslessCase("both_truncated", random_table(5, (3,), top_2), random_table(6, window, top_p)),
        LosslessCase("verifier_one_hot", random_table(7, (3,), greedy), draft),
        LosslessCase("draft_one_hot", verifier, random_table(8, window, greedy)),
        LosslessCase("disjoint", fixed_table((0.0, 0.4, 0.6)), fixed_table([(1.0, 0.0, 0.0)] * gamma)),
    ]


def worst_case_gap(
    rule: AcceptanceRule,
    selector: Selector | None = None,
    *,
    num_drafts: int = 1,
    gamma: int = 2,
    max_rounds: int | None = 1,
) -> tuple[str, float]:
    """The case with the largest total variation between the loop's first gamma+1 tokens and the verifier's law.

    Below 1e-12 when the rule is lossless. ``max_rounds=1`` is enough for rules without state; K = 3 with
    gamma = 2 takes seconds. The combination is not checked first, so biased ones can be shown to be so.

    Raises:
        ConfigError: gamma < 1 or num_drafts < 1, which would test nothing.
    """
    if gamma < 1 or num_drafts < 1:
        raise ConfigError(f"gamma={gamma}, num_drafts={num_drafts}: expected both >= 1")
    gaps = {}
    for case in lossless_cases(gamma):
        output = exact_output_law(
            rule, selector, case.verifier_table, case.draft_table, gamma, num_drafts, gamma + 1, max_rounds=max_rounds
        )
        gaps[case.name] = total_variation(output, verifier_law(case.verifier_table, gamma + 1))
    worst = max(gaps, key=gaps.__getitem__)
    return worst, gaps[worst]
