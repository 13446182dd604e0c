"""Merges the jobs of a sweep into one table (CSV, Parquet, JSON) and a page with a plot over every swept variable.

Evaluations and trainings alike. A job that failed, was killed or never started is listed with its reason; nothing is
taken from it. Where a sweeper searched for the fastest settings, the jobs are in order of what it maximised and the
best settings are in ``best.yaml``. Works on the files alone (``sweep_jobs``), so a sweep can be merged again any time.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdiff2.evaluation.json_files import read_json, write_json, write_text
from specdiff2.evaluation.report_sweep import sweep_page
from specdiff2.evaluation.sweep_axes import Axis, make_axis
from specdiff2.evaluation.sweep_jobs import (
    SweepJob,
    job_value,
    overlap_note,
    parse_value,
    read_jobs,
    read_plan,
    swept_keys,
)
from specdiff2.evaluation.sweep_table import is_training, merged_table, to_csv, write_parquet
from specdiff2.evaluation.sweep_training import shared_note
from specdiff2.evaluation.table import lossless_note
from specdiff2.types import ConfigError

Row = dict[str, Any]
BEST_FILE = "best.yaml"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The merged sweep; ``str()`` is the printed table with the paths of the files written.

    ``rows`` hold ``job``, the columns of ``swept``, and what the job measured; ``notes`` are sentences about them.
    """

    folder: Path
    swept: list[str]
    rows: list[Row]
    failed: list[SweepJob]
    files: list[Path]
    axes: list[Axis]
    notes: list[str]

    def __str__(self) -> str:
        lines = [merged_table(self.rows, self.axes), *self.notes]
        lines += [f"job {job.name} {job.why()}" for job in self.failed]
        return "\n".join([*lines, "", "sweep: " + ", ".join(str(path) for path in self.files)])


def merge_jobs(sweep_folder: Path | str) -> SweepResult:
    """Write ``sweep.csv``, ``sweep.parquet``, ``sweep.json`` and ``sweep.html`` into the sweep folder.

    Raises:
        ConfigError: the folder holds no jobs.
        CorruptFileError: a job's file cannot be read.
    """
    folder = Path(sweep_folder)
    jobs, search = read_jobs(folder), read_plan(folder).search
    if not jobs:
        raise ConfigError(
            f"sweep folder {folder} holds no jobs: expected subfolders with .hydra/overrides.yaml; "
            "start a sweep with `python eval.py -m sampler.K=1,4,8`"
        )
    values = {job.name: job_value(job) for job in jobs}
    if search:
        jobs.sort(key=lambda job: -(values[job.name] or 0.0))
    columns = _columns(jobs)
    rows = [
        {"job": job.name, **{name: parse_value(job.overrides.get(key)) for key, name in columns.items()}, **row}
        for job in jobs
        for row in job.rows
    ]
    axes = [make_axis(name, [row[name] for row in rows]) for name in columns.values()]
    failed = [job for job in jobs if job.status != "done"]
    notes = [shared_note(rows) if is_training(rows) else lossless_note(rows)]
    notes += [overlap_note(jobs), _write_best(folder, jobs[0], values[jobs[0].name]) if search else ""]
    notes = [note for note in notes if note]
    files = _write_files(folder, jobs, rows, axes)
    write_text(files[-1], sweep_page(axes, rows, failed, notes))
    return SweepResult(folder, list(columns.values()), rows, failed, files, axes, notes)


def _columns(jobs: Sequence[SweepJob]) -> dict[str, str]:
    """Swept override -> column. ``benchmark`` is both an override and a result: neither may hide the other."""
    taken = {"job", *(key for job in jobs for row in job.rows for key in row)}
    return {key: f"override.{key}" if key in taken else key for key in swept_keys(jobs)}


def _write_files(folder: Path, jobs: Sequence[SweepJob], rows: Sequence[Row], axes: Sequence[Axis]) -> list[Path]:
    """Everything but the page, whose path comes last."""
    files = [folder / name for name in ("sweep.csv", "sweep.parquet", "sweep.json", "sweep.html")]
    listed = [
        {"job": job.name, "status": job.status, "overrides": job.overrides, "error": job.error or None} for job in jobs
    ]
    write_text(files[0], to_csv(rows))
    partial = folder / "sweep.parquet.partial"
    write_parquet(partial, rows)
    os.replace(partial, files[1])
    write_json(files[2], {"swept": [axis.key for axis in axes], "jobs": listed, "rows": rows})
    return files


def _write_best(folder: Path, job: SweepJob, value: float | None) -> str:
    """``best.yaml`` of a search and one sentence about it; nothing where no job has a result."""
    if value is None:
        return ""
    what = "best streak" if is_training(job.rows) else "tokens_per_s"
    overrides = [f"{key}={text}" for key, text in job.overrides.items() if key != "run_id"]
    command = str((read_json(job.folder / "run.json", "a run's file; run the job again") or {}).get("command") or "")
    program = shlex.split(command)[:2] or ["python", "eval.py"]
    found = {"job": job.name, what: value, "overrides": overrides, "command": shlex.join([*program, *overrides])}
    write_text(folder / BEST_FILE, yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000))
    return f"best settings, {value:.4g} {what.replace('_per_', '/')}: {' '.join(overrides)} (in {folder / BEST_FILE})"
