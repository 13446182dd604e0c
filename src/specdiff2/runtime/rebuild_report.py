"""``make report``: rebuild summary and report of a run from its files, without loading any model.

python -m specdiff2.runtime.rebuild_report [FOLDER ...]    # default: the newest evaluation below outputs/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE
from specdiff2.evaluation.report import write_report
from specdiff2.types import ConfigError, SpecDiffError


def rebuild(folders: Sequence[Path]) -> Path:
    """Summaries of every folder with records, then one report of all of them in the first folder."""
    for folder in folders:
        if (folder / RECORDS_FILE).is_file():
            write_summary(folder)
    return write_report(list(folders))


def newest_run(outputs: Path) -> Path:
    """The evaluation that wrote records last.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(outputs.glob(f"eval/*/*/{RECORDS_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"no evaluation below {outputs}: run `python eval.py` first, or name its folder")
    return found[-1].parent


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    try:
        print(rebuild([Path(a) for a in arguments] or [newest_run(Path("outputs"))]))
    except SpecDiffError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
