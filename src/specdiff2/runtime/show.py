"""One prompt in the terminal: the text as it is decoded, with every accepted streak marked.

In colour, streaks alternate between two greens and the verifier's own tokens are plain; without colour a streak
stands in brackets: ``[accepted draft tokens]own token``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from specdiff2.decoding.detokenize import Detokenizer
from specdiff2.types import Generation

_STREAKS = ("\x1b[30;48;5;114m", "\x1b[30;48;5;79m")
_RESET = "\x1b[0m"


def use_color(choice: str, stream: TextIO) -> bool:
    """``auto``: on a terminal, unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and "NO_COLOR" not in os.environ


class StreakPrinter:
    """``on_tokens`` callback: each call is one round, whose last token is the verifier's own.

    A round cut by a stop has no token of the verifier's own; ``on_tokens`` does not tell, so its last accepted
    token is shown as the verifier's.
    """

    def __init__(self, tokenizer: Any, *, color: bool, stream: TextIO | None = None) -> None:
        self._detokenizer, self._color = Detokenizer(tokenizer), color
        self._stream = sys.stdout if stream is None else stream
        self._num_rounds = 0

    def __call__(self, tokens: list[int], text: str) -> None:
        pieces = [self._detokenizer.push([token]) for token in tokens]
        self._stream.write(mark(pieces, self._num_rounds, color=self._color))
        self._stream.flush()
        self._num_rounds += 1


def mark(pieces: list[str], round_index: int, *, color: bool) -> str:
    """Text of one round: its streak marked, the last piece plain."""
    streak, own = "".join(pieces[:-1]), "".join(pieces[-1:])
    if not streak:
        return own
    return f"{_STREAKS[round_index % 2]}{streak}{_RESET}{own}" if color else f"[{streak}]{own}"


def describe_generation(name: str, generation: Generation) -> str:
    """One line of numbers under the text."""
    rounds, seconds = generation.rounds, generation.decode_s
    accepted = sum(r.num_accepted for r in rounds)
    streak = f"{accepted / len(rounds):.2f}" if rounds else "none"
    tau = f"{sum(r.num_committed for r in rounds) / len(rounds):.2f}" if rounds else "none"
    passes = str(len(rounds)) if rounds else "an unknown number of"
    speed = f"{generation.num_tokens / seconds:.1f} tokens/s" if seconds > 0 else "no time measured"
    return (
        f"{name}: {generation.num_tokens} tokens in {passes} verifier passes, mean streak {streak} (without the "
        f"bonus token), tau {tau} (with it), {speed}, stopped by {generation.stop_reason}"
    )


def show_prompt(
    prompt: str, decoders: dict[str, Any], encode: Callable[[str], list[int]], tokenizer: Any, *, color: bool,
    decode_options: Callable[[], dict[str, Any]],
) -> dict[str, Generation]:  # fmt: skip
    """Decode ``prompt`` with every decoder, twice: streamed for the eye, then silently for the numbers.

    Printing and detokenising every round is time that no benchmark has, so the numbers come from a second decode
    with the same random numbers; the streamed one has warmed everything up. Returns the second ones by name.
    """
    ids = encode(prompt)
    generations = {}
    for name, decoder in decoders.items():
        print(f"\n--- {name} ---")
        decoder.generate(ids, on_tokens=StreakPrinter(tokenizer, color=color), **decode_options())
        generations[name] = decoder.generate(ids, **decode_options())
        print(f"\n\n{describe_generation(name, generations[name])}")
    return generations
