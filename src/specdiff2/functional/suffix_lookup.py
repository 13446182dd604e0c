"""Continuations copied from the text so far: where did the last tokens occur before, and what came next?

A text that repeats itself (code that restates its question, a solution that restates a number) is drafted for free
by copying. ``SuffixLookup`` finds the longest suffix of at most ``max_ngram`` tokens that occurred before, its latest
(or first) occurrence, and the tokens behind it. How far such copies can be trusted is learned while decoding: the
chance that one more copied token is right, separately for each length of the matched suffix, from a weak prior.

Pure bookkeeping on token ids; it knows no model and no tree.

Source: prompt lookup decoding (Saxena 2023), LLMA (arXiv 2304.04487); the running estimate is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdiff2.types import ConfigError

# Beta prior of "one more copied token is right" by length of the matched suffix: mean, and how many tokens it counts
# for. Only the first few rounds depend on it.
PRIOR_MEANS = (0.2, 0.45, 0.7)  # suffixes of 1, 2, 3 and more tokens
PRIOR_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class Copy:
    """``tokens`` follow an earlier occurrence of the last ``num_matched`` tokens; ``prob``: chance of each."""

    tokens: list[int]
    num_matched: int
    prob: float


class SuffixLookup:
    """The text of one generation.

    Args:
        tokens: what is committed at the start.
        max_ngram: longest suffix that is looked up.
        earliest: copy from the first occurrence of the suffix instead of the latest.

    Raises:
        ConfigError: ``max_ngram`` below 1.
    """

    def __init__(self, tokens: Sequence[int], max_ngram: int, *, earliest: bool = False) -> None:
        if isinstance(max_ngram, bool) or max_ngram < 1:
            raise ConfigError(f"lookup_ngram={max_ngram!r}: expected an integer >= 1")
        self._max_ngram = max_ngram
        self._earliest = earliest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token behind that occurrence
        self._right = [0.0] * len(PRIOR_MEANS)
        self._seen = [0.0] * len(PRIOR_MEANS)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit more tokens. The suffix at the end is entered only once a token stands behind it."""
        for token in tokens:
            end = len(self._tokens)
            for size in range(1, min(self._max_ngram, end) + 1):
                ngram = tuple(self._tokens[end - size : end])
                self._after[ngram] = self._after.get(ngram, end) if self._earliest else end
            self._tokens.append(token)

    def find(self, max_tokens: int) -> Copy | None:
        """The copy to propose after the committed tokens, at most ``max_tokens`` long; None where nothing recurs."""
        for size in range(min(self._max_ngram, len(self._tokens)), 0, -1):
            start = self._after.get(tuple(self._tokens[-size:]))
            if start is not None and max_tokens > 0:
                return Copy(self._tokens[start : start + max_tokens], size, self._prob(size))
        return None

    def learn(self, copy: Copy, tokens: Sequence[int]) -> None:
        """Count how far ``copy`` was right, given the ``tokens`` that were committed instead."""
        row = min(copy.num_matched, len(PRIOR_MEANS)) - 1
        for copied, token in zip(copy.tokens, tokens, strict=False):
            self._seen[row] += 1.0
            if copied != token:
                break
            self._right[row] += 1.0

    def _prob(self, size: int) -> float:
        row = min(size, len(PRIOR_MEANS)) - 1
        return (self._right[row] + PRIOR_WEIGHT * PRIOR_MEANS[row]) / (self._seen[row] + PRIOR_WEIGHT)
