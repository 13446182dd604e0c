"""What a finished run or sweep shows in W&B: native line charts, tables and summary numbers, from its files alone.

A chart is a list of history rows over a step metric of its own (``position``, ``swept/sampler.K``,
``trainer/global_step``), so that W&B draws it as an ordinary line chart and lays runs over each other. Knows nothing of
W&B: ``wandb_report`` uploads it, ``wandb_panels`` makes report panels of the same charts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.records import RECORDS_FILE, Record, read_records
from specdiff2.evaluation.report_inputs import Curve, TrainingRun, read_runs
from specdiff2.evaluation.sweep_axes import Axis, make_axis
from specdiff2.runtime.grid_page import grid_rows, lines
from specdiff2.types import ConfigError

Row = dict[str, Any]
STEP = "trainer/global_step"  # as Lightning's own W&B logger calls it
_MEASURED = ("speedup", "speedup_paper", "tokens_per_s", "mean_streak", "tau", "draft_ms", "verify_ms", "other_ms")
_OVER = ("speedup", "tokens_per_s", "mean_streak", "tau")  # drawn over swept settings
_RECORD = ("benchmark", "prompt_id", "method", "temperature", "seed", "stop_reason", "prefill_s", "decode_s", "prompt",
           "text", "answer")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """Line series over the step metric ``x``; every point holds ``x`` and the series that have a value there."""

    title: str
    x: str
    points: list[dict[str, float]]

    def series(self) -> list[str]:
        """Names of the lines, in order of appearance."""
        return list(dict.fromkeys(name for point in self.points for name in point if name != self.x))


@dataclass(frozen=True, slots=True)
class Content:
    """One W&B run to be: ``kind`` is ``eval``, ``train`` or ``sweep``; ``rows`` are what the printed table shows."""

    kind: str
    folder: Path
    provenance: dict[str, Any]
    charts: list[Chart]
    rows: list[Row] = field(default_factory=list)
    axes: list[Axis] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Numbers of every row: ``speedup/gsm_symbolic_T0/specdiff2``, and both ends of its interval."""
        if self.kind != "eval":
            return {}
        found = {series_name(key, row): row.get(key) for row in self.rows for key in _MEASURED}
        for row in self.rows:
            for key in ("speedup", "mean_streak"):
                low, high = row.get(f"{key}_ci") or (None, None)
                found |= {series_name(f"{key}_low", row): low, series_name(f"{key}_high", row): high}
        return {name: value for name, value in found.items() if value is not None}

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """(columns, lines) by name; names that no W&B plot uses for its own table (``<chart>_table``)."""
        found = {"summary_rows": _as_table(self.rows)} if self.rows else {}
        if self.records:
            listed = [_record_line(record) for record in self.records if not record.warmup]
            found["records"] = ([*_RECORD, "num_tokens", "num_rounds", "mean_streak"], listed)
        return found


def read_content(folder: Path) -> list[Content]:
    """The runs that a folder is: an evaluation, a training, or a sweep with its finished jobs.

    Raises:
        ConfigError: it holds none of them, or a sweep that was not merged.
        CorruptFileError: a file of it is damaged.
    """
    sweep = read_json(folder / "sweep.json", "a merged sweep; run the sweep's command again")
    if sweep is not None:
        jobs = [folder / one["job"] for one in sweep["jobs"] if one["status"] == "done"]
        contents = [content for job in jobs for content in read_content(job)]
        provenance = contents[0].provenance if contents else {}
        axes = [make_axis(key, [row[key] for row in sweep["rows"]]) for key in sweep["swept"]]
        charts = swept_charts(axes, sweep["rows"])
        return [*contents, Content("sweep", folder, provenance, charts, sweep["rows"], axes)]
    if (folder / "multirun.yaml").is_file():
        raise ConfigError(f"{folder} is a sweep without sweep.json: it has not ended; run its command again")
    evaluations, trainings = read_runs([folder])
    found = [Content("train", run.folder, run.provenance, training_charts(run)) for run in trainings]
    for run in evaluations:
        rows, axes = grid_rows(run.summary["rows"], run.provenance.get("config", {}))
        charts = [*position_charts(rows), *swept_charts(axes, lines(rows))]
        path = folder / RECORDS_FILE
        records = read_records(path) if path.is_file() else []
        found.append(Content("eval", run.folder, run.provenance, charts, rows, axes, records))
    return found


