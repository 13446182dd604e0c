"""``eval.py task=budgeted``: accuracy within a budget of seconds, for every method and benchmark of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.evaluation.budgeted import BudgetedBenchmark
from specdiff2.evaluation.budgeted_records import BUDGETED_FILE
from specdiff2.evaluation.budgeted_settings import BudgetSection
from specdiff2.evaluation.budgeted_summary import write_budgeted_summary
from specdiff2.evaluation.report_budgeted import budgeted_table, write_budgeted_report
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Decoder
from specdiff2.runtime.compilation import warm_passes


def evaluate_budgeted(
    config: Mapping[str, Any],
    verifier: HFVerifier,
    decoders: Mapping[str, Decoder],
    sources: Mapping[str, Any],
    folder: Path,
) -> Path:
    """Think, cut, answer and grade; ``budgeted.jsonl``, ``summary.json`` and ``report.html`` in ``folder``.

    Several benchmarks are measured in folders of their own first. Returns the path of the report.

    Raises:
        ConfigError: a bad ``budget``, a prompt that cannot be graded, or one without room for thought and answer.
        MismatchError: the folder holds records of other settings.
    """
    settings = BudgetSection(**config["budget"])
    runs = {
        name: BudgetedBenchmark(
            prompts,
            ChatEncoder.of(verifier),
            decoders,
            settings,
            benchmark_name=name,
            seed=config["seed"],
            num_warmup=config["num_warmup"],
            stop_ids=config["stop_ids"],
            stop_strings=config["stop"],
        )
        for name, prompts in sources.items()
    }
    paths = []
    for name, run in runs.items():
        warm_passes(verifier, decoders, run.longest_prompt, run.max_new_tokens)
        paths.append(run.run(folder if len(runs) == 1 else folder / "benchmarks" / name))
    if len(paths) > 1:
        (folder / BUDGETED_FILE).write_bytes(b"".join(path.read_bytes() for path in paths))
    return report_budgeted(folder)


def report_budgeted(folder: Path) -> Path:
    """Summary, printed table and page from ``folder/budgeted.jsonl``; needs no model.

    Raises:
        ConfigError: no records in the folder.
        CorruptFileError: a file of the run cannot be read.
    """
    summary = write_budgeted_summary(folder)
    report = write_budgeted_report(folder, summary)
    print(f"\n{budgeted_table(summary['rows'])}\n\nreport: {report}")
    return report
