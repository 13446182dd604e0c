"""Loggers lose nothing and need no network; a full disk is one clear error (case 30)."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from specdiff2.runtime.training import clear_disk_errors
from specdiff2.training import loggers, wandb_runs
from specdiff2.types import SpecDiffError


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_rows_of_an_interrupted_run_are_kept(tmp_path: Path) -> None:
    first = loggers.csv_logger(str(tmp_path))
    first.log_metrics({"train/loss": 2.0}, step=1)
    first.save()
    second = loggers.csv_logger(str(tmp_path))
    second.log_metrics({"train/loss": 1.0, "val/streak": 0.5}, step=2)
    second.save()
    rows = read(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/loss"], row["val/streak"]) for row in rows] == [
        ("1", "2.0", ""),
        ("2", "1.0", "0.5"),
    ]


def test_csv_rows_survive_a_kill_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = loggers.csv_logger(str(tmp_path))
    logger.log_metrics({"train/loss": 2.0}, step=1)
    logger.save()
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):  # when the file is opened again
        killed.setattr(loggers, "CSVLogger", interrupt)
        loggers.csv_logger(str(tmp_path))
    logger = loggers.csv_logger(str(tmp_path))
    logger.log_metrics({"val/streak": 0.5}, step=2)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):  # when it gets a new column
        killed.setattr(loggers.csv.DictWriter, "writerows", interrupt)
        logger.save()
    loggers.csv_logger(str(tmp_path))
    assert [(row["step"], row["train/loss"]) for row in read(tmp_path / "metrics.csv")] == [("1", "2.0")]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_wandb_without_a_key_records_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb_runs, "has_key", lambda: False)
    with caplog.at_level(logging.WARNING):
        logger = loggers.wandb_logger(str(tmp_path), project="test")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    loggers.close([logger])
    assert "no API key" in caplog.text and list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("[enforce fail] PytorchStreamWriter failed writing file")],
)
def test_full_disk_says_how_to_go_on(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(SpecDiffError, match=r"free some disk space, then (no checkpoint|go on)"),
        clear_disk_errors(tmp_path),
    ):
        raise error


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), clear_disk_errors(tmp_path):
        raise RuntimeError("a bug")


def test_malformed_wandb_key_records_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "not a key !")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with caplog.at_level(logging.WARNING):
        logger = loggers.wandb_logger(str(tmp_path), project="test", init_timeout_s=2)
    loggers.close([logger])
    assert "recording offline" in caplog.text and list((tmp_path / "wandb").glob("offline-run-*"))


def test_wandb_that_the_user_has_disabled_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = loggers.wandb_logger(str(tmp_path), project="test")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    loggers.describe([logger], tmp_path)  # needs no run.json
    loggers.close([logger], tmp_path)
    assert not list(tmp_path.iterdir())
