"""What a prompt is, and what every prompt source offers. No tokenizer, no model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from specdiff2.types import ConfigError

Item = TypeVar("Item")


@dataclass(slots=True)
class Prompt:
    """One question to the verifier.

    Attributes:
        prompt_id: unique within its source; rollouts are named after it.
        messages: chat messages (``role``, ``content``), the last one from the user.
        answer: final reference answer as text, None where the source has none.
        meta: what the source knows besides (template, category, unit tests ...).
        later_turns: what the user says after the answer, one text a turn (``data.multi_turn`` unrolls them).
    """

    prompt_id: str
    messages: list[dict[str, str]]
    answer: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    later_turns: tuple[str, ...] = ()


class PromptSource(Protocol):
    """Where prompts come from; constructor arguments are its configuration."""

    def load(self) -> list[Prompt]: ...

    def describe(self) -> dict[str, Any]:
        """What identifies the prompts, JSON-ready: part of the fingerprint of rollouts made from them."""
        ...


def require_unique_ids(prompts: Sequence[Prompt], source: str) -> None:
    """Raises:
    ConfigError: no prompt at all, or two prompts with one id.
    """
    if not prompts:
        raise ConfigError(f"{source}: no prompt; expected at least one row, check the limit and the split")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ConfigError(f"{source}: prompt id {prompt.prompt_id!r} occurs twice; choose another id_field")
        seen.add(prompt.prompt_id)


def check_count(name: str, value: int | None, minimum: int) -> None:
    """Raises:
    ConfigError: ``value`` is neither None nor an integer >= ``minimum``.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
        raise ConfigError(f"{name}={value!r}: expected an integer >= {minimum}")


def take(rows: Iterable[Any], skip: int, limit: int | None, shuffle_seed: int | None = None) -> list[Any]:
    """Rows ``skip`` .. ``skip + limit``, reading no further than needed; with ``shuffle_seed`` those of the shuffled
    rows, for which all of them are read.
    """
    if shuffle_seed is not None:
        rows = shuffled(list(rows), shuffle_seed)
    chosen: list[Any] = []
    for index, row in enumerate(rows):
        if limit is not None and len(chosen) >= limit:
            break
        if index >= skip:
            chosen.append(row)
    return chosen


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """The items in an order that depends only on ``seed``."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order
