"""What a set of prompts can be recognised by without its texts: a hash of each prompt and hashes of its word 8-grams.

Case, white space and punctuation are folded; arithmetic signs stay, as they are all that tells some problems apart. The
file is what evaluation needs of the prompts that a drafter was trained on, about 250 bytes a prompt.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import unicodedata
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdiff2.data.prompt import Prompt
from specdiff2.types import CorruptFileError

GRAM = 8  # words; as in the decontamination of Tulu 3 (arXiv 2411.15124, section 3.2)
TEMPLATED = ("gsm_symbolic", "code_stub", "open")  # sources of generated prompts, by the first part of their ids
SIGNATURES_FILE = "prompts.npz"
FORMAT_VERSION = 1
_WORD = re.compile(r"[^\W_]+|[+*/=<>^%]|-(?=\s*\d)")
_POWERS = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(GRAM)], dtype=np.uint64)


@dataclass(frozen=True)
class Signatures:
    """One entry per user turn, ``entry`` in the order of the prompts.

    Attributes:
        ids: prompt id of each entry; the turns of one prompt share it.
        whole: uint64 [entry], hash of the folded text.
        grams: uint32, hashes of the different word 8-grams of all entries, entry after entry.
        owners: int64, the entry of each gram.
    """

    ids: list[str]
    whole: np.ndarray[Any, Any]
    grams: np.ndarray[Any, Any]
    owners: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def families(self) -> np.ndarray[Any, Any]:
        """[entry] the generator of each entry, ``""`` for other sources."""
        heads = [prompt_id.split("/")[0] for prompt_id in self.ids]
        return np.array([head if head in TEMPLATED else "" for head in heads], dtype=object)

    def save(self, file: io.BufferedIOBase | Path) -> None:
        ids = np.frombuffer(json.dumps(self.ids).encode(), dtype=np.uint8)
        arrays = {"whole": self.whole, "grams": self.grams, "owners": self.owners.astype(np.uint32)}
        np.savez_compressed(file, version=np.array(FORMAT_VERSION), ids=ids, **arrays)  # type: ignore[arg-type]


def sign_prompts(prompts: Sequence[Prompt]) -> Signatures:
    """Signatures of what is asked in each prompt, turn by turn. What stands before its question (worked examples,
    earlier turns) does not count: many prompts share it.
    """
    return sign_texts(
        (prompt.prompt_id, text) for prompt in prompts for text in (prompt.messages[-1]["content"], *prompt.later_turns)
    )


def sign_texts(texts: Iterable[tuple[str, str]]) -> Signatures:
    """Signatures of ``(prompt id, text)`` pairs."""
    hashes: dict[str, int] = {}  # of words: a vocabulary is small
    ids, whole, grams = [], [], []
    for prompt_id, text in texts:
        words = fold(text)
        ids.append(prompt_id)
        whole.append(_hash(" ".join(words) or text))
        coded = np.array([hashes.setdefault(word, _hash(word)) for word in words], dtype=np.uint64)
        if len(coded) < GRAM:
            grams.append(np.zeros(0, dtype=np.uint32))
            continue
        mixed = (np.lib.stride_tricks.sliding_window_view(coded, GRAM) * _POWERS).sum(axis=1, dtype=np.uint64)
        grams.append(np.unique((mixed >> np.uint64(32)).astype(np.uint32)))
    owners = np.repeat(np.arange(len(ids)), [len(part) for part in grams])
    flat = np.concatenate([np.zeros(0, dtype=np.uint32), *grams])
    return Signatures(ids, np.array(whole, dtype=np.uint64), flat, owners)


def fold(text: str) -> list[str]:
    """Words and arithmetic signs, without case, white space and punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def read_signatures(path: Path) -> Signatures:
    """Raises:
    CorruptFileError: the file is damaged or of another format.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            if int(stored["version"]) != FORMAT_VERSION:
                raise ValueError(f"format {int(stored['version'])}, expected {FORMAT_VERSION}")
            ids = json.loads(stored["ids"].tobytes())
            found = Signatures(ids, stored["whole"], stored["grams"], stored["owners"].astype(np.int64))
        if len(found.ids) != len(found.whole) or len(found.grams) != len(found.owners):
            raise ValueError("arrays of different lengths")
        return found
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise CorruptFileError(
            f"{path}: not a file of prompt signatures ({error}); delete it, the next training run writes it again"
        ) from error


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")
