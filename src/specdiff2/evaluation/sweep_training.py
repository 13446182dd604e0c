"""One row per training run of a sweep: the last held-out values, the best drafter and where it lies.

Reads ``metrics.csv``, ``run.json`` and the facts that an exported drafter's ``config.json`` tells of its training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.report_inputs import Curve, read_metrics
from specdiff2.types import CorruptFileError

BEST = "best_streak"
CURVES = ("val/streak_greedy", "val/streak")  # kept over the steps
_REMEDY = "a training run's file; train again"


def training_row(folder: Path) -> list[dict[str, Any]]:
    """The row in a list, or an empty list for a folder without ``metrics.csv``.

    Columns: ``step`` (the last one), the last value of every held-out or probe metric under its own name (``name@1``,
    ``name@2``, ... as one list ``name``) and ``train/loss``; of the best exported drafter ``best_streak``,
    ``best_metric``, ``best_step``, ``trained_with`` (its objective), ``drafter`` (its folder in the run) and
    ``published`` (where eval.py looks, or null); ``curves`` (metric -> [[step, value], ...]).

    Raises:
        CorruptFileError: a file cannot be read.
    """
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    curves = read_metrics(path)
    names = [name for name in curves if name.startswith(("val/", "probe/"))] + ["train/loss"]
    last = {name: curves[name][-1][1] for name in names if name in curves}
    row: dict[str, Any] = {"step": int(max((curve[-1][0] for curve in curves.values()), default=0))}
    row |= _best(folder) | {name: value for name, value in last.items() if "@" not in name}
    row |= _by_position(last)
    return [row | {"curves": {name: _pairs(curves[name]) for name in CURVES if name in curves}}]


def _best(folder: Path) -> dict[str, Any]:
    """Facts of the exported drafter: the best one, else the last."""
    found = [name for name in ("best", "last") if (folder / "drafter" / name / "config.json").is_file()]
    drafter = folder / "drafter" / found[0] if found else None
    record = read_json(drafter / "config.json", _REMEDY) if drafter else {}
    facts = record.get("training", {}) if isinstance(record, dict) else None
    if not isinstance(facts, dict):
        raise CorruptFileError(f"{drafter}/config.json holds no training facts: expected {_REMEDY}")
    metric = next((name for name in facts if name.startswith(("val/", "probe/"))), None)
    return {
        "trained_with": facts.get("objective"),
        BEST: facts.get(metric) if metric else None,
        "best_metric": metric,
        "best_step": facts.get("step") if metric else None,
        "drafter": str(drafter) if drafter else None,
        "published": _published(folder, drafter),
    }


def _published(folder: Path, drafter: Path | None) -> str | None:
    config = (read_json(folder / "run.json", _REMEDY) or {}).get("config", {})
    if drafter is None or not config.get("publish"):
        return None
    return str(Path(config["paths"]["drafters"]) / config["model_name"] / drafter.name)


def shared_note(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence where several runs published under one name: only the last of them is there."""
    folders = Counter(row["published"] for row in rows if row.get("published"))
    shared = [folder for folder, count in folders.items() if count > 1]
    where = ", ".join(shared)
    return f"several jobs published to {where}: the last one is there, each one's own is shown" if shared else ""


def _by_position(last: dict[str, float]) -> dict[str, list[float]]:
    """``name@1``, ``name@2``, ... as a list by position."""
    positions: dict[str, dict[int, float]] = {}
    for name, value in last.items():
        stem, at, position = name.partition("@")
        if at and position.isdigit():
            positions.setdefault(stem, {})[int(position)] = value
    return {stem: [values[position] for position in sorted(values)] for stem, values in positions.items()}


def _pairs(curve: Curve) -> list[list[float]]:
    return [[step, value] for step, value in curve]
