"""The merged rows of a sweep as CSV, Parquet and the cells of a printed table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.sweep_axes import Axis
from specdiff2.evaluation.sweep_training import BEST, shared_note
from specdiff2.evaluation.table import MEASURED, measured_cells, method_label, number

Row = dict[str, Any]
_LISTS = ("accept_rate", "survival", "num_reached", "curves")  # in JSON and Parquet, too long for a CSV cell
_NESTED = ("accuracy", "lossless_check")  # objects, or null: their parts become columns
_TRAINED = ("step", BEST, "best_step", "val/streak_greedy", "val/streak", "probe/mean_streak", "train/loss")


def is_training(rows: Sequence[Row]) -> bool:
    """Whether the rows are of trainings, not of evaluations."""
    return any(BEST in row for row in rows)


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row; intervals as two columns, curves left to JSON and Parquet."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row) -> Row:
    out: Row = {}
    for key, value in row.items():
        if key in _LISTS or (value is None and key in _NESTED):
            continue
        if key.endswith("_ci"):
            low, high = value if value is not None else ("", "")
            out |= {f"{key}_low": low, f"{key}_high": high}
        elif isinstance(value, dict):
            out |= {f"{key}_{name}": part for name, part in value.items() if not isinstance(part, (dict, list))}
        elif isinstance(value, list):
            out[key] = json.dumps(value, ensure_ascii=False, allow_nan=False)
        else:
            out[key] = "" if value is None else value
    return out


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """All columns with their types; lists and objects stay nested, values of several types in a column become text."""
    import pyarrow as pa  # half a second that only sweeps pay
    import pyarrow.parquet as pq

    columns = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        try:
            columns[key] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            columns[key] = pa.array([None if value is None else _as_text(value) for value in values])
    pq.write_table(pa.table(columns), path)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table_cells(rows: Sequence[Row], axes: Sequence[Axis]) -> tuple[list[str], list[list[str]], int]:
    """Head, lines, and how many leading columns are text: swept values, then what was measured."""
    if is_training(rows):
        column = "drafter" if shared_note(rows) else "published"
        shown = [name for name in _TRAINED if any(row.get(name) is not None for row in rows)]
        head = [*(axis.key for axis in axes), "drafter", *(name.replace("_", " ") for name in shown)]
        lines = [
            [*(axis.label(row[axis.key]) for axis in axes), row.get(column) or row.get("drafter") or "",
             *(number(row.get(name), 0 if name.endswith("step") else 3) for name in shown)]
            for row in rows
        ]  # fmt: skip
        return head, lines, len(axes) + 1
    many = len({row["benchmark"] for row in rows}) > 1
    head = [*(axis.key for axis in axes), *(["benchmark"] if many else []), "method", *MEASURED]
    lines = [
        [*(axis.label(row[axis.key]) for axis in axes), *([row["benchmark"]] if many else []),
         method_label(row["method"]), *measured_cells(row)]
        for row in rows
    ]  # fmt: skip
    return head, lines, len(head) - len(MEASURED)


def merged_table(rows: Sequence[Row], axes: Sequence[Axis]) -> str:
    """Aligned plain text."""
    if not rows:
        return "no finished job"
    head, lines, num_text = table_cells(rows, axes)
    cells = [head, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    shown = [
        "  ".join(c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in [shown[0], "  ".join("-" * width for width in widths), *shown[1:]])
