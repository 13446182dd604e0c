"""What a report is made from: the files of evaluation and training runs, read and checked.

Reads ``summary.json``, ``records.jsonl`` (samples only), ``divergences.json``, ``run.json`` and
``metrics.csv``; knows nothing of HTML.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.records import DIVERGENCES_FILE, RECORDS_FILE, Record, read_records
from specdiff2.types import ConfigError, CorruptFileError

Curve = list[tuple[float, float]]  # (step, value), ascending
_OBJECTIVES = {
    "CrossEntropy": "cross-entropy",
    "Mdm": "masked diffusion",
    "Streak": "streak-distillation",
    "StreakCE": "survival-weighted cross-entropy",
    "DPace": "D-PACE",
    "StreakExpected": "expected streak",
}


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """One folder with a summary."""

    folder: Path
    summary: dict[str, Any]
    provenance: dict[str, Any]
    divergences: dict[str, Any] | None
    samples: list[Record]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Curves of one training run; ``stages`` are (name, first step) in order."""

    folder: Path
    curves: dict[str, Curve]
    stages: list[tuple[str, int]]
    provenance: dict[str, Any] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> tuple[list[EvaluationRun], list[TrainingRun]]:
    """Sort folders by what they hold; one folder may be both.

    Raises:
        ConfigError: a folder is missing or holds neither a summary nor training metrics.
        CorruptFileError: a file in it is not what it claims to be.
    """
    evaluations, trainings = [], []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"run folder {folder} does not exist: expected the folder of a finished run")
        provenance = _read_object(folder / "run.json") or {}
        summary = _read_object(folder / "summary.json")
        metrics = find_metrics(folder)
        if summary is not None:
            divergences = _read_object(folder / DIVERGENCES_FILE)
            evaluations.append(EvaluationRun(folder, summary, provenance, divergences, _samples(folder)))
        if metrics is not None:
            curves = read_metrics(metrics)
            stages = find_stages(provenance.get("config"), curves.get("train/stage"))
            trainings.append(TrainingRun(folder, curves, stages, provenance))
        if summary is None and metrics is None:
            raise ConfigError(
                f"run folder {folder} has neither summary.json nor metrics.csv: expected an evaluation or a "
                "training run; run eval.py or train.py first"
            )
    return evaluations, trainings


def find_metrics(folder: Path) -> Path | None:
    """``metrics.csv`` of a training run: in the folder itself, or where a CSV logger nests it (the newest one)."""
    if (folder / "metrics.csv").is_file():
        return folder / "metrics.csv"
    nested = sorted(folder.glob("**/metrics.csv"), key=lambda path: (path.stat().st_mtime, str(path)))
    return nested[-1] if nested else None


def read_metrics(path: Path) -> dict[str, Curve]:
    """Column -> curve over ``step``; empty and non-finite cells are left out.

    Raises:
        CorruptFileError: there is no ``step`` column.
    """
    curves: dict[str, dict[float, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if "step" not in (reader.fieldnames or ()):
            raise CorruptFileError(f"{path} has no column 'step': expected training metrics by step")
        for row in reader:
            step = _number(row.pop("step", None))
            for name, cell in row.items():
                value = _number(cell) if isinstance(name, str) else None
                if step is not None and value is not None:
                    curves.setdefault(name, {})[step] = value  # a resumed run repeats steps: the last one counts
    return {name: sorted(points.items()) for name, points in curves.items()}


def find_stages(config: Any, stage_numbers: Curve | None = None) -> list[tuple[str, int]]:
    """(name, first step) of the objectives of a resolved training configuration.

    Understands ``runtime.factories.make_schedule`` (``main``, ``warmup``) and lists ``stages`` of entries with
    ``steps``; otherwise takes the changes of the logged stage number.
    """
    for node in _dictionaries(config):
        if "main" in node and "max_steps" in node:
            return _warmup_and_main(node)
        stages = node.get("stages")
        if isinstance(stages, list) and stages and all(isinstance(one, dict) for one in stages):
            starts = [0]
            for stage in stages[:-1]:
                starts.append(starts[-1] + int(stage.get("steps") or 0))
            names = [str(one.get("name") or objective_name(one.get("objective"))) for one in stages]
            return list(zip(names, starts, strict=True))
    found: list[tuple[str, int]] = []
    previous: float | None = None
    for step, number in stage_numbers or []:
        if number != previous:
            found.append((f"stage {number:g}", int(step)))
        previous = number
    return found


def _warmup_and_main(node: dict[str, Any]) -> list[tuple[str, int]]:
    steps = node.get("warmup_steps")
    if steps is None:
        steps = round(float(node.get("warmup_share") or 0.0) * int(node["max_steps"]))
    if not node.get("warmup") or not steps:
        return [(objective_name(node["main"]), 0)]
    return [(objective_name(node["warmup"]), 0), (objective_name(node["main"]), int(steps))]


def objective_name(node: Any) -> str:
    """A readable name of a configured objective: its ``name``, else its class in words."""
    if not isinstance(node, dict):
        return str(node or "objective")
    kind = str(node.get("name") or node.get("_target_") or "objective").rsplit(".", 1)[-1]
    return _OBJECTIVES.get(kind, kind)


def _dictionaries(node: Any) -> Iterator[dict[str, Any]]:
    """Every dictionary of a nested configuration, outer ones first."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _dictionaries(child)


def _samples(folder: Path) -> list[Record]:
    path = folder / RECORDS_FILE
    return [record for record in read_records(path) if record.pieces and not record.warmup] if path.exists() else []


def _read_object(path: Path) -> dict[str, Any] | None:
    value = read_json(path, "a run's file; write it again")
    if value is not None and not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds {type(value).__name__}: expected an object")
    return value


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell) if cell else math.nan
    except ValueError:  # a text column
        return None
    return value if math.isfinite(value) else None
