"""Reading the prompt texts that come with the package, and which split each of them belongs to.

A file of ``data/assets`` holds blocks that begin with a marked heading; what the lines of a block mean is the
reader's business (``code_stubs``, ``open_questions``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Literal, TypeVar, get_args

from specdiff2.data.prompt import check_count
from specdiff2.types import ConfigError

OwnSplit = Literal["train", "val"]
T = TypeVar("T")

_VAL_SHARE = 0.1


def read_blocks(name: str, heading: str) -> list[tuple[str, list[str]]]:
    """``(text after the heading mark, non-blank lines below it)`` for each block; lines with ``//`` are remarks."""
    blocks: list[tuple[str, list[str]]] = []
    for line in files("specdiff2.data").joinpath("assets", name).read_text(encoding="utf-8").splitlines():
        if line.startswith(heading):
            blocks.append((line.removeprefix(heading).strip(), []))
        elif line.strip() and not line.startswith("//"):
            blocks[-1][1].append(line.rstrip())
    return blocks


def asset_digest(name: str) -> str:
    """Hash of a text file of the package: other texts are another source."""
    return hashlib.sha256(files("specdiff2.data").joinpath("assets", name).read_bytes()).hexdigest()[:16]


def check_own_arguments(split: str, num_prompts: int, seed: int) -> None:
    """Raises:
    ConfigError: an unknown split, a count below 1 or a negative seed.
    """
    if split not in get_args(OwnSplit):
        raise ConfigError(f"split={split!r}: expected one of {', '.join(get_args(OwnSplit))}")
    check_count("num_prompts", num_prompts, 1)
    check_count("seed", seed, 0)


def of_split(items: Sequence[T], key: Callable[[T], str], split: str) -> list[T]:
    """The items whose key belongs to ``split``: a hash decides, so a new text moves no other one."""
    return [item for item in items if split_of(key(item)) == split]


def split_of(key: str) -> OwnSplit:
    return "val" if hashlib.sha256(key.encode("utf-8")).digest()[0] < 256 * _VAL_SHARE else "train"


def check_enough(source: str, split: str, num_prompts: int, available: int) -> None:
    """Raises:
    ConfigError: fewer prompts than asked for.
    """
    if num_prompts > available:
        raise ConfigError(
            f"num_prompts={num_prompts}: {source} has only {available} prompts in split {split!r}; ask for fewer"
        )
