"""One growing text in two tokenizers: extended by the verifier's ids, seen by the drafter in its own.

Everything goes through bytes, since a token may end inside a character. The drafter sees whole characters only;
committed bytes of an unfinished one are withheld until it is finished, and a byte that can never become part of a
character is shown as U+FFFD. Special tokens cut the text into sections that are tokenised on their own.

The work of a round is bounded. The drafter's ids are those of tokenising each section as a whole, but only a window at
its end is tokenised again: its older part is settled at a token boundary from which on tokenising the rest alone gives
the same ids. For BPE a boundary that is in the final result was never crossed by a merge, so that what follows it does
not depend on what precedes it; only a change that ran back over all ``SETTLE`` tokens of the window would be missed.
The verifier's side needs the last few committed ids only.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdiff2.models.tokenizer_text import TokenizerText

if TYPE_CHECKING:
    from specdiff2.models.tokenizer_bridge import TokenizerBridge

SETTLE = 64  # drafter tokens that stay open to change at the end of the text
SETTLE_TRIES = 16
TAILS = (8, 2)  # verifier tokens that a draft is tokenised together with; the longest one that fits is taken


class BridgedText:
    """A text under construction; made by ``TokenizerBridge.start``."""

    def __init__(self, bridge: TokenizerBridge) -> None:
        self._bridge = bridge
        self._settled: list[int] = []  # drafter ids that do not change any more
        self._window = ""  # visible text after them, all of it in the current section
        self._window_ids: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[int] = []  # last verifier ids of the current section
        self._tail_is_section = True  # the section has no others
        self._is_empty = True  # no committed token at all
        self._is_first = True  # nothing but a BOS before the current section
        self._start_section()

    @property
    def drafter_ids(self) -> list[int]:
        """The drafter's ids of the visible text; at least one, as a drafter needs something to continue."""
        return self._bridge.opened(self._settled + self._window_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed verifier ids. Ids that are no token are not shown; they separate what surrounds them."""
        verifier, data = self._bridge.verifier, bytearray()
        for token in tokens:
            piece = verifier.piece(token)
            if piece is None:
                self._show(bytes(data), final=True)
                data.clear()
                self._append_special(token)
                continue
            self._is_empty = False
            at_start = self._tail_is_section and not self._tail
            data += piece.removeprefix(b" ") if at_start and self._has_prefix(verifier) else piece
            self._tail.append(token)
            if len(self._tail) > TAILS[0]:
                del self._tail[0]
                self._tail_is_section = False
        self._show(bytes(data))

    def seal(self) -> None:
        """Keep a token boundary here: text that follows is tokenised as a continuation of its own."""
        if self._window:
            self._settle(len(self._window_ids), len(self._window))

    def verifier_ids(self, drafted: Sequence[int], limit: int) -> list[int]:
        """Verifier ids, ``limit`` at most, that continue the committed ones with the text of ``drafted``.

        A draft ends before a special token of the drafter's or an id that is no token (its EOS becomes the verifier's),
        before bytes that are no UTF-8 and before text that the verifier has no tokens for. Nothing is left of a draft
        that does not finish the committed text's unfinished character.
        """
        data, ends = self._draft_bytes(drafted)
        pending = self._utf8.getstate()[0]
        text = _whole_characters(data)
        ends = ends and len(text) == len(data)
        if not text.startswith(pending) or (pending and len(text) == len(pending)):
            return []
        ids = self._continue(text[len(pending) :]) if text else []
        real = next((n for n, i in enumerate(ids) if self._bridge.verifier.piece(i) is None), len(ids))
        if real < len(ids):  # the verifier has no token for it
            ids, ends = ids[:real], False
        eos = self._bridge.verifier_eos
        return [*ids, *([eos] if ends and eos is not None else [])][:limit]

    def _draft_bytes(self, drafted: Sequence[int]) -> tuple[bytes, bool]:
        """The bytes of a draft, and whether it ends with EOS."""
        drafter, data, ends = self._bridge.drafter, bytearray(), False
        for token in drafted:
            piece = drafter.piece(token)
            if piece is None:
                ends = self._bridge.is_end(token)
                break
            data += piece
        if not self._window and self._opens_section and self._has_prefix(drafter):
            data = data.removeprefix(b" ")
        return bytes(data), ends

    def _continue(self, data: bytes) -> list[int]:
        """Verifier ids for UTF-8 that may begin inside a character, after the committed ids."""
        verifier = self._bridge.verifier
        for size in TAILS:
            tail = self._tail[-size:]
            head = b"".join(verifier.piece(token) or b"" for token in tail)
            bare = head.removeprefix(b" ") + data
            prefix = self._tail_is_section and len(tail) == len(self._tail) and self._has_prefix(verifier)
            prefix = prefix and not bare.startswith(b" ")  # no tokenizer puts a blank in front of a blank
            try:
                text = (bare if prefix else head + data).decode()
            except UnicodeDecodeError:  # the tail begins inside a character
                continue
            ids = verifier.encode(text, prefix=prefix)
            if ids[: len(tail)] == tail:
                return ids[len(tail) :]
        # the committed ids are not how the verifier tokenises the longer text: the draft's text stands alone
        num_inner = next((n for n, byte in enumerate(data) if not 0x80 <= byte < 0xC0), len(data))
        spelled = verifier.spell(data[:num_inner])
        if b"".join(verifier.piece(token) or b"" for token in spelled) != data[:num_inner]:
            return spelled
        return spelled + verifier.encode(data[num_inner:].decode(), prefix=False)

    def _append_special(self, token: int) -> None:
        shown = self._bridge.special(token)
        is_bos = token == self._bridge.verifier.roles.get("bos")
        self._is_first, self._is_empty = self._is_empty and is_bos, False
        self._settled += self._window_ids
        if shown is not None:
            self._settled.append(shown)
        self._start_section()

    def _start_section(self) -> None:
        self._window, self._window_ids = "", []
        self._settle_at = 2 * SETTLE
        self._opens_section = True  # the window begins where the section does
        self._tail, self._tail_is_section = [], True

    def _has_prefix(self, side: TokenizerText) -> bool:
        """Whether this tokenizer puts a blank in front of the current section."""
        return side.prefix_first if self._is_first else side.prefix_later

    def _show(self, data: bytes, *, final: bool = False) -> None:
        """Append to the visible text; ``final``: an unfinished character stays unfinished."""
        text = self._utf8.decode(data, final)
        if final:
            self._utf8.reset()
        if not text:
            return
        self._window += text
        drafter = self._bridge.drafter
        encoding = drafter.encoding(self._window, prefix=self._opens_section and self._has_prefix(drafter))
        self._window_ids = encoding.ids
        if len(self._window_ids) < self._settle_at:
            return
        self._settle_at = len(self._window_ids) + SETTLE  # where no boundary will do
        newest = len(self._window_ids) - SETTLE
        for index in range(newest, max(newest - SETTLE_TRIES, 0), -1):
            start = encoding.offsets[index][0]
            if drafter.encode(self._window[start:], prefix=False) == self._window_ids[index:]:
                self._settle(index, start)
                self._settle_at = 2 * SETTLE
                return

    def _settle(self, num_ids: int, num_characters: int) -> None:
        self._settled += self._window_ids[:num_ids]
        self._window, self._window_ids = self._window[num_characters:], self._window_ids[num_ids:]
        self._opens_section = False


def _whole_characters(data: bytes) -> bytes:
    """As much of ``data`` as is UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
