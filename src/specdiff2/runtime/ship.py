"""Put a trained drafter into the package: bfloat16 weights and a model card below ``assets/drafters``.

python -m specdiff2.runtime.ship outputs/train/long/drafter/best smollm2_block --run outputs/train/long \
    --results experiments/003-drafter/results.json

``NAME`` is what ``drafter=shipped`` looks for: the name of the configuration in conf/model. Several ``--run`` are the
stages of one training, in order. The verifier is loaded as the last run's run.json describes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdiff2.models import shipped
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.card_facts import CardFacts
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.model_card import write_card
from specdiff2.models.pretrained import load_drafter, read_drafter_config, read_training_info, save_drafter
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.run_facts import data_facts, find_rollouts, portable, read_results, read_run, run_facts, run_name
from specdiff2.runtime.tool import run_tool
from specdiff2.types import ConfigError

MAX_BYTES = 30_000_000


def ship(
    folder: Path, name: str, runs: Sequence[Path], results: Path, rollouts: Sequence[Path] = (), command: str = ""
) -> Path:
    """Write ``DRAFTERS_FOLDER/name``; a drafter shipped there before is replaced.

    Args:
        folder: of the trained drafter.
        rollouts: the stores it was trained on; empty: those the runs' configurations name.
        command: shown on the card as the one that wrote it.

    Raises:
        ConfigError: a bad name, a drafter of another run, a file above 30 MB, or facts for the card that are missing.
        MismatchError, CorruptFileError: the drafter, its verifier or a file of a run is damaged or another one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"name {name!r}: expected letters, digits, '_', '-' and '.', e.g. smollm2_block")
    training = read_training_info(folder)
    check_runs(training, runs)
    config = read_drafter_config(folder)
    if isinstance(config, MaskedLMConfig):
        raise ConfigError(f"drafter {folder}: only block drafters ship with the package; see specdiff2.runtime.export")
    stores = rollouts or dict.fromkeys(
        find_rollouts(read_run(run)["config"], config.verifier_fingerprint) for run in runs
    )
    evaluation, measured = read_results(results)
    facts = CardFacts(tuple(map(run_facts, runs)), tuple(data_facts(list(stores))), evaluation, measured, command)
    drafter = load_drafter(folder, instantiate(read_run(runs[-1])["config"]["verifier"]), dtype=torch.float32)
    forget_folders(drafter)
    info = without_folders(training) | {"runs": [run.name for run in facts.runs]}
    with tempfile.TemporaryDirectory() as scratch:  # nothing is replaced before all of it is known to be right
        draft = save_drafter(drafter, Path(scratch) / name, info, dtype=torch.bfloat16)
        write_card(draft, facts)
        num_bytes = sum(file.stat().st_size for file in draft.iterdir())
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"drafter {folder}: {num_bytes / 1e6:.1f} MB in bfloat16, expected at most {MAX_BYTES / 1e6:.0f} MB inside "
            "the package; train one with fewer layers (model.num_layers), a smaller draft vocabulary or Markov rank"
        )
    target = save_drafter(drafter, shipped.DRAFTERS_FOLDER / name, info, dtype=torch.bfloat16)
    write_card(target, facts)
    return target


def check_runs(training: dict[str, Any], runs: Sequence[Path]) -> None:
    """The card tells how this very drafter was trained.

    Raises:
        ConfigError: no run, one twice, or the last one is not the drafter's.
    """
    names = [run_name(run) for run in runs]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"runs {names}: expected at least one, each once; give --run FOLDER")
    own = run_name(str(training.get("run", "")) or "unknown")
    if own != names[-1]:
        raise ConfigError(f"last run {names[-1]!r}: expected {own!r}, which exported the drafter; correct --run or it")
    first_rows = [run_facts(run).curve[:1] for run in runs]
    for name, row, later in zip(names, first_rows, first_rows[1:], strict=False):
        if row and row == later:
            raise ConfigError(f"run {name!r}: the run after it was resumed from it and holds its curve; leave it out")


def forget_folders(drafter: BlockDrafter) -> None:
    """A drafter remembers where its verifier lay, twice; a fingerprint says which one it was."""
    base = dict(drafter.config.base_config)
    base.pop("_name_or_path", None)
    name = portable(drafter.config.verifier_name)
    drafter.config = dataclasses.replace(drafter.config, base_config=base, verifier_name=name)


def without_folders(training: dict[str, Any]) -> dict[str, Any]:
    """The training info with no path of this machine in it."""
    kept = {key: portable(value) if isinstance(value, str) else value for key, value in training.items()}
    return kept | ({"run": run_name(training["run"])} if "run" in training else {})


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(prog="python -m specdiff2.runtime.ship", description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path, help="folder of the trained drafter")
    parser.add_argument("name", help="of its configuration in conf/model, e.g. smollm2_block")
    parser.add_argument("--run", type=Path, action="append", required=True, help="run folder; repeat for stages")
    parser.add_argument("--results", type=Path, required=True, help="results.json of an experiment that measured it")
    parser.add_argument("--rollouts", type=Path, action="append", default=[], help="store; default: the runs' own")
    given = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "specdiff2.runtime.ship", *map(portable, arguments)])
    return run_tool(lambda: ship(given.drafter, given.name, given.run, given.results, given.rollouts, command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
