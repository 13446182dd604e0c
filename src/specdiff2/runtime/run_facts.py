"""Facts for a model card out of the files of training runs: run.json, metrics.csv, rollout stores, results.json.

Reads files only, loads no model. What goes onto a card names no folder of the machine it was made on.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollouts import RolloutStore, read_manifest
from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.table import markdown_table
from specdiff2.models.card_facts import CurvePoint, DataFacts, RunFacts
from specdiff2.objectives import ObjectiveSchedule
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.rollouts import SAMPLING_KEYS
from specdiff2.types import ConfigError, CorruptFileError

_ABSOLUTE = re.compile(r"(?<![\w./:-])/[^'\",=\[\]{}]+")
_ROW_KEYS = ("method", "benchmark", "temperature", "num_prompts", "tokens_per_s", "speedup", "speedup_ci",
             "mean_streak", "tau", "draft_ms", "verify_ms", "other_ms")  # fmt: skip


def read_run(folder: Path) -> dict[str, Any]:
    """``run.json`` of a training run.

    Raises:
        ConfigError: it is not there, or the run is none of ``train.py``.
        CorruptFileError: it is damaged.
    """
    record = read_json(folder / "run.json", "the run.json that train.py writes")
    if not isinstance(record, dict) or "objective" not in record.get("config", {}):
        raise ConfigError(f"run {folder}: expected a run folder of train.py with its run.json")
    return record


def run_facts(folder: Path) -> RunFacts:
    """What ``folder`` tells about one training run.

    Raises:
        ConfigError, CorruptFileError: a file is missing or damaged.
    """
    record = read_run(folder)
    config, rows = record["config"], read_metrics(folder)
    seconds, windows, curve = _follow(rows)
    last = max(int(float(row["step"])) + (_value(row, "train/loss") is not None) for row in rows)
    schedule: ObjectiveSchedule = instantiate(config["objective"])
    return RunFacts(
        name=run_name(folder),
        command=portable_command(record["command"]),
        stages=tuple(_stages(schedule, last)),
        num_steps=last,
        num_windows=round(windows),
        hours=seconds / 3600,
        machine=record["machine"],
        verifier_dtype=record["dtype"],
        precision=str(config["trainer"]["precision"]),
        torch=str(record["versions"]["torch"]),
        commit=str(record["commit"])[:12] + (" with changes" if record.get("dirty") else ""),
        is_online=bool(config["data"]["online"]),
        curve=tuple(curve),
    )


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """Rows of ``metrics.csv`` by step; what a resumed run has trained again counts once.

    Raises:
        ConfigError: there is none, or it has no row.
    """
    path = folder / "metrics.csv"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: expected the curves of a training run (logger=csv)")
    kept: dict[tuple[int, bool], dict[str, str]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("step"):
                kept[int(float(row["step"])), _value(row, "train/loss") is not None] = row
    if not kept:
        raise ConfigError(f"{path} has no row: expected the curves of a training run")
    # a training row of step t is of the update that makes t+1 of them, an evaluation at t comes after t updates
    return [kept[key] for key in sorted(kept, key=lambda key: (key[0] + key[1], not key[1]))]


def _follow(rows: Iterable[Mapping[str, str]]) -> tuple[float, float, list[CurvePoint]]:
    """(seconds, windows, evaluations) of a run; a row stands for the steps since the training row before it."""
    seconds = windows = 0.0
    before, losses, curve = 0, [], []
    for row in rows:
        step, loss = int(float(row["step"])), _value(row, "train/loss")
        num_windows, per_second = _value(row, "train/num_windows"), _value(row, "train/windows_per_s")
        if loss is not None:
            losses.append(loss)
        if num_windows and per_second:
            windows += num_windows * (step + 1 - before)
            seconds += num_windows * (step + 1 - before) / per_second
            before = step + 1
        if _value(row, "val/streak") is not None or _value(row, "val/streak_greedy") is not None:
            mean = sum(losses) / len(losses) if losses else None
            streaks = _value(row, "val/streak"), _value(row, "val/streak_greedy")
            curve.append(CurvePoint(step, seconds / 3600, mean, *streaks))
            losses = []
    return seconds, windows, curve


def _stages(schedule: ObjectiveSchedule, num_steps: int) -> Iterable[str]:
    """Each stage that was reached, with the steps it really had."""
    start = 0
    for stage in schedule.describe():
        steps = num_steps - start if stage["steps"] is None else min(int(stage["steps"]), num_steps - start)
        if steps > 0:
            yield f"{stage['objective']} for {steps:,} steps"
        start += steps


def _value(row: Mapping[str, str], name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


# ---------------------------------------------------------------- rollouts
def find_rollouts(config: Mapping[str, Any], fingerprint: str) -> Path:
    """The store of training rollouts that a run with this configuration reads.

    Raises:
        ConfigError: there is none on this machine, or there are several.
    """
    data = config["data"]
    if data["folder"] is not None:
        found = [Path(data["folder"]) / "train"]
    else:
        root = Path(config["paths"]["rollouts"]) / data["name"]
        found = [path.parent for path in sorted(root.glob("train-*/manifest.json"))]
    wanted = {key: data["rollouts"][key] for key in SAMPLING_KEYS if key in data["rollouts"]} | {
        "verifier": fingerprint
    }
    fitting = [p for p in found if p.is_dir() and wanted.items() <= read_manifest(p).items()]
    if len(fitting) != 1:
        raise ConfigError(
            f"rollouts of data {data['name']!r}: {len(fitting)} stores fit ({', '.join(map(str, fitting)) or 'none'}), "
            "expected one; name the right one with --rollouts FOLDER"
        )
    return fitting[0]


def data_facts(folders: Sequence[Path]) -> list[DataFacts]:
    """Rollouts of every prompt source in these stores, largest source first.

    Raises:
        ConfigError, CorruptFileError: a store is missing or damaged.
    """
    counts: dict[str, list[int]] = {}
    temperatures: dict[str, set[float]] = {}
    for folder in folders:
        for rollout in open_index(RolloutStore.open(folder).folder):
            # gsm8k_train/00049/T0/0 -> gsm8k_train; numbered ids are one source: seed_task_12/T0/0 -> seed_task
            source = re.sub(r"[_-]\d+$", "", rollout.rollout_id.split("/")[0])
            count = counts.setdefault(source, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(rollout.completion_ids)
            temperatures.setdefault(source, set()).add(rollout.temperature)
    facts = [DataFacts(name, *count, tuple(sorted(temperatures[name]))) for name, count in sorted(counts.items())]
    return sorted(facts, key=lambda part: -part.num_rollouts)


# ---------------------------------------------------------------- results
def read_results(path: Path) -> tuple[str, str]:
    """(Markdown tables of the rows, how they were measured) of an experiment's ``results.json``.

    Raises:
        ConfigError: the file is missing.
        CorruptFileError: it is not of the schema that eval.py and experiments write.
    """
    if not path.is_file():
        raise ConfigError(f"results {path}: no such file; expected the results.json of an experiment")
    record = read_json(path, "a results.json of an experiment")
    rows = record.get("rows") if isinstance(record, dict) else None
    if not rows or any(key not in row for row in rows for key in _ROW_KEYS):
        raise CorruptFileError(f"{path}: expected rows with {', '.join(_ROW_KEYS)}, as eval.py writes them")
    how = (f"`{portable_command(str(record.get('command')))}`, {record.get('machine')}, {record.get('dtype')}, "
           f"{record.get('threads')} threads, {record.get('runtime')}, commit {str(record.get('commit'))[:12]}; all "
           "methods interleaved on the same prompts.")  # fmt: skip
    return markdown_table(rows), how


# ---------------------------------------------------------------- names without folders
def portable_command(command: str) -> str:
    """A command without ``resume=...`` (it is the same command again) and without folders of this machine."""
    words = [portable(word) for word in shlex.split(command) if not word.startswith("resume=")]
    return shlex.join(words)


def portable(text: str) -> str:
    """``text`` with absolute paths relative to the working folder or, outside of it, as bare names."""
    here = Path.cwd()

    def shorten(match: re.Match[str]) -> str:
        path = Path(match.group())
        return str(path.relative_to(here)) if path.is_relative_to(here) else path.name

    return _ABSOLUTE.sub(shorten, text)


def run_name(folder: str | Path) -> str:
    """A run folder below the last ``outputs`` in its path; its own name where there is none."""
    parts = Path(folder).parts
    if "outputs" in parts[:-1]:
        return "/".join(parts[len(parts) - parts[::-1].index("outputs") :])
    return parts[-1]
