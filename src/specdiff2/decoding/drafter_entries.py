"""What ``drafters=[...]`` says, in a configuration or in Python: one entry per drafter (or temperature) of an ensemble.

    drafters=[{drafter: shipped, K: 4, temperature: 1.0}, {drafter: outputs/drafters/smollm2_prefix/best, K: 4}]

Entries are checked before any model loads; how a drafter's name becomes a drafter is the caller's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff2.decoding.ensemble import DrafterEnsemble, Member
from specdiff2.protocols import Drafter
from specdiff2.types import ConfigError, SamplingParams


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One entry.

    Attributes:
        drafter: what names it (a folder, ``shipped``, ``untrained``), or a loaded drafter. Entries with the same one
            share it; each entry costs a denoising pass a round.
        K: its number of drafts.
        temperature: of its drafts; None means the sampler's, and without one 0 (the most probable window) for a single
            draft, else 1.
        name: how tables call it; None means one made from ``drafter``, with the temperature where that tells entries
            apart.

    Raises:
        ConfigError: a value out of range.
    """

    drafter: Any
    K: int = 1
    temperature: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.drafter, str | Path) and str(self.drafter)) and not hasattr(self.drafter, "gamma"):
            raise ConfigError(f"drafter={self.drafter!r} in drafters: expected a folder, or the name of a drafter")
        if isinstance(self.K, bool) or not isinstance(self.K, int) or self.K < 1:
            raise ConfigError(f"K={self.K!r} of drafter {self.drafter!r}: expected an integer >= 1")
        if self.temperature is not None:
            SamplingParams(self.temperature)
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise ConfigError(f"name={self.name!r} of drafter {self.drafter!r}: expected some text, or null")

    def label(self) -> str:
        """The given name, or one made from ``drafter``: of a folder the last two parts (``smollm2_prefix/best``)."""
        if self.name is not None:
            return self.name
        if isinstance(self.drafter, str | Path):
            return "/".join(Path(self.drafter).parts[-2:])
        return type(self.drafter).__name__

    def sampling(self, temperature: float | None, top_k: int, top_p: float) -> SamplingParams:
        """The law of its drafts; ``temperature``, ``top_k`` and ``top_p`` are the sampler's."""
        default = (0.0 if self.K == 1 else 1.0) if temperature is None else temperature
        return SamplingParams(default if self.temperature is None else self.temperature, top_k, top_p)


def read_entries(entries: Sequence[Mapping[str, Any]]) -> tuple[DrafterEntry, ...]:
    """``drafters`` as checked entries, each with a name of its own.

    Raises:
        ConfigError: no entries, an unknown or missing key, a value out of range, or two entries that nothing tells
            apart.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        raise ConfigError(f"drafters={entries!r}: expected a list of at least one {{drafter: ..., K: ...}}")
    found = [_read_entry(entry, index) for index, entry in enumerate(entries)]
    labels = [entry.label() for entry in found]
    named = [
        f"{label} T={entry.temperature:g}"
        if entry.name is None and entry.temperature is not None and labels.count(label) > 1
        else label
        for entry, label in zip(found, labels, strict=True)
    ]
    for name in named:
        if named.count(name) > 1:
            raise ConfigError(
                f"drafters: {named.count(name)} entries are called {name!r}; give each a name of its own (name: ...), "
                "or make one entry with a larger K of them"
            )
    return tuple(dataclasses.replace(entry, name=name) for entry, name in zip(found, named, strict=True))


def _read_entry(entry: object, index: int) -> DrafterEntry:
    known = [field.name for field in dataclasses.fields(DrafterEntry)]
    if not isinstance(entry, Mapping) or "drafter" not in entry or not set(entry) <= set(known):
        raise ConfigError(
            f"drafters[{index}]={entry!r}: expected a mapping with key `drafter` and, if wanted, {', '.join(known[1:])}"
        )
    return DrafterEntry(**entry)


def num_drafts_of(entries: Sequence[DrafterEntry]) -> int:
    """K of the round: the sum over the entries."""
    return sum(entry.K for entry in entries)


def gather(
    entries: Sequence[DrafterEntry],
    load: Callable[[Any], Drafter],
    *,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> DrafterEnsemble:
    """The ensemble of ``entries``. ``load`` makes a drafter of an entry's ``drafter``; it is called once for each
    entry, and gives the same object for the same name where models are to be shared."""
    return DrafterEnsemble(
        [
            Member(entry.label(), load(entry.drafter), entry.K, entry.sampling(temperature, top_k, top_p))
            for entry in entries
        ]
    )
