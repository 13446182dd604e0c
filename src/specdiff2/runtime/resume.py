"""What ``resume`` means: which checkpoint, whether it fits these settings, and the curves it continues.

The checkpoint is read once before any model loads; Lightning reads it again when training starts.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.rollout_files import write_atomic
from specdiff2.objectives import ObjectiveSchedule
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

log = logging.getLogger(__name__)
# of section `model`, recorded in checkpoints
SETTINGS = ("gamma", "shifted", "attention", "denoising_steps", "conditioning", "markov_rank")
# sections and keys of train.yaml that decide what a run computes; not how many processes do so, or what is watched
DECISIVE = ("verifier", "model", "data", "objective", "optimizer", "scheduler", "max_steps", "start_from",
            "prefix_loss_weight", "seed")  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What a training checkpoint says about itself; ``lr`` is the peak learning rate it goes on with."""

    path: Path
    step: int
    record: dict[str, Any]
    lr: float | None

    @property
    def run(self) -> Path | None:
        """The run folder it lies in, where it still does."""
        folder = self.path.resolve().parent.parent
        return folder if (folder / "metrics.csv").is_file() else None


def find_checkpoint(resume: bool | str, outputs: Path) -> str | None:
    """The checkpoint file that ``resume`` means: ``True`` the newest ``last.ckpt``, else a run folder or a file.

    Raises:
        ConfigError: there is none.
    """
    if resume is False:
        return None
    if resume is True:
        found = sorted(outputs.glob("**/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ConfigError(f"resume=true: no checkpoints/last.ckpt below {outputs}; start with resume=false")
        return str(found[-1])
    path = Path(resume)
    candidates = [path, path / "last.ckpt", path / "checkpoints" / "last.ckpt"]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise ConfigError(
        f"resume={resume!r}: no such checkpoint; expected a .ckpt file or a run folder with checkpoints/last.ckpt"
    )


def settings_digest(config: Mapping[str, Any]) -> str:
    """The same for configurations that compute the same run."""
    settings = {key: config[key] for key in DECISIVE}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def own_checkpoint(folder: Path, digest: str) -> Checkpoint | None:
    """The newest readable checkpoint in this very run folder, of a run of the same settings: a requeued job, or one
    that was killed and is started again with its ``run_id``, goes on by itself. All ranks find the same."""
    saved = sorted((folder / "checkpoints").glob("step-*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (folder / "checkpoints" / "last.ckpt", *saved):
        if not path.is_file():
            continue
        try:
            checkpoint = read_checkpoint(path)
        except CorruptFileError as error:
            log.warning("%s", error)
            continue
        if checkpoint.record.get("settings") == digest:
            return checkpoint
        log.warning("%s is of other settings: this run starts anew", path)
        return None
    return None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Only records are read, tensors stay on disk.

    Raises:
        CorruptFileError: cut off, not a checkpoint, or not one of this package.
    """
    path = Path(path)
    remedy = "name another checkpoint of the run (checkpoints/step-*.ckpt), or start with resume=false"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise CorruptFileError(f"checkpoint {path}: cannot be read ({reason}); {remedy}") from error
    record = content.get("specdiff2") if isinstance(content, dict) else None
    if not isinstance(record, dict) or "global_step" not in content or "schedule" not in record:
        raise CorruptFileError(f"checkpoint {path}: not one that train.py wrote; {remedy}")
    groups = [group for state in content.get("optimizer_states", ()) for group in state["param_groups"]]
    lr = groups[0].get("initial_lr", groups[0].get("lr")) if groups else None
    return Checkpoint(path, int(content["global_step"]), record, None if lr is None else float(lr))


def check_resume(
    checkpoint: Checkpoint, model: Mapping[str, Any], schedule: ObjectiveSchedule, lr: float | None
) -> None:
    """Compare with the settings of this run what can be compared without a model.

    Raises:
        MismatchError: the window layout differs, or the end of the warm-up has moved past the step resumed at.
    """
    for key in SETTINGS:
        recorded, wanted = checkpoint.record.get(key), model.get(key)
        if recorded is not None and wanted is not None and recorded != wanted:
            raise MismatchError(
                f"checkpoint {checkpoint.path}: {key}={recorded!r}, but model.{key}={wanted!r}: resume with "
                f"model.{key}={recorded}, or start a new run"
            )
    _check_stage(checkpoint, schedule)
    if checkpoint.lr is not None and lr is not None and abs(checkpoint.lr - lr) > 1e-9 * abs(lr):
        log.warning("optimizer.lr=%g is not used: a resumed run goes on with lr=%g of its checkpoint; "
                    "for another learning rate start a new run", lr, checkpoint.lr)  # fmt: skip


def _check_stage(checkpoint: Checkpoint, schedule: ObjectiveSchedule) -> None:
    stages, step = checkpoint.record["schedule"], checkpoint.step
    end, index = 0, 0
    while index < len(stages) - 1 and step >= end + int(stages[index]["steps"] or 0):
        end += int(stages[index]["steps"] or 0)
        index += 1
    old, new = stages[index]["objective"], repr(schedule.stage_at(step).objective)
    if old == new:
        return
    told = f"checkpoint {checkpoint.path}: step {step} belongs to {old}, but to {new} in these settings"
    if old in {repr(stage.objective) for stage in schedule.stages}:  # the same stages, another boundary
        raise MismatchError(f"{told}: set objective.warmup_steps={stages[0]['steps'] or 0} as it was, "
                            "or start a new run")  # fmt: skip
    log.warning("%s: training goes on with %s", told, new)


def continue_curves(checkpoint: Checkpoint, folder: Path) -> None:
    """``metrics.csv`` of a run folder begins with the rows up to the checkpoint, so that reports show it all; rows that
    a killed run wrote after it are repeated, and so cut off."""
    target, source = folder / "metrics.csv", checkpoint.run
    if source is None or (target.exists() and source != folder.resolve()):
        return
    with (source / "metrics.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        rows = [row for row in reader if _is_before(row, checkpoint.step)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, text.getvalue().encode("utf-8"))


def _is_before(row: Mapping[str, str], step: int) -> bool:
    """Losses are counted from 0, so that of row ``step`` comes after the checkpoint; evaluations count steps done."""
    with contextlib.suppress(ValueError, TypeError):
        return int(float(row.get("step") or "")) < step + (not row.get("train/loss"))
    return False
