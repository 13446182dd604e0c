"""The wall between what a drafter was trained on and what it is measured on.

A drafter's folder names the run it comes from, the run's folder the rollouts, their folder the prompts' signatures; and
the run names the drafter it started from, with prompts of its own. Where that trail leaves this machine, the log says
so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.overlap import check_no_overlap, leave_out
from specdiff2.data.prompt import Prompt
from specdiff2.data.rollout_files import ROLLOUTS_FILE
from specdiff2.data.rollout_prompts import store_signatures
from specdiff2.data.signatures import SIGNATURES_FILE, read_signatures
from specdiff2.evaluation.json_files import read_json
from specdiff2.models.shipped import drafter_folder
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.named_drafters import training_run
from specdiff2.runtime.run_facts import find_rollouts, read_run
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
_REMEDY = (
    "a drafter is not measured on prompts it was trained on: choose other rows (benchmark.skip, benchmark.limit) or "
    "another benchmark, train without that source, or leave these prompts out with drop_overlap=true"
)


def unseen_prompts(
    sources: Mapping[str, Sequence[Prompt]], drafters: Iterable[str], verifier: HFVerifier, *, drop: bool
) -> dict[str, list[Prompt]]:
    """The prompts of each benchmark, none of which a drafter was trained on (see ``data.overlap``).

    Args:
        drafters: folders of the drafters to be measured.
        drop: leave such prompts out, for every method, counted in the log, instead of refusing.

    Raises:
        ConfigError: a prompt was trained on; or with ``drop`` none of a benchmark is left.
    """
    kept = {name: list(prompts) for name, prompts in sources.items()}
    trained: dict[Path, str] = {}
    for drafter in dict.fromkeys(drafters):
        trained |= trained_on(drafter, verifier.fingerprint)
    encoder = ChatEncoder.of(verifier)
    for path, where in trained.items():
        signatures = read_signatures(path) if path.is_file() else store_signatures(path, encoder)
        if not drop:
            check_no_overlap({where: signatures}, {f"benchmark {n}": prompts for n, prompts in kept.items()}, _REMEDY)
            continue
        kept = {name: leave_out(signatures, where, prompts, f"benchmark {name}") for name, prompts in kept.items()}
    empty = [name for name, prompts in kept.items() if not prompts]
    if empty:
        raise ConfigError(f"drop_overlap: no prompt of benchmark {empty[0]} is left; choose another benchmark")
    return kept


def trained_on(drafter: str, fingerprint: str) -> dict[Path, str]:
    """Where the prompts that led to a drafter are, and how messages call it: rollouts or a file of signatures, its own
    and those of the drafters that training started from. ``fingerprint`` is that of the verifier.
    """
    found: dict[Path, str] = {}
    folder: str | None = drafter
    while folder is not None:
        own = Path(folder) / SIGNATURES_FILE  # a drafter that travels may carry them
        if own.is_file():
            return found | {own: f"drafter {folder}"}
        run = training_run(folder)
        if run is None:
            return found  # no training of ours has made it
        origin = _origin(Path(run), fingerprint)
        if origin is None:
            log.info("drafter %s: the rollouts of run %s are not on this machine, so only sources can be compared: see "
                     "its model card", folder, run)  # fmt: skip
            return found
        store, folder = origin
        found[store] = f"rollouts {store} (drafter {drafter})"
    return found


def _origin(run: Path, fingerprint: str) -> tuple[Path, str | None] | None:
    """(training rollouts of a run, the drafter it started from); None where they are not there any more."""
    if not (run / "run.json").is_file():
        return None
    config: Mapping[str, Any] = read_run(run)["config"]
    noted = read_json(run / ROLLOUTS_FILE, "the names of rollout folders that train.py writes")
    try:
        store = find_rollouts(config, fingerprint) if noted is None else Path(noted["train"])
    except ConfigError as error:  # none fits any more, or several do
        log.info("run %s: %s", run, error)
        return None
    start = config.get("start_from")
    if start is not None:
        start = drafter_folder(start, config["verifier"].get("source"), config["model_name"])
    return (store, start) if store.is_dir() else None
