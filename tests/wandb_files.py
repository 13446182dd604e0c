"""Reads W&B's offline files back, by W&B's own inspector, without network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def offline_runs(folder: Path) -> list[Path]:
    """Offline run folders in ``folder/wandb``, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"))


class OfflineRun:
    """The records of one offline run."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        self._records = [json.loads(line) for line in done.stdout.split("\n") if line]
        self.folder = folder
        self.run = self.of("run")[0]
        self.config: dict[str, Any] = {}
        for one in [*self.of("run"), *self.of("config")]:
            self.config |= one.get("config", one).get("update", {})
        self.history = [one["item"] for one in self.of("history")]
        self.step_metrics = {one["name"]: one.get("step_metric") for one in self.of("metric")}
        self.summary: dict[str, Any] = {}
        for one in self.of("summary"):
            self.summary |= one.get("update", {})

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Contents of the records of one kind, in order."""
        return [record[kind] for record in self._records if record["type"] == kind]

    def line(self, name: str) -> dict[float, float]:
        """One line series: value by its own step metric."""
        x = self.step_metrics[name]
        return {row[x]: row[name] for row in self.history if name in row}

    def artifacts(self, kind: str) -> dict[str, dict[str, Any]]:
        """Logged artifacts of a type by name."""
        return {one["name"]: one for one in self.of("artifact") if one["type"] == kind}

    def table(self, name: str) -> tuple[list[str], list[list[Any]]]:
        """(columns, lines) of a logged table."""
        path = next((self.folder / "files/media/table").glob(f"{name}_*.table.json"))
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["columns"], stored["data"]


def artifact_files(artifact: dict[str, Any]) -> Sequence[str]:
    """Paths in an artifact."""
    return sorted(entry["path"] for entry in artifact["manifest"]["contents"])
