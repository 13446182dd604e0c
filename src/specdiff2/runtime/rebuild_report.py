"""``make report``: rebuild summary and report of a run from its files, without loading any model.

python -m specdiff2.runtime.rebuild_report [FOLDER ...]    # default: the newest evaluation below outputs/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specdiff2.evaluation.budgeted_records import BUDGETED_FILE
from specdiff2.evaluation.json_files import write_json, write_text
from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE
from specdiff2.evaluation.report import write_report
from specdiff2.evaluation.shards import SHARDS
from specdiff2.evaluation.sweep_table import to_csv
from specdiff2.runtime.budgeted import report_budgeted
from specdiff2.runtime.grid_page import write_grid_page
from specdiff2.runtime.tool import run_tool
from specdiff2.types import ConfigError, CorruptFileError

BATCHES_FILE = "batch_sizes.csv"
TRAINING_RUNS_FILE = "training_runs.json"


def rebuild(folders: Sequence[Path]) -> Path:
    """Summaries of every folder with records, then one report of all of them in the first folder.

    The training runs whose drafters were measured come in too, as far as they are still there.

    Raises:
        ConfigError: a folder is missing or holds no results.
        CorruptFileError: a file of a run cannot be read.
    """
    if (folders[0] / BUDGETED_FILE).is_file():
        return report_budgeted(folders[0])
    for folder in folders:
        if (folder / RECORDS_FILE).is_file():
            rows = [row for row in write_summary(folder)["rows"] if row.get("batch_size")]
            if rows:
                write_text(folder / BATCHES_FILE, to_csv(rows))
            write_grid_page(folder)
    trained = [run for folder in folders for run in read_training_runs(folder)]
    return write_report(list({folder.resolve(): folder for folder in [*folders, *trained]}.values()))


def write_training_runs(folder: Path, runs: Sequence[Path]) -> None:
    """Remember where the measured drafters were trained: the report shows their curves."""
    write_json(folder / TRAINING_RUNS_FILE, {"training_runs": [str(run.resolve()) for run in runs]})


def read_training_runs(folder: Path) -> list[Path]:
    """The remembered training runs that still have their metrics; none for a folder without the file.

    Raises:
        CorruptFileError: the file is damaged.
    """
    path = folder / TRAINING_RUNS_FILE
    if not path.is_file():
        return []
    try:
        runs = [Path(run) for run in json.loads(path.read_text(encoding="utf-8"))["training_runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            f'{path} is damaged ({error}): expected {{"training_runs": [folders]}}; delete it and name the training '
            "runs yourself"
        ) from error
    return [run for run in runs if (run / "metrics.csv").is_file()]


def newest_run(outputs: Path) -> Path:
    """The evaluation that wrote records last.

    Raises:
        ConfigError: there is none.
    """
    # a suite measures each benchmark, and each of several processes its share, in a folder of its own below the run
    inside = ("benchmarks", SHARDS)
    found = [path for path in outputs.glob(f"eval/**/{RECORDS_FILE}") if path.parents[1].name not in inside]
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"no evaluation below {outputs}: run `python eval.py` first, or name its folder")
    return found[-1].parent


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    return run_tool(lambda: rebuild([Path(a) for a in arguments] or [newest_run(Path("outputs"))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
