"""The jobs of a sweep as files tell them: settings, state, and the rows of what a finished one has measured.

Reads ``sweep_jobs.json`` (what was to run), and of every job folder ``.hydra/overrides.yaml``, ``status.json``,
``traceback.txt``, ``summary.json`` (an evaluation) or ``metrics.csv`` (a training). A job that failed, was killed or
never started gives no rows. Launches nothing and knows no launcher.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.sweep_training import BEST, training_row
from specdiff2.types import CorruptFileError

log = logging.getLogger(__name__)
Row = dict[str, Any]
JOB_FACTS = ("scheduler", "job_id", "log")  # in status.json where a scheduler runs the job
JOBS_FILE = "sweep_jobs.json"  # {"search": whether a sweeper chose the settings, "jobs": overrides by number}
_STATES = {
    "running": "did not finish (it was killed, crashed, or still runs or waits)",
    "not started": "was not started",
    "damaged": "left a damaged status.json",
}


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job. ``status`` is ``done``, ``failed``, ``running`` (killed or not finished) or ``not started``."""

    name: str
    folder: Path
    overrides: dict[str, str]
    status: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    traceback: str = ""
    host: str = ""
    where: str = ""  # "slurm job 12_3, log .submitit/12_3/12_3_0_log.err"
    span: tuple[datetime, datetime] | None = None  # of a finished job, where its status tells it

    def why(self) -> str:
        """What to say of a job without a result."""
        failed = f"failed: {self.error or 'no error recorded'}"
        what = failed if self.status == "failed" else _STATES.get(self.status, self.status)
        return f"{what} ({self.where})" if self.where else what


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What was to run: overrides by job number (empty where a sweeper chooses as it goes)."""

    search: bool
    jobs: dict[str, list[str]]


def read_plan(folder: Path) -> SweepPlan:
    """What the launching process wrote down; nothing for sweeps of other origin."""
    plan = _read_object(folder / JOBS_FILE) or {}
    return SweepPlan(bool(plan.get("search")), dict(plan.get("jobs") or {}))


def read_jobs(folder: Path) -> list[SweepJob]:
    """Job folders and planned jobs by number, then name."""
    found = {path.parent.parent.name for path in folder.glob("*/.hydra/overrides.yaml")}
    found |= {path.parent.name for path in folder.glob("*/status.json")}
    planned = read_plan(folder).jobs
    names = sorted(
        found | set(planned), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
    )
    return [
        read_job(folder / name)
        if name in found
        else SweepJob(name, folder / name, _split(planned[name]), "not started")
        for name in names
    ]


def read_job(folder: Path) -> SweepJob:
    """One job folder. Raises CorruptFileError."""
    path = folder / "status.json"
    status = read_status(path) if path.exists() else {}
    summary = _read_object(folder / "summary.json")
    # without a status file (another launcher) a summary is the sign of a finished job
    state = str(status.get("status") or ("done" if summary is not None else "failed"))
    log = folder / "traceback.txt"
    rows: list[Row] = []
    # a failed job may hold the results of an earlier try: its rows would be mistaken for this one's
    if state == "done":
        rows = list(summary["rows"]) if summary is not None else training_row(folder)
    times = [status.get("started_at"), status.get("ended_at")]
    return SweepJob(
        name=folder.name,
        folder=folder,
        overrides=_read_overrides(folder, status),
        status=state,
        rows=rows,
        error=str(status.get("error") or ""),
        traceback=log.read_text(encoding="utf-8") if log.exists() else str(status.get("traceback") or ""),
        host=str(status.get("host") or ""),
        where=_where(status),
        span=(datetime.fromisoformat(times[0]), datetime.fromisoformat(times[1])) if all(times) else None,
    )


def _where(status: dict[str, Any]) -> str:
    """The job of a scheduler that a run belongs to, in words; empty outside one."""
    scheduler, job_id, log_file = (str(status.get(key) or "") for key in JOB_FACTS)
    return f"{scheduler} job {job_id}" + (f", log {log_file}" if log_file else "") if job_id else ""


def read_status(path: Path) -> dict[str, Any]:
    """What a job wrote; a missing or damaged file is a job that is not done."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"status": "not started"}
    except ValueError:
        status = None
    if isinstance(status, dict) and isinstance(status.get("status"), str):
        return status
    log.warning("%s: damaged, so the job counts as not done", path)
    return {"status": "damaged"}


def _read_overrides(folder: Path, status: dict[str, Any]) -> dict[str, str]:
    path = folder / ".hydra" / "overrides.yaml"
    entries = status.get("overrides") or []
    if path.exists():
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    if not isinstance(entries, list):
        raise CorruptFileError(f"{path} holds {type(entries).__name__}: expected a list of overrides")
    return _split(entries)


def _split(entries: Sequence[Any]) -> dict[str, str]:
    pairs = (str(entry).partition("=") for entry in entries)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def swept_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """Overridden keys whose value is not the same in all jobs, in order of appearance."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    return [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]


def parse_value(text: str | None) -> Any:
    """A finite number, a flag or a list of them where the override is one; else the text (``null`` too)."""
    if text is None:
        return None
    for kind in (int, float):
        try:
            if math.isfinite(kind(text)):
                return kind(text)
        except (ValueError, OverflowError):
            continue
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith("[") and text.endswith("]") and not set("[]{}") & set(text[1:-1]):
        return [parse_value(part.strip()) for part in text[1:-1].split(",")] if text[1:-1].strip() else []
    return text


def job_value(job: SweepJob) -> float | None:
    """What a search makes as large as it can: pooled tokens per second of the fastest method, or the best streak.

    Tokens of all benchmarks over their decoding seconds; the verifier alone does not count. Of a training, the
    highest monitored streak. None where nothing was measured.
    """
    if any(BEST in row for row in job.rows):
        return max((row[BEST] for row in job.rows if row[BEST] is not None), default=None)
    totals: dict[str, tuple[float, float]] = {}
    for row in job.rows:
        if row["method"] != BASELINE:
            tokens, seconds = totals.get(row["method"], (0.0, 0.0))
            totals[row["method"]] = (tokens + row["num_tokens"], seconds + row["decode_s"])
    return max((tokens / seconds for tokens, seconds in totals.values() if seconds > 0), default=None)


def overlap_note(jobs: Sequence[SweepJob]) -> str:
    """One sentence where evaluations ran at the same time on one machine: their speeds are not comparable."""
    spans: dict[str, list[tuple[datetime, datetime]]] = {}
    for job in jobs:
        if job.span is not None and any("tokens_per_s" in row for row in job.rows):
            spans.setdefault(job.host, []).append(job.span)
    together = any(later[0] < earlier[1] for one in spans.values() for earlier, later in pairwise(sorted(one)))
    return (
        "jobs ran at the same time on one machine and slowed each other down: streaks are right, tokens/s and "
        "speed-ups are not comparable; use hydra/launcher=basic (the default) to measure speed"
        if together
        else ""
    )


def _read_object(path: Path) -> dict[str, Any] | None:
    value = read_json(path, "a job's file; run the job again")
    return value if isinstance(value, dict) else None
