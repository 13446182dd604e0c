"""How many rounds an output takes: the acceptance side of the speed law.

Rounds are taken as independent draws of one streak law. From it, exactly: a round with room for ``w`` positions
accepts ``min(streak, w)`` and commits one token more. So the chance ``start(t)`` that a round starts after ``t``
committed tokens is a renewal sequence,

    start(0) = 1,    start(t) = sum_s P(min(streak, w(t - s - 1)) = s) start(t - s - 1),    w(t) = min(gamma, N - t - 1)

with ``N`` the longest output, and an output of ``L`` tokens takes ``sum_{t < L} start(t)`` rounds: the ends of outputs,
which cut windows and lose bonus tokens, are part of the law. Per round this is below ``1 + mean streak`` for short
outputs and tends to it for long ones.

The streak law of a shorter window is the same law cut off (``StreakLaw.shorter``): exact where a position's draft does
not depend on the window's length and rounds are alike wherever they start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdiff2.evaluation.bootstrap import FloatArray
from specdiff2.evaluation.curves import position_curves
from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError, RoundRecord


@dataclass(frozen=True, slots=True)
class StreakLaw:
    """``probs[s]``: chance that a full window of ``gamma = len(probs) - 1`` positions has a streak of ``s``."""

    probs: FloatArray

    @classmethod
    def of(cls, records: Sequence[Record], max_new_tokens: int) -> StreakLaw:
        """From the rounds of one method: survival by position (``curves.position_curves``), differenced.

        Raises:
            ConfigError: no round drafted anything.
        """
        gamma = max((record.gamma for record in records), default=0)
        judged = [one for record in records for one in judged_rounds(record, max_new_tokens)]
        if not judged or gamma < 1:
            raise ConfigError(f"{len(records)} records without a drafted position: expected rounds of a method")
        return cls.from_survival([value or 0.0 for value in position_curves(judged, gamma).survival])

    @classmethod
    def from_survival(cls, survival: Sequence[float]) -> StreakLaw:
        """``survival[j-1]``: chance that positions 1..j are all accepted."""
        alive = np.array([1.0, *survival, 0.0])
        return cls(alive[:-1] - alive[1:])

    @property
    def gamma(self) -> int:
        return len(self.probs) - 1

    @property
    def mean(self) -> float:
        """Mean streak of full windows; one less than the tokens of a round that nothing cuts."""
        return float(self.probs @ np.arange(len(self.probs)))

    def shorter(self, gamma: int) -> StreakLaw:
        """The law of windows of ``gamma`` positions, at most ``self.gamma``."""
        if not 0 <= gamma <= self.gamma:
            raise ConfigError(f"gamma={gamma}: expected 0 to {self.gamma}, the positions that were measured")
        return StreakLaw(np.append(self.probs[:gamma], self.probs[gamma:].sum()))


def judged_rounds(record: Record, max_new_tokens: int) -> list[RoundRecord]:
    """Rounds with ``num_drafted`` set to how far the window could have been judged, drafted rounds only.

    A tree or a copied chain that ends early ends the streak: that is the method's doing, so its window counts whole.
    The end of the output (EOS, length) ends it from outside: what lies behind was never judged.
    """
    judged, committed = [], 0
    for one in record.rounds:
        room = min(record.gamma, max(max_new_tokens - committed - 1, 0))
        committed += one.num_committed
        cut = one.num_committed == one.num_accepted or (room < record.gamma and one.num_accepted >= room)
        if room:
            judged.append(replace(one, num_drafted=one.num_accepted if cut else record.gamma))
    return judged


def windows_of_output(gamma: int, max_new_tokens: int, length: int) -> list[int]:
    """Positions of a window that starts after 0 .. ``length - 1`` committed tokens."""
    return [min(gamma, max(max_new_tokens - committed - 1, 0)) for committed in range(length)]


def round_starts(streaks: StreakLaw, max_new_tokens: int, length: int) -> FloatArray:
    """``start(t)`` for t = 0 .. ``length - 1``."""
    start = np.zeros(length + streaks.gamma + 1)
    start[0] = 1.0
    cut = [streaks.shorter(window).probs for window in range(streaks.gamma + 1)]
    for committed, window in enumerate(windows_of_output(streaks.gamma, max_new_tokens, length)):
        start[committed + 1 : committed + window + 2] += start[committed] * cut[window]
    return start[:length]


def rounds_by_window(streaks: StreakLaw, max_new_tokens: int, lengths: Sequence[int]) -> dict[int, float]:
    """Expected rounds of all outputs together, by the positions of their window.

    Raises:
        ConfigError: an output longer than ``max_new_tokens``.
    """
    if max(lengths) > max_new_tokens:
        raise ConfigError(f"an output of {max(lengths)} tokens: expected at most max_new_tokens={max_new_tokens}")
    longest = max(lengths)
    running = np.array([sum(length > committed for length in lengths) for committed in range(longest)])
    expected = round_starts(streaks, max_new_tokens, longest) * running
    rounds: dict[int, float] = {}
    for window, count in zip(windows_of_output(streaks.gamma, max_new_tokens, longest), expected, strict=True):
        rounds[window] = rounds.get(window, 0.0) + float(count)
    return rounds
