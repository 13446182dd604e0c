"""Swept values as axes of a plot: numbers where they are numbers, short distinct labels where they are not.

Folders that differ in a number at the end of one part (``step-25/best``, ``step-50/best``) are an axis of numbers too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

_LONGEST = 36
_ENDS_IN_NUMBER = re.compile(r"(.*?)(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept setting.

    Attributes:
        key: column of the rows.
        title: what the axis is called.
        labels: label by ``str`` of the value.
        numbers: number by ``str`` of the value; None where the values are names.
    """

    key: str
    title: str
    labels: dict[str, str]
    numbers: dict[str, float] | None

    def label(self, value: Any) -> str:
        """How tables and legends call a value; empty for a job that does not set the key."""
        return "" if value is None else self.labels[str(value)]

    def number(self, value: Any) -> float:
        """Position on a numeric axis."""
        assert self.numbers is not None
        return self.numbers[str(value)]

    @property
    def is_log(self) -> bool:
        """Whether the numbers grow by factors (1, 2, 4, 8; 1e-5, 1e-4, 1e-3) rather than by steps."""
        values = sorted(set((self.numbers or {}).values()))
        return len(values) > 2 and values[0] > 0 and values[-1] / values[0] >= 100


def make_axis(key: str, values: Sequence[Any]) -> Axis:
    """The axis of a column; ``values`` may repeat and hold None (not set in that job)."""
    distinct = list({str(value): value for value in values if value is not None}.values())
    name = key.rsplit(".", 1)[-1]
    labels = _labels(distinct)
    plain = [_plain_number(value) for value in distinct]
    if distinct and all(number is not None for number in plain):
        return Axis(key, name, labels, {str(v): n for v, n in zip(distinct, plain, strict=True) if n is not None})
    found = [_ENDS_IN_NUMBER.fullmatch(labels[str(value)]) for value in distinct]
    stems = {match.group(1) for match in found if match}
    if len(distinct) > 1 and all(found) and len(stems) == 1:
        numbers = {str(v): float(match.group(2)) for v, match in zip(distinct, found, strict=True) if match}
        return Axis(key, " ".join([name, stems.pop().strip("-_ .")]).strip(), labels, numbers)
    return Axis(key, name, labels, None)


def _plain_number(value: Any) -> float | None:
    """A number, or the only number of a list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _labels(values: Sequence[Any]) -> dict[str, str]:
    """Short labels that still differ: of folders, the parts that are not the same everywhere."""
    texts = {str(value): _text(value) for value in values}
    paths = {key: PurePath(text).parts for key, text in texts.items() if "/" in text}
    if len(paths) > 1:
        start = _num_shared(list(paths.values()))
        end = _num_shared([parts[start:][::-1] for parts in paths.values()])
        short = {key: "/".join(parts[start : len(parts) - end]) or parts[-1] for key, parts in paths.items()}
        texts |= short if len(set(short.values())) == len(short) else {}
    shortened = {key: text if len(text) <= _LONGEST else "\N{HORIZONTAL ELLIPSIS}" + text[1 - _LONGEST :]
                 for key, text in texts.items()}  # fmt: skip
    return shortened if len(set(shortened.values())) == len(texts) else texts


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(map(_text, value)) + "]" if isinstance(value, list) else str(value)


def _num_shared(lists: Sequence[Sequence[str]]) -> int:
    """Number of leading parts that all have in common."""
    count = 0
    for parts in zip(*lists, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count
