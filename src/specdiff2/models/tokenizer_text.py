"""One tokenizer as seen from its text: the bytes behind every token id, and encoding in the middle of a text.

Hugging Face tokenizers answer for whole texts. Decoding with two tokenizers needs less and more: what bytes one token
stands for (a token may hold a part of a character), and how a text is tokenised that continues another one, without the
blank that SentencePiece-like tokenizers put in front of a text. Both are read off the tokenizer's own description
(``tokenizer.json``: decoder, normalizer, pre-tokenizer); its vocabulary and merges stay untouched.

Two ways to write bytes are known: ByteLevel, one printable character for each byte (openai/gpt-2, src/encoder.py), and
byte fallback, tokens such as ``<0xE2>`` beside pieces whose blank is U+2581 (google/sentencepiece, issue 621). Knows
nothing of a second tokenizer (``models.tokenizer_bridge``) and of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from specdiff2.types import ConfigError

BLANK = "\u2581"  # SentencePiece's visible blank
ROLES = ("eos", "bos", "pad")
_KNOWN_DECODERS = {"Sequence", "ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
_NESTED = {"decoders", "normalizers", "pretokenizers"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "Hello, world 12"


class TokenizerText:
    """The text side of a tokenizer.

    Attributes:
        num_ids: ids 0 .. num_ids-1 may be used; ``vocab_size`` where the model knows fewer than the tokenizer.
        special_ids: ids below ``num_ids`` that stand for no text, with their strings.
        roles: the ids of "eos", "bos" and "pad", where the tokenizer has them.
        adds_bos: the tokenizer puts its BOS in front of every text.
        prefix_first, prefix_later: it adds a blank at the start of a text, and after a special token within it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> None:
        """Raises:
        ConfigError: a tokenizer without a fast (``tokenizers``) backend, or one whose pieces are not understood.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"tokenizer {type(tokenizer).__name__}: expected a fast tokenizer, to know the bytes of its tokens; "
                "load the model from a folder that holds tokenizer.json"
            )
        self._source, self._vocab_size = tokenizer, vocab_size
        vocab = backend.get_vocab(with_added_tokens=True)
        num_known = max(vocab.values()) + 1
        self.num_ids = num_known if vocab_size is None else min(num_known, vocab_size)
        added = backend.get_added_tokens_decoder()
        hidden = set(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}
        strings = {token: text for text, token in vocab.items()}
        self.special_ids = {token: strings[token] for token in sorted(hidden & strings.keys()) if token < self.num_ids}
        ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ROLES}
        self.roles: dict[str, int] = {role: i for role, i in ids.items() if i is not None and i < self.num_ids}
        self._pieces = self._read_pieces(strings, {i: entry.content for i, entry in added.items()}, backend)
        self._continuations = {
            piece: token for token, piece in reversed(list(enumerate(self._pieces))) if piece and _all_inner(piece)
        }
        self._start, self._inner = _plain_copy(backend, keep_prefix=True), _plain_copy(backend, keep_prefix=False)
        self.prefix_first = self.encode("a", prefix=True) != self.encode("a", prefix=False)
        self.prefix_later = self.prefix_first and self._has_prefix_after_special(backend)
        self.adds_bos = list(tokenizer("a")["input_ids"])[:1] == [self.roles.get("bos")]
        self._check_pieces(tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # the copies' setting that special tokens are text does not survive pickling
        return TokenizerText, (self._source, self._vocab_size)

    def piece(self, token: int) -> bytes | None:
        """The bytes of one token; None for special tokens and for ids that are no token."""
        return self._pieces[token] if 0 <= token < self.num_ids else None

    def encode(self, text: str, *, prefix: bool) -> list[int]:
        """Ids of ``text`` without special tokens, also where it spells one; ``prefix``: as the start of a text."""
        return self.encoding(text, prefix=prefix).ids

    def encoding(self, text: str, *, prefix: bool) -> Encoding:
        """The same with the character range of each token."""
        return (self._start if prefix else self._inner).encode(text, add_special_tokens=False)

    def spell(self, data: bytes) -> list[int]:
        """Tokens for the last bytes of a character, longest first; as far as there are tokens for them."""
        ids: list[int] = []
        while data:
            sizes = [size for size in range(len(data), 0, -1) if data[:size] in self._continuations]
            if not sizes:
                break
            ids.append(self._continuations[data[: sizes[0]]])
            data = data[sizes[0] :]
        return ids

    def _read_pieces(self, strings: dict[int, str], added: dict[int, str], backend: Tokenizer) -> list[bytes | None]:
        decoder = json.loads(backend.to_str())["decoder"]
        kinds = {part["type"] for part in _parts(decoder)}
        if not kinds or not kinds <= _KNOWN_DECODERS:
            raise ConfigError(
                f"tokenizer with decoder {sorted(kinds) or None}: its pieces are not understood; expected ByteLevel or "
                "SentencePiece-like ones (Metaspace, byte fallback)"
            )
        pieces: list[bytes | None] = [None] * self.num_ids
        for token, string in strings.items():
            if token >= self.num_ids or token in self.special_ids:
                continue
            if token in added:  # stands for its own text, whatever the alphabet of the others
                pieces[token] = added[token].encode()
            elif "ByteLevel" in kinds:
                pieces[token] = _byte_level_piece(string)
            else:
                match = _BYTE_TOKEN.fullmatch(string) if "ByteFallback" in kinds else None
                blanks = kinds & {"Metaspace", "Replace"}
                text = string.replace(BLANK, " ") if blanks else string
                pieces[token] = bytes([int(match[1], 16)]) if match else text.encode()
        return pieces

    def _has_prefix_after_special(self, backend: Tokenizer) -> bool:
        for string in self.special_ids.values():
            ids = backend.encode(string + "a", add_special_tokens=False).ids
            if ids and ids[0] in self.special_ids:
                return ids[1:] == self.encode("a", prefix=True)
        return False

    def _check_pieces(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = [token for token in self.encode(_PROBE, prefix=True) if self.piece(token) is not None]
        ours = b"".join(self._pieces[token] or b"" for token in ids).decode()
        theirs = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if ours.removeprefix(" ") != str(theirs).removeprefix(" "):
            raise ConfigError(f"tokenizer: {ids} decode to {theirs!r}, its pieces say {ours!r}; not a known kind")


def _all_inner(piece: bytes) -> bool:
    """Only bytes that continue a UTF-8 character."""
    return all(0x80 <= byte < 0xC0 for byte in piece)


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a ByteLevel piece: printable Latin-1 characters stand for themselves, the
    other bytes, in order, for the characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_piece(string: str) -> bytes:
    if all(char in _BYTE_OF for char in string):
        return bytes(_BYTE_OF[char] for char in string)
    return string.encode()


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json and those nested in it."""
    if component is not None:
        yield component
        for name in _NESTED & component.keys():
            for part in component[name]:
                yield from _parts(part)


def _without_prefix(component: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts no blank in front of the text."""
    if component is None or component["type"] == "Prepend":
        return None  # an empty Prepend would spoil the character ranges
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "ByteLevel":
        return component | {"add_prefix_space": False}
    nested = {name: map(_without_prefix, component[name]) for name in _NESTED & component.keys()}
    return component | {name: [part for part in parts if part is not None] for name, parts in nested.items()}


def _plain_copy(backend: Tokenizer, *, keep_prefix: bool) -> Tokenizer:
    """A copy that reads special tokens as text and adds nothing; without the blank in front unless kept."""
    description = json.loads(backend.to_str())
    description |= {"post_processor": None, "truncation": None, "padding": None}
    if not keep_prefix:
        for name in ("normalizer", "pre_tokenizer"):
            description[name] = _without_prefix(description[name])
    copy = Tokenizer.from_str(json.dumps(description))
    copy.encode_special_tokens = True
    return copy
