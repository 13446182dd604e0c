"""Both entry points in this process: what ``train.py`` and ``eval.py`` do after reading the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig
from specdiff2.runtime.evaluation import evaluate
from specdiff2.runtime.training import train

ROOT = Path(__file__).resolve().parents[1]
Options = dict[str, list[str]]


def strict_json(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{path} holds {name}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def train_here(options: Options, run: Path, *overrides: str) -> Path:
    cfg = build.load_config(ROOT / "conf", "train", [*options["train"], *overrides], run)
    config = build.check(cfg, TrainConfig)
    train(config, build.begin(config))
    return run


def evaluate_here(options: Options, run: Path, *overrides: str) -> Path:
    cfg = build.load_config(ROOT / "conf", "eval", [*options["eval"], *overrides], run)
    config = build.check(cfg, EvalConfig)
    evaluate(config, build.begin(config))
    return run


def metric(run: Path, name: str) -> list[float]:
    """The values of one column of ``metrics.csv``, in order of steps."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]
