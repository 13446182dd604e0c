"""``task=speed_law``: predict measured speed-ups from costs fitted on other runs; extrapolate to published hardware.

python eval.py task=speed_law 'speed_law.runs=[outputs/eval/*]'
python -m specdiff2.runtime.speed_law RUN... --out FOLDER [--hardware FILE.yaml ...]

Writes ``speed_law.json`` and ``report.html`` and prints Markdown tables. Loads no model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdiff2.evaluation.json_files import write_json
from specdiff2.evaluation.report_speed_law import speed_law_markdown, speed_law_page
from specdiff2.evaluation.speed_law_check import TOLERANCE, check_runs
from specdiff2.runtime.speed_law_extrapolation import extrapolate
from specdiff2.runtime.speed_law_runs import find_runs, read_run
from specdiff2.runtime.speed_law_settings import SpeedLawSection
from specdiff2.runtime.tool import run_tool
from specdiff2.types import ConfigError

SPEED_LAW_FILE = "speed_law.json"
REPORT_FILE = "report.html"


def run_speed_law(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Section ``speed_law`` of a checked configuration; writes into ``folder`` and prints the tables.

    Raises:
        ConfigError, CorruptFileError: see ``find_runs``, ``read_run``, ``check_runs`` and ``extrapolate``.
    """
    section = SpeedLawSection(**config["speed_law"])
    result = check_runs([read_run(run) for run in find_runs(section.runs)], section.tolerance)
    result["extrapolation"] = extrapolate(section) if section.hardware else None
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SPEED_LAW_FILE, result)
    (folder / REPORT_FILE).write_text(speed_law_page(result), encoding="utf-8")
    print(f"{speed_law_markdown(result)}\n\nreport: {folder / REPORT_FILE}")
    return result


def read_hardware_file(path: Path) -> dict[str, Any]:
    """A file like those of ``conf/hardware``, upon the ones beside it that its ``defaults`` name.

    Raises:
        ConfigError: there is no such file, or it holds no settings.
    """
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a file like conf/hardware/a100_80gb.yaml") from error
    if not isinstance(node, dict):
        raise ConfigError(f"{path}: expected settings like those of conf/hardware/a100_80gb.yaml")
    parents = [read_hardware_file(path.with_name(f"{name}.yaml")) for name in node.pop("defaults", [])]
    return {key: value for part in [*parents, node] for key, value in part.items()}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(prog="python -m specdiff2.runtime.speed_law", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="run folders of evaluations, or patterns of them")
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    parser.add_argument("--hardware", nargs="*", default=[], type=Path, help="files like conf/hardware/a100_80gb.yaml")
    chosen = parser.parse_args(arguments)

    def work() -> str:
        hardware = {path.stem: read_hardware_file(path) for path in chosen.hardware}
        section = {**DEFAULTS, "runs": chosen.runs, "hardware": hardware}
        run_speed_law({"speed_law": section}, chosen.out)
        return f"written to {chosen.out}"

    return run_tool(work)


# conf/speed_law/default.yaml says the same for eval.py; a test holds them together
DEFAULTS: dict[str, Any] = {
    "tolerance": TOLERANCE,
    "num_devices": [1, 2, 4, 8],
    "verifier": "Qwen/Qwen2.5-72B-Instruct",
    "drafter": "apple/DiffuCoder-7B-cpGRPO",
    "attention": ["bidirectional", "causal_prefix"],
    "gamma": 16,
    "num_drafts": [1, 8],
    "context": 512,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
