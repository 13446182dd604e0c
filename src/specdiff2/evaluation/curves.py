"""Acceptance by position in the window: two curves that must not be mixed.

``accept_rate@j``  P(position j accepted, given that 1..j-1 were): accepted at j / rounds that reached j.
``survival@j``     P(positions 1..j all accepted).

A round *reached* j when it drafted at least j tokens and accepted the first j-1. A round cut by the end of
the output (EOS, stop string, length) has ``num_drafted == num_accepted``: its later positions were never
judged, so it counts where it was judged and nowhere after. Dropping such rounds from the denominator of
``survival@j`` altogether would keep the rejected rounds of the same kind and bias the curve down, counting
them as failures more so. They are censored observations, hence the product-limit estimator
(Kaplan & Meier 1958): ``survival@j = prod_{k<=j} accept_rate@k``. Without cut or shortened rounds this is
exactly the share of rounds whose streak is at least j, and its sum over j is the mean streak.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdiff2.types import RoundRecord


@dataclass(frozen=True, slots=True)
class PositionCurves:
    """Index j-1 holds position j. None: no round reached the position, so nothing is known.

    Attributes:
        num_reached: rounds that reached the position (denominator of ``accept_rate``).
        num_accepted: rounds that accepted it.
    """

    accept_rate: list[float | None]
    survival: list[float | None]
    num_reached: list[int]
    num_accepted: list[int]


def position_curves(rounds: Iterable[RoundRecord], gamma: int | None = None) -> PositionCurves:
    """Both curves over all rounds, for positions 1..gamma (default: the longest draft seen)."""
    kept = [r for r in rounds if r.num_drafted > 0]
    length = gamma if gamma is not None else max((r.num_drafted for r in kept), default=0)
    positions = range(1, length + 1)
    reached = [sum(r.num_drafted >= j and r.num_accepted >= j - 1 for r in kept) for j in positions]
    accepted = [sum(r.num_accepted >= j for r in kept) for j in positions]
    accept_rate = [a / n if n else None for a, n in zip(accepted, reached, strict=True)]
    survival: list[float | None] = []
    alive: float | None = 1.0 if kept else None
    for rate in accept_rate:
        # nothing survives a position that nobody passed, however many positions follow
        if alive is not None and alive > 0.0:
            alive = None if rate is None else alive * rate
        survival.append(alive)
    return PositionCurves(accept_rate, survival, reached, accepted)
