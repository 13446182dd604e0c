"""Token ids to text, a few tokens at a time.

Byte-level vocabularies cut multi-byte characters in pieces, and SentencePiece vocabularies drop the blank of
whatever token comes first. Both are handled by decoding the new tokens together with those just before them
and showing only what was added. Knows nothing of models or stop rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that decoding needs."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class Detokenizer:
    """Incremental detokenisation of one completion.

    Special tokens are not shown, except those in ``shown_strings`` (a stop string may be a special token).
    The pieces returned by ``push`` join to the text of all tokens; a character whose last bytes are missing is
    held back, and left out if they never come.
    """

    def __init__(self, tokenizer: TextTokenizer, shown_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(
            token for token in _special_ids(tokenizer) if not _occurs_in(token, shown_strings, self._decode)
        )
        self._context: list[int] = []  # already shown, decoded again for the sake of what follows
        self._pending: list[int] = []  # not wholly shown yet
        self._num_shown = 0  # characters of the pending tokens that are shown

    def push(self, tokens: Sequence[int]) -> str:
        """Text that became complete with ``tokens``."""
        self._pending += [token for token in tokens if token not in self._hidden]
        text = self._pending_text()
        complete = text.rstrip(REPLACEMENT)
        piece = complete[self._num_shown :]
        self._num_shown = len(complete)
        if text and text == complete:
            self._context, self._pending, self._num_shown = self._pending, [], 0
        return piece

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        # clean-up would rewrite blanks before punctuation, so that text already shown could change
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _special_ids(tokenizer: TextTokenizer) -> set[int]:
    # all_special_ids lists the named ones (BOS, EOS ...); other control tokens are only flagged where they were added
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def _occurs_in(token: int, strings: Sequence[str], decode: Callable[[list[int]], str]) -> bool:
    text = decode([token]) if strings else ""
    return bool(text) and any(text in string for string in strings)
