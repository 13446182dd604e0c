"""Do two methods give the same tokens at temperature 0? Pure comparison of records.

Why they differ, if they do, needs the verifier: see ``divergence.explain_divergences``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdiff2.evaluation.records import Record

# Gaps up to this many spacings of the dtype count as rounding. SmolLM2 in bfloat16, trees against single steps: all 8
# divergences in 20 outputs (16 x 64 and 4 x 24 tokens) were at most 1 spacing apart. Over 871 positions the two best
# tokens are within 4 spacings at every fourth (median gap: 10), so one wrong pick may pass but a wrong rule will not.
NEAR_TIE_SPACINGS = 4.0
_LISTED = 20  # first divergences listed in a summary; the counts cover all


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a method's tokens leave the reference's; None: that output had ended."""

    prompt_id: str
    position: int
    expected: int | None
    got: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"prompt_id": self.prompt_id, "position": self.position, "expected": self.expected, "got": self.got}


def first_divergence(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first difference, counting a missing token as one; None when equal."""
    for position, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def divergences(reference: Iterable[Record], records: Iterable[Record]) -> tuple[int, list[Divergence]]:
    """(prompts compared, first divergence of each prompt that differs); only prompts both decoded count."""
    expected = {record.prompt_id: record.tokens for record in reference}
    checked, found = 0, []
    for record in records:
        if record.prompt_id not in expected:
            continue
        checked += 1
        tokens = expected[record.prompt_id]
        position = first_divergence(tokens, record.tokens)
        if position is not None:
            found.append(Divergence(record.prompt_id, position, _at(tokens, position), _at(record.tokens, position)))
    return checked, found


def lossless_check(reference: Iterable[Record], records: Iterable[Record]) -> dict[str, Any]:
    """``{"checked", "identical", "divergence_rate", "first_divergences"}`` (rate null when nothing compared)."""
    checked, found = divergences(reference, records)
    return {
        "checked": checked,
        "identical": checked - len(found),
        "divergence_rate": len(found) / checked if checked else None,
        "first_divergences": [divergence.to_dict() for divergence in found[:_LISTED]],
    }


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
