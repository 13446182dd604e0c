"""Drafters that leave a training run: exported while it goes on, published where ``eval.py`` looks at its end."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.rollout_files import acquire_lock, release_lock
from specdiff2.decoding.drafter_names import default_sampler
from specdiff2.models.drafter_files import copy_drafter
from specdiff2.models.pretrained import save_drafter
from specdiff2.training.callbacks.drafter_export import DRAFTER_NAMES, DrafterExport

DEFAULT_SAMPLER = "specdiff2"  # of eval.yaml
log = logging.getLogger(__name__)


def export_drafter(run: Path, drafter: Any, folder: Path, facts: Mapping[str, Any]) -> None:
    """Save with the run it comes from, so that reports find the training curves."""
    save_drafter(drafter, folder, {"run": str(run), **facts})


def exported_names(callbacks: Sequence[Any]) -> list[str]:
    """Drafters that this run has exported (or taken over from the run it continues), those of single steps first."""
    found = {name for callback in callbacks if isinstance(callback, DrafterExport) for name in callback.exported}
    steps = sorted(found.difference(DRAFTER_NAMES), key=lambda name: int(name.removeprefix("step-")))
    return [*steps, *(name for name in DRAFTER_NAMES if name in found)]


def report(config: Mapping[str, Any], folder: Path, names: Sequence[str]) -> None:
    """Publish the exported drafters and say what to do next."""
    if not names:
        print("no drafter was exported (the run ended before its first evaluation)")
        return
    shown = folder / "drafter"
    if config["publish"]:
        shown = Path(config["paths"]["drafters"]) / config["model_name"]
        shown.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(shown)  # jobs of a sweep may publish under one name
        try:
            for name in names:
                copy_drafter(folder / "drafter" / name, shown / name)
            earlier = [*DRAFTER_NAMES, *sorted(path.name for path in shown.glob("step-*"))]
            withdraw(shown, [name for name in earlier if name not in names])
        finally:
            release_lock(lock)
    print(f"drafters: {', '.join(str(shown / name) for name in names)}")
    # the same pair, as it was named on the command line
    pair = shlex.join(given for given in sys.argv[1:] if given.startswith(("model=", "model.source=", "verifier")))
    drafter = shown / ("best" if "best" in names else names[-1])
    sampler = default_sampler(drafter, config["verifier"].get("source", ""))
    choice = "" if sampler == DEFAULT_SAMPLER else f"sampler={sampler}"
    print(" ".join(part for part in ("measure:  python eval.py", choice, f"drafter={drafter}", pair) if part))


def withdraw(shown: Path, names: Sequence[str]) -> None:
    """Remove drafters that an earlier run has published: beside this run's they would be compared with them."""
    for name in names:
        if (shown / name / "config.json").is_file():
            shutil.rmtree(shown / name)
            log.warning("%s: removed, this run has none of that name (the run it came from keeps its own)",
                        shown / name)  # fmt: skip
