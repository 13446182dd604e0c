"""One thought with a time stamp at every round, and its part within a budget. Knows decoders by their protocol only.

**One thought serves all budgets, exactly in law.** While it thinks, a method knows neither the budgets nor that there
are any: the tokens of a round depend on the prompt, the random numbers and ``max_tokens``, never on when the thought
will be cut. So what is there after b seconds of a thought that goes on has the same joint law (tokens and stamps) as a
thought stopped at b seconds, and the answer depends on that part alone. Only between budgets are the results dependent,
which makes a curve smoother and leaves each point's own interval right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from specdiff2.protocols import Decoder, RandomSource
from specdiff2.types import StopReason

Clock = Callable[[], float]


@dataclass(slots=True)
class Thought:
    """Tokens, and after each round the seconds since the start (prefill included) and the tokens so far.

    ``stop_reason`` None: it was still going on at the largest budget.
    """

    tokens: list[int] = field(default_factory=list)
    round_ends_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def within(self, budget_s: float) -> Thought:
        """The rounds that had ended by ``budget_s``: all of them for a thought that had ended by itself."""
        rounds = bisect_right(self.round_ends_s, budget_s)
        kept = self.num_tokens[rounds - 1] if rounds else 0
        ended = self.stop_reason if rounds == len(self.round_ends_s) else None
        return Thought(self.tokens[:kept], self.round_ends_s[:rounds], self.num_tokens[:rounds], ended)

    @property
    def seconds(self) -> float:
        """When its last token was there; 0 without any."""
        return self.round_ends_s[-1] if self.round_ends_s else 0.0


class _TimeIsUp(Exception):
    """Leaves a decoder's loop from its stream of tokens."""


def think(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    budget_s: float,
    max_tokens: int,
    rng: RandomSource,
    stop_ids: Collection[int],
    stop_strings: Sequence[str],
    clock: Clock,
) -> Thought:
    """Decode until the output ends or a round ends after ``budget_s``; that round is left out.

    The clock starts before the prefill and is read when a round's tokens are known to the host. Streaming makes the
    decoder follow the text, for every method alike; that time counts too.
    """
    thought = Thought()
    start_s = clock()

    def stamp(tokens: list[int], text: str) -> None:
        elapsed_s = clock() - start_s
        if elapsed_s > budget_s:
            raise _TimeIsUp
        thought.tokens.extend(tokens)
        thought.round_ends_s.append(elapsed_s)
        thought.num_tokens.append(len(thought.tokens))

    try:
        generation = decoder.generate(
            prompt, max_new_tokens=max_tokens, rng=rng, stop_ids=stop_ids, stop_strings=stop_strings, on_tokens=stamp
        )
    except _TimeIsUp:
        return thought
    thought.stop_reason = generation.stop_reason
    return thought
