"""Write an experiment's ``results.json`` from finished run or sweep folders, and print its tables for the README.

python -m specdiff2.runtime.results outputs/eval/table3 outputs/multirun/eval/k --out experiments/011-alignments

Every number is one of the runs' ``summary.json``, every fact one of their ``run.json``. ``--claims SPEC`` judges the
claims of a YAML file (``evaluation.claims``) into ``claims.json``; ``--plot LABEL`` saves a chart of the runs' reports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff2.evaluation.claims import claims_table, judge_spec, write_claims
from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.evaluation.metrics import HEADER_KEYS
from specdiff2.evaluation.plot_files import pick_charts
from specdiff2.evaluation.sweep_jobs import parse_value, read_jobs, swept_keys
from specdiff2.evaluation.table import markdown_table, method_label
from specdiff2.runtime.run_facts import portable_command, run_name
from specdiff2.runtime.tool import run_tool
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

RESULTS_FILE = "results.json"
ROW_KEYS = ("method", "benchmark", "temperature", "num_prompts", "tokens_per_s", "speedup", "speedup_ci",
            "mean_streak", "tau", "draft_ms", "verify_ms", "other_ms", "lossless_check")  # fmt: skip
_REMEDY = "what eval.py wrote; run the evaluation again"


@dataclass(frozen=True, slots=True)
class Source:
    """One finished run: its header, what a sweep has set in it, and its summary."""

    name: str
    header: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]


def read_sources(folder: Path) -> list[Source]:
    """The run in ``folder``, or every job of the sweep in it.

    Raises:
        ConfigError: no evaluation, or one that is not finished.
        CorruptFileError: a file is damaged.
    """
    if (folder / "run.json").is_file() or not folder.is_dir():
        return [_read_source(folder, {})]
    jobs = read_jobs(folder)
    if not jobs:
        raise ConfigError(f"{folder}: expected a run folder with run.json, or a sweep folder with its jobs")
    keys = swept_keys(jobs)
    return [_read_source(job.folder, {key: parse_value(job.overrides.get(key)) for key in keys}) for job in jobs]


def _read_source(folder: Path, settings: dict[str, Any]) -> Source:
    run, summary, status = (read_json(folder / f"{name}.json", _REMEDY) for name in ("run", "summary", "status"))
    state = (status or {}).get("status", "done")
    if run is None or summary is None or state != "done":
        missing = [name for name, value in (("run.json", run), ("summary.json", summary)) if value is None]
        raise ConfigError(
            f"{folder}: status {state!r}, missing {missing}: expected a finished evaluation; run the command again"
        )
    commit = f"{run['commit']} with changes" if run.get("dirty") else run["commit"]
    header = {key: run.get(key) for key in HEADER_KEYS}
    return Source(run_name(folder), {**header, "command": portable_command(str(run["command"])), "commit": commit},
                  settings, summary)  # fmt: skip


def build_results(folders: Sequence[Path], *, mixed: bool = False) -> dict[str, Any]:
    """The content of ``results.json``: header, rows and comparisons of all runs, in their order.

    With several runs each row names its ``run`` and, after a sweep, its ``settings``.

    Args:
        mixed: allow runs of different commits, machines, dtypes, threads, runtimes or seeds: each row says its own.

    Raises:
        ConfigError, CorruptFileError: a run is not finished, or damaged.
        MismatchError: the runs differ in what only ``mixed`` allows.
    """
    sources = [source for folder in folders for source in read_sources(folder)]
    values = {key: list(dict.fromkeys(source.header[key] for source in sources)) for key in HEADER_KEYS}
    differing = [key for key in HEADER_KEYS if len(values[key]) > 1]
    if not mixed and set(differing) - {"command"}:
        key = next(key for key in differing if key != "command")
        raise MismatchError(f"runs of {key} {' and '.join(map(repr, values[key]))}: expected one {key} for one table; "
                            "measure them again, or let each row say its own with --mixed")  # fmt: skip
    rows, comparisons = [], []
    for source in sources:
        own: dict[str, Any] = {"run": source.name} if len(sources) > 1 else {}
        own |= {"settings": source.settings} if source.settings else {}
        comparisons += [{**one, **own} for one in source.summary.get("comparisons", ())]
        rows += [{**row, **own, **{key: source.header[key] for key in differing}} for row in source.summary["rows"]]
    header = {key: one[0] if len(one) == 1 else " ; ".join(map(str, one)) for key, one in values.items()}
    bootstrap = sources[0].summary.get("bootstrap")
    return check_results({**header, "rows": rows, "comparisons": comparisons, "bootstrap": bootstrap}, "these runs")


def check_results(record: Any, name: str) -> dict[str, Any]:
    """``record`` itself, if it is a ``results.json`` in the one schema of this project; more keys are welcome.

    Raises:
        CorruptFileError: a key of the header or of a row is missing.
    """
    missing = [key for key in (*HEADER_KEYS, "rows") if not isinstance(record, dict) or key not in record]
    rows = [] if missing else record["rows"]
    missing += sorted({f"rows[].{key}" for row in rows for key in ROW_KEYS if key not in row})
    if missing or not rows:
        raise CorruptFileError(
            f"{name}: lacks {', '.join(missing) or 'rows'}: expected the schema of results.json, as "
            "`python -m specdiff2.runtime.results` writes it (null where nothing is known)"
        )
    return record


def read_results(path: Path) -> dict[str, Any]:
    """An experiment's ``results.json``.

    Raises:
        ConfigError: there is no such file.
        CorruptFileError: it is damaged or of another schema.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected the results.json of an experiment")
    return check_results(read_json(path, "the results.json of an experiment"), str(path))