def position_charts(rows: Sequence[Row]) -> list[Chart]:
    """accept_rate@j and survival@j over the position j of the draft window; positions never reached are left out."""
    charts = []
    for key in ("accept_rate", "survival"):
        curves = {series_name(key, row): row[key] for row in rows if row.get(key)}
        points = []
        for index in range(max(map(len, curves.values()), default=0)):
            here = {name: curve[index] for name, curve in curves.items() if index < len(curve)}
            here = {name: value for name, value in here.items() if value is not None}
            points += [{"position": float(index + 1), **here}] if here else []
        charts += [Chart(f"{key}@j", "position", points)] if points else []
    return charts


def swept_charts(axes: Sequence[Axis], rows: Sequence[Row]) -> list[Chart]:
    """Every measured quantity over every numeric setting, a line per method and value of the other settings."""
    trained = [key for key in rows[0] if key.startswith(("val/", "probe/", "best"))] if rows else []
    charts = []
    for axis in axes:
        if axis.numbers is None:
            continue
        others = [one for one in axes if one is not axis]
        for quantity in (*_OVER, *trained):
            points: dict[float, dict[str, float]] = {}
            for row in rows:
                if row[axis.key] is not None and isinstance(row.get(quantity), (int, float)):
                    name = f"over_{_clean(axis.title)}/{_clean(quantity)}/{_line(row, axis, others)}"
                    points.setdefault(axis.number(row[axis.key]), {})[name] = row[quantity]
            if points:
                x = f"swept/{_clean(axis.title)}"
                listed = [{x: value, **points[value]} for value in sorted(points)]
                charts.append(Chart(f"{quantity} over {axis.title}", x, listed))
    return charts


def _line(row: Row, axis: Axis, others: Sequence[Axis]) -> str:
    """Benchmark, method (for a training: nothing) and the settings that are not on the axis."""
    parts = [_place(row, with_temperature=axis.key != "verifier.temperature")] if "method" in row else []
    return _clean("/".join(parts + [f"{one.title}-{one.label(row[one.key])}" for one in others]) or "run")


def training_charts(run: TrainingRun) -> list[Chart]:
    """Every logged metric over the optimizer step; the positions of one curve share a chart."""
    groups: dict[str, dict[str, Curve]] = {}
    for name, curve in run.curves.items():
        groups.setdefault(re.sub(r"@\d+$", "@j", name), {})[name] = curve
    charts = []
    for title, curves in groups.items():
        points: dict[float, dict[str, float]] = {}
        for name, curve in curves.items():
            for step, value in curve:
                points.setdefault(step, {STEP: step})[name] = value
        charts.append(Chart(title, STEP, [points[step] for step in sorted(points)]))
    return charts


def series_name(quantity: str, row: Row) -> str:
    """``speedup/gsm_symbolic_T0/specdiff2``: the same method has the same name in every run."""
    return f"{quantity}/{_place(row)}"


def _place(row: Row, with_temperature: bool = True) -> str:
    where = f"{row['benchmark']}_T{row['temperature']:g}" if with_temperature else row["benchmark"]
    return _clean(f"{where}/{row['method']}")


def _clean(name: str) -> str:
    """A dot would mean a nested key, other signs are not safe in W&B's expressions."""
    return re.sub(r"[^A-Za-z0-9_@/-]+", "_", name)


def _as_table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Rows with columns of their own; lists and objects as JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_cell(row.get(key)) for key in columns] for row in rows]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _record_line(record: Record) -> list[Any]:
    streak = sum(one.num_accepted for one in record.rounds) / len(record.rounds) if record.rounds else None
    return [*(getattr(record, key) for key in _RECORD), len(record.tokens), len(record.rounds), streak]
