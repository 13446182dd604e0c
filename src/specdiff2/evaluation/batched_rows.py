"""What rows of a benchmark with batches say besides: the speed of many prompts at once.

    speedup                    tokens_per_s / that of the verifier alone at the SAME batch size
    gain_over_single           tokens_per_s / that of the verifier alone at batch size 1
    tokens_per_s               tokens of all rows of the batch / wall seconds of its rounds

Prompts of a block share their seconds, so intervals come from resampling blocks (``Record.group``), in pairs: every
method and batch size has decoded the same blocks. Reads records and rows only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specdiff2.evaluation.bootstrap import BootstrapOptions, ratio_of_ratios_interval
from specdiff2.evaluation.records import Record

Row = dict[str, Any]
_BATCHED = re.compile(r"(.+)_batch-(\d+)")


def batched_name(method: str, batch_size: int | None) -> str:
    """How records call a method at a batch size; at 1, and where prompts are decoded one by one, by its own name."""
    return method if batch_size in (None, 1) else f"{method}_batch-{batch_size}"


def split_name(name: str) -> tuple[str, int]:
    """Inverse of ``batched_name``."""
    match = _BATCHED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 1)


def tokens_and_seconds(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Sums by block, or by prompt where prompts are decoded one by one, in the order of the records."""
    sums: dict[int, list[float]] = {}
    for index, record in enumerate(records):
        unit = sums.setdefault(index if record.group is None else record.group, [0.0, 0.0])
        unit[0] += len(record.tokens)
        unit[1] += record.decode_s
    return [(tokens, seconds) for tokens, seconds in sums.values()]


def batch_columns(group: Sequence[Record], single: Sequence[Record] | None, options: BootstrapOptions) -> Row:
    """Columns of one method at one batch size; nothing without batches.

    Args:
        single: the verifier alone at batch size 1; None where it was not measured.
    """
    if group[0].batch_size is None:
        return {}
    columns: Row = {"batch_size": group[0].batch_size, "gain_over_single": None, "gain_over_single_ci": None}
    if single:
        mine, theirs = tokens_and_seconds(group), tokens_and_seconds(single)
        totals = [[sum(column) for column in zip(*side, strict=True)] for side in (mine, theirs)]
        if all(seconds > 0 for _, seconds in totals):
            columns["gain_over_single"] = (totals[0][0] / totals[0][1]) / (totals[1][0] / totals[1][1])
        interval = None if group is single else ratio_of_ratios_interval(mine, theirs, options)
        columns["gain_over_single_ci"] = None if interval is None else list(interval)
    return columns


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows with a batch size by method, ascending."""
    found: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if row.get("batch_size")), key=lambda row: row["batch_size"]):
        found.setdefault(split_name(row["method"])[0], []).append(row)
    return found
