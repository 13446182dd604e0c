"""Loggers that never end a run: local files first, Weights & Biases only as far as it can be reached."""

from __future__ import annotations

import csv
import json
import os
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from specdiff2.training.wandb_artifacts import log_training_artifacts
from specdiff2.training.wandb_runs import run_config, start_run


def csv_logger(folder: str, flush_every_n_steps: int = 20) -> CSVLogger:
    """``folder/metrics.csv``; needs no network. Rows that a resumed run left there are kept, whenever it is killed."""
    path = Path(folder) / "metrics.csv"
    aside = path.with_name(".metrics.csv.earlier")  # Lightning deletes what it finds; a kill meanwhile leaves this
    if path.is_file():
        os.replace(path, aside)
    logger = CSVLogger(save_dir=folder, name="", version="", flush_logs_every_n_steps=flush_every_n_steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Experiment logs directory")  # the run folder is meant
        writer = logger.experiment
    writer._rewrite_with_new_header = partial(_add_columns, path, aside)  # type: ignore[method-assign]
    if aside.is_file():
        os.replace(aside, path)
        with path.open(encoding="utf-8", newline="") as file:
            writer.metrics_keys = next(csv.reader(file), [])
    return logger


def _add_columns(path: Path, partial_file: Path, names: list[str]) -> None:
    """Lightning's truncates the file first."""
    with path.open(encoding="utf-8", newline="") as old, partial_file.open("w", encoding="utf-8", newline="") as new:
        writer = csv.DictWriter(new, names)
        writer.writeheader()
        writer.writerows(csv.DictReader(old))
    os.replace(partial_file, path)


def wandb_logger(
    folder: str,
    project: str,
    name: str | None = None,
    entity: str | None = None,
    mode: str = "online",
    init_timeout_s: float = 20.0,
) -> WandbLogger:
    """A W&B run; without a key or a reachable host it is recorded offline instead, with a warning (``start_run``).

    All metrics are series over ``trainer/global_step``: ``val/accept_rate@1``, ``val/accept_rate@2``, ...
    """
    run = start_run(folder, project, mode, init_timeout_s=init_timeout_s, name=name, entity=entity)
    return WandbLogger(experiment=run, save_dir=folder, log_model=False)


def describe(loggers: Iterable[Any], folder: Path) -> None:
    """Tell the W&B runs among them what ``run.json`` says: the resolved configuration, and where it comes from."""
    for logger in wandb_loggers(loggers):
        logger.experiment.config.update(run_config(json.loads((folder / "run.json").read_text(encoding="utf-8"))))


def close(loggers: Iterable[Any], folder: Path | None = None) -> None:
    """End the W&B runs among them, so that the next job of a sweep starts its own.

    Args:
        folder: run folder of a finished training, whose rollouts and drafters become artifacts first.

    Raises:
        CorruptFileError, MismatchError: a file of the run folder is damaged.
    """
    for logger in wandb_loggers(loggers):
        if folder is not None:
            log_training_artifacts(logger.experiment, folder)
        logger.experiment.finish()


def wandb_loggers(loggers: Iterable[Any]) -> list[WandbLogger]:
    """Those with a run that records: none on ranks other than the first, none where the user has disabled W&B."""
    found = [one for one in loggers if isinstance(one, WandbLogger) and isinstance(one.experiment, wandb.Run)]
    return [one for one in found if not one.experiment.disabled]
