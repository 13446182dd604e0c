"""Merges the jobs of a sweep: one table, CSV, JSON and a page with a curve over every swept variable.

Reads ``summary.json``, ``.hydra/overrides.yaml`` and ``status.json`` / ``traceback.txt`` of every job folder.
A job that failed or never finished is listed with its error; nothing is taken from it.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.evaluation.report_sweep import sweep_page
from specdiff2.evaluation.table import MEASURED, lossless_note, measured_cells, method_label
from specdiff2.types import ConfigError, CorruptFileError

Row = dict[str, Any]
_LISTS = ("accept_rate", "survival", "num_reached")  # in the JSON, too long for a CSV cell
_NESTED = ("accuracy", "lossless_check")  # objects, or null: their parts become columns


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job folder. ``status`` is ``done``, ``failed`` or ``running`` (killed or not finished)."""

    name: str
    folder: Path
    overrides: dict[str, str]
    status: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The merged sweep; ``str()`` is the printed table with the paths of the files written."""

    folder: Path
    swept: list[str]
    rows: list[Row]
    failed: list[SweepJob]
    files: list[Path]

    def __str__(self) -> str:
        note = lossless_note(self.rows)
        lines = [merged_table(self.rows, self.swept), *([note] if note else [])]
        lines += [f"job {job.name} {job.status}: {job.error or 'no error recorded'}" for job in self.failed]
        return "\n".join([*lines, "", "sweep: " + ", ".join(str(path) for path in self.files)])


def merge_jobs(sweep_folder: Path | str) -> SweepResult:
    """Write ``sweep.csv``, ``sweep.json`` and ``sweep.html`` into the sweep folder.

    Raises:
        ConfigError: the folder holds no jobs.
        CorruptFileError: a job's file cannot be read.
    """
    folder = Path(sweep_folder)
    jobs = read_jobs(folder)
    if not jobs:
        raise ConfigError(
            f"sweep folder {folder} holds no jobs: expected subfolders with .hydra/overrides.yaml; "
            "start a sweep with `python eval.py -m sampler.K=1,4,8`"
        )
    taken = {"job", *(key for job in jobs for row in job.rows for key in row)}
    # `benchmark` is both an override and a result: neither may hide the other
    columns = {key: f"override.{key}" if key in taken else key for key in swept_keys(jobs)}
    swept = list(columns.values())
    rows = [
        {"job": job.name, **{name: parse_value(job.overrides.get(key)) for key, name in columns.items()}, **row}
        for job in jobs
        for row in job.rows
    ]
    failed = [job for job in jobs if job.status != "done"]
    paths = [folder / name for name in ("sweep.csv", "sweep.json", "sweep.html")]
    listed = [
        {"job": job.name, "status": job.status, "overrides": job.overrides, "error": job.error or None} for job in jobs
    ]
    _write(paths[0], to_csv(rows))
    write_json(paths[1], {"swept": swept, "jobs": listed, "rows": rows})
    _write(paths[2], sweep_page(swept, rows, [(job.name, job.overrides, job.error, job.traceback) for job in failed]))
    return SweepResult(folder, swept, rows, failed, paths)


def read_jobs(folder: Path) -> list[SweepJob]:
    """Job folders by number, then name."""
    found = {path.parent.parent for path in folder.glob("*/.hydra/overrides.yaml")}
    found |= {path.parent for path in folder.glob("*/status.json")}
    ordered = sorted(
        found, key=lambda path: (not path.name.isdigit(), int(path.name) if path.name.isdigit() else 0, path.name)
    )
    return [_read_job(path) for path in ordered]


def _read_job(folder: Path) -> SweepJob:
    status = _read_object(folder / "status.json") or {}
    summary = _read_object(folder / "summary.json")
    # without a status file (another launcher) a summary is the sign of a finished job
    state = str(status.get("status") or ("done" if summary is not None else "failed"))
    log = folder / "traceback.txt"
    return SweepJob(
        name=folder.name,
        folder=folder,
        overrides=_read_overrides(folder, status),
        status=state,
        # a failed job may hold the summary of an earlier try: its rows would be mistaken for this one's
        rows=list(summary["rows"]) if summary is not None and state == "done" else [],
        error=str(status.get("error") or ""),
        traceback=log.read_text(encoding="utf-8") if log.exists() else str(status.get("traceback") or ""),
    )


def _read_overrides(folder: Path, status: dict[str, Any]) -> dict[str, str]:
    path = folder / ".hydra" / "overrides.yaml"
    entries = status.get("overrides") or []
    if path.exists():
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    if not isinstance(entries, list):
        raise CorruptFileError(f"{path} holds {type(entries).__name__}: expected a list of overrides")
    pairs = (str(entry).partition("=") for entry in entries)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def swept_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """Overridden keys whose value is not the same in all jobs, in order of appearance."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]


def parse_value(text: str | None) -> str | int | float | None:
    """A number where the override is one."""
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row; intervals as two columns, curves left to the JSON."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {}
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


def merged_table(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Aligned plain text: swept values, method, numbers."""
    if not rows:
        return "no finished job"
    many = len({row["benchmark"] for row in rows}) > 1
    head = [*swept, *(["benchmark"] if many else []), "method", *MEASURED]
    cells = [head] + [_cells(row, swept, many) for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    num_text = len(head) - len(MEASURED)
    lines = [
        "  ".join(c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cells(row: Row, swept: Sequence[str], many: bool) -> list[str]:
    return [
        *(str(row[key]) if row[key] is not None else "" for key in swept),
        *([row["benchmark"]] if many else []),
        method_label(row["method"]),
        *measured_cells(row),
    ]


def _read_object(path: Path) -> dict[str, Any] | None:
    value = read_json(path, "a job's file; run the job again")
    return value if isinstance(value, dict) else None


def _write(path: Path, content: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
