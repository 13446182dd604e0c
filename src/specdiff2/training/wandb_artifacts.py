"""Drafters and rollouts as W&B artifacts with lineage: rollouts -> training run -> drafter -> evaluation run.

W&B tells versions apart by content, so the drafter that a training run logs and the copy of it that an evaluation
used are one version, whichever run is uploaded first. Files are read where they lie (no second copy): an offline run
must be synced while they are still there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from specdiff2.data.rollout_files import ROLLOUTS_FILE
from specdiff2.models.pretrained import read_training_info
from specdiff2.types import CorruptFileError


def read_rollouts(run_folder: Path) -> list[Path]:
    """The remembered stores that are still there; none for a run that remembers none.

    Raises:
        CorruptFileError: the file is damaged.
    """
    path = run_folder / ROLLOUTS_FILE
    if not path.is_file():
        return []
    try:
        stores = [Path(folder) for folder in json.loads(path.read_text(encoding="utf-8")).values()]
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}): expected the folder of rollouts by split; delete it"
        ) from error
    return [store for store in stores if store.is_dir()]


def drafter_artifact(folder: Path) -> wandb.Artifact:
    """The drafter in ``folder``, named after the training run it comes from.

    Raises:
        CorruptFileError, MismatchError: no readable drafter.
    """
    facts = read_training_info(folder)
    run = Path(str(facts.get("run") or folder.resolve().parent.name))
    return _artifact("drafter", [run_name(run), folder.name], folder, facts)


def rollouts_artifact(folder: Path) -> wandb.Artifact:
    """A rollout store, with its manifest as metadata."""
    manifest = folder / "manifest.json"
    facts = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    return _artifact("rollouts", [folder.parent.name, folder.name], folder, facts)


def run_name(folder: Path) -> str:
    """Last part of a run folder, with the one before where that is part of the name (dates, groups, sweeps)."""
    parts = [part for part in folder.parts[-2:] if part not in ("train", "eval", "/", "outputs")]
    return "-".join(parts) or "run"


def log_training_artifacts(run: Any, folder: Path) -> None:
    """``run`` used the remembered rollouts and made the drafters in ``folder/drafter``.

    Raises:
        CorruptFileError, MismatchError: a file of the run folder is damaged.
    """
    for store in read_rollouts(folder):
        use_artifact(run, rollouts_artifact(store))
    for config in sorted((folder / "drafter").glob("[!.]*/config.json")):
        run.log_artifact(drafter_artifact(config.parent))


def use_artifact(run: Any, artifact: wandb.Artifact) -> None:
    """Make a local artifact an input of ``run``, offline too.

    ``Run.use_artifact`` refuses to work offline; for a new artifact it does just this online.
    """
    run._log_artifact(artifact, is_user_created=True, use_after_commit=True)


def _artifact(kind: str, name: Sequence[str], folder: Path, facts: dict[str, Any]) -> wandb.Artifact:
    full = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join([kind, *name]))[:128]
    artifact = wandb.Artifact(full, type=kind, metadata=json.loads(json.dumps(facts, default=str)))
    artifact.add_dir(str(folder), policy="immutable", skip_cache=True)
    return artifact