def results_table(record: dict[str, Any]) -> str:
    """Markdown, one table per benchmark, temperature and number of prompts.

    What a sweep has set, or else the run where there are several, stands behind the method's name.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        told = [f"{key.split('.')[-1]} {value}" for key, value in row.get("settings", {}).items()]
        if not told and "run" in row:
            told = [Path(row["run"]).name]
        label = ", ".join([method_label(row["method"]), *told])
        groups.setdefault(row["num_prompts"], []).append({**row, "method": label})
    return "\n\n".join(markdown_table(rows) for rows in groups.values())


def write_results(folders: Sequence[Path], out: Path, *, claims: Path | None, plots: Sequence[str], mixed: bool) -> str:
    """Everything into ``out``; returns what to print. Nothing is written where a run, claim or plot is refused."""
    record, charts = build_results(folders, mixed=mixed), pick_charts(folders, plots)
    judged = judge_spec(claims) if claims else []
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULTS_FILE, record)
    for name, drawing in charts.items():
        (out / name).write_text(drawing, encoding="utf-8")
    written = [out / RESULTS_FILE, *([write_claims(judged, out)] if judged else []), *(out / name for name in charts)]
    tables = [results_table(record), *([claims_table(judged)] if judged else [])]
    return "\n\n".join([*tables, "written: " + ", ".join(map(str, written))])


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(prog="python -m specdiff2.runtime.results", description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="run or sweep folders of eval.py")
    parser.add_argument(
        "--out", type=Path, required=True, help="the experiment's folder, e.g. experiments/011-alignments"
    )
    parser.add_argument("--claims", type=Path, help="YAML spec of claims to judge")
    parser.add_argument("--plot", action="append", default=[], metavar="LABEL", help="chart to save; several times")
    parser.add_argument("--mixed", action="store_true", help="allow runs of different commits, machines or settings of "
                        "the machine: each row then says its own")  # fmt: skip
    given = parser.parse_args(arguments)
    return run_tool(lambda: write_results(given.folders, given.out, claims=given.claims, plots=given.plot,
                                          mixed=given.mixed))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
