"""When a completion ends, what of it is kept, and what of it is streamed.

Order of the rules at every token: EOS id, stop id or stop string, ``max_new_tokens``. The token that ends the output is
its last one. Knows nothing of models, drafts or probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specdiff2.decoding.detokenize import Detokenizer, TextTokenizer
from specdiff2.types import ConfigError, StopReason

OnTokens = Callable[[list[int], str], None]


class Completion:
    """The growing output of one prompt.

    Tokens up to and including the one that ends the output are kept. ``text`` is cut where the stop string
    starts, and text that may turn out to be the start of a stop string is not streamed before that is decided.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: TextTokenizer | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: ``max_new_tokens`` < 1, a stop id that is no token id, an empty stop string, or stop
                strings without a tokenizer.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens!r}: expected an integer >= 1")
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in stop_ids):
            raise ConfigError(f"stop_ids={list(stop_ids)!r}: expected token ids, integers >= 0")
        if isinstance(stop_strings, str) or any(not isinstance(item, str) or not item for item in stop_strings):
            raise ConfigError(f"stop_strings={stop_strings!r}: expected a list of non-empty strings")
        if stop_strings and tokenizer is None:
            raise ConfigError(f"stop_strings={list(stop_strings)!r}: the verifier has no tokenizer to find them with")
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self._max_new_tokens = max_new_tokens
        self._eos_ids = frozenset(eos_ids)
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self._on_tokens = on_tokens
        # text is only followed while decoding where somebody needs it: it costs time in every round
        follows = tokenizer is not None and (bool(stop_strings) or on_tokens is not None)
        self._detokenizer = Detokenizer(tokenizer, stop_strings) if tokenizer is not None and follows else None
        self._text = ""
        self._num_streamed = 0  # characters

    @property
    def num_left(self) -> int:
        """Tokens that may still be added."""
        return self._max_new_tokens - len(self.tokens)

    def push(self, new_tokens: Sequence[int]) -> int:
        """Append until the output ends and stream what is certain; returns how many tokens were kept."""
        num_kept = 0
        for token in new_tokens:
            self.tokens.append(token)
            num_kept += 1
            self.stop_reason = self._reason_to_stop(token)
            if self.stop_reason is not None:
                break
        if self._on_tokens is not None:
            self._on_tokens(list(new_tokens[:num_kept]), self._take_streamable(new_tokens[:num_kept]))
        return num_kept

    def reason(self) -> StopReason:
        """Why the finished completion ended."""
        if self.stop_reason is None:
            raise ValueError("the completion has not ended: push tokens until stop_reason is set")
        return self.stop_reason

    def text(self) -> str:
        """The text of the finished completion."""
        if self._tokenizer is None:
            return ""
        if self._detokenizer is None:
            return Detokenizer(self._tokenizer).push(self.tokens)
        return self._text

    def _reason_to_stop(self, token: int) -> StopReason | None:
        at_cap = self.num_left == 0
        is_eos = token in self._eos_ids
        if self._stop_strings and self._detokenizer is not None:
            self._text += self._detokenizer.push([token])
            start = self._stop_start()
            if start is not None:
                self._text = self._text[:start]
                return "eos" if is_eos else "stop"
        if is_eos:
            return "eos"
        if token in self._stop_ids:
            return "stop"
        return "length" if at_cap else None

    def _stop_start(self) -> int | None:
        """Where the earliest stop string starts in the text that is not streamed yet."""
        starts = [self._text.find(string, self._num_streamed) for string in self._stop_strings]
        return min((start for start in starts if start >= 0), default=None)

    def _take_streamable(self, new_tokens: Sequence[int]) -> str:
        if self._detokenizer is None:
            return ""
        if not self._stop_strings:
            self._text += self._detokenizer.push(new_tokens)
        end = len(self._text) if self.stop_reason is not None else len(self._text) - self._num_undecided()
        piece, self._num_streamed = self._text[self._num_streamed : end], end
        return piece

    def _num_undecided(self) -> int:
        """Length of the longest end of the text that a stop string could start with."""
        longest = max((len(string) for string in self._stop_strings), default=0)
        for length in range(min(longest, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(string.startswith(end) for string in self._stop_strings):
                return length
        return 0
