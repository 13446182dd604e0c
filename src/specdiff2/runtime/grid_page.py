"""A page over the settings of a grid: what a sweep's page shows of its jobs, of methods measured in one run.

Which method has which settings follows from the run's own configuration (``runtime.grid``); the numbers are those of
``summary.json``. Loads no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json, write_text
from specdiff2.evaluation.report_sweep import sweep_page
from specdiff2.evaluation.sweep_axes import Axis, make_axis
from specdiff2.runtime.grid import grid_methods

Row = dict[str, Any]
GRID_FILE = "grid.html"


def grid_rows(rows: Sequence[Row], config: Mapping[str, Any]) -> tuple[list[Row], list[Axis]]:
    """Rows with the settings of a grid as columns (null for methods that it has not made), and these as axes.

    ``line`` is the sampler that the grid varied: methods that differ only in the settings are points of one line.
    """
    if not config.get("grid"):
        return list(rows), []
    made = {name: values for name, (_, values) in grid_methods(config["sampler"], config["grid"]).items()}
    unset = dict.fromkeys(config["grid"])
    rows = [
        {**row, **(made[row["method"]] | {"line": config["sampler"]["name"]} if row["method"] in made else unset)}
        for row in rows
    ]
    return rows, [make_axis(key, [row[key] for row in rows]) for key in unset]


def lines(rows: Sequence[Row]) -> list[Row]:
    """Rows of ``grid_rows`` with the line as their method, for curves over the settings."""
    return [{**row, "job": row["method"], "method": row.get("line", row["method"])} for row in rows]


def write_grid_page(folder: Path) -> Path | None:
    """``grid.html`` beside the report of an evaluation with a grid; None without one.

    Raises:
        CorruptFileError: a file of the run is damaged.
    """
    run, summary = (read_json(folder / name, "a run's file; write it again") for name in ("run.json", "summary.json"))
    rows, axes = grid_rows((summary or {}).get("rows", []), (run or {}).get("config", {}))
    if not axes:
        return None
    made = [row for row in lines(rows) if "line" in row]
    note = "Methods of one run: every prompt was decoded with all of them in turn. The others are in report.html."
    write_text(folder / GRID_FILE, sweep_page(axes, made, [], [note], grid=True))
    return folder / GRID_FILE
