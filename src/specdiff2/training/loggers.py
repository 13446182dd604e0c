"""Loggers that never end a run: local files first, Weights & Biases only as far as it can be reached."""

from __future__ import annotations

import csv
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger

log = logging.getLogger(__name__)


def csv_logger(folder: str, flush_every_n_steps: int = 20) -> CSVLogger:
    """``folder/metrics.csv``; needs no network. Rows that a resumed run left there are kept."""
    path = Path(folder) / "metrics.csv"
    earlier = path.read_bytes() if path.is_file() else b""
    logger = CSVLogger(save_dir=folder, name="", version="", flush_logs_every_n_steps=flush_every_n_steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Experiment logs directory")  # the run folder is meant
        writer = logger.experiment  # deletes metrics.csv
    if earlier:
        path.write_bytes(earlier)
        writer.metrics_keys = next(csv.reader(earlier.decode("utf-8").split("\n")[:1]))
    return logger


def wandb_logger(
    folder: str, project: str, name: str | None = None, mode: str = "online", init_timeout_s: float = 20.0
) -> WandbLogger:
    """A W&B run; without a key or a reachable host it is recorded offline instead, with a warning.

    An offline run lies in ``folder/wandb`` and is uploaded later by ``wandb sync``.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"project": project, "name": name, "dir": folder}
    wanted = os.environ.get("WANDB_MODE", "online")  # a user's own choice for all programs
    if mode == "online" and wanted in ("disabled", "offline", "dryrun"):
        mode = "offline" if wanted == "dryrun" else wanted
    try:
        if mode == "online" and not has_key():
            log.warning("W&B: no API key on this machine (`wandb login` stores one); recording offline in %s/wandb",
                        folder)  # fmt: skip
            mode = "offline"
        run = wandb.init(
            mode=mode, settings=wandb.Settings(init_timeout=init_timeout_s, reinit="create_new"), **options
        )
    except (wandb.errors.Error, OSError, ValueError) as error:  # UsageError, CommError; ValueError: malformed key
        reason = str(error).split("\n")[0]
        log.warning("W&B cannot be reached (%s): recording offline in %s/wandb (see `wandb sync`)", reason, folder)
        wandb.teardown()
        run = wandb.init(mode="offline", settings=wandb.Settings(reinit="create_new"), **options)
    return WandbLogger(experiment=run, save_dir=folder)


def has_key() -> bool:
    """Whether W&B finds an API key, without asking for one and without the network."""
    return bool(wandb.login(prompt=False, verify=False))


def close(loggers: Iterable[Any]) -> None:
    """End the W&B runs among them, so that the next job of a sweep starts its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
