"""The HTML report of one or several runs: self-contained, light and dark, readable on a phone.

Files in, one file out: every number comes from ``summary.json``, ``records.jsonl`` and ``metrics.csv``, so a
report can be rebuilt at any time without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdiff2.evaluation import report_sections as sections
from specdiff2.evaluation import report_story as story
from specdiff2.evaluation.batched_rows import split_name
from specdiff2.evaluation.json_files import write_text
from specdiff2.evaluation.report_batched import batches
from specdiff2.evaluation.report_inputs import EvaluationRun, TrainingRun, read_runs
from specdiff2.evaluation.report_style import missing, page, section

REPORT_FILE = "report.html"


def write_report(run_folders: Path | str | Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the report of evaluation and training runs and return its path.

    Args:
        run_folders: one folder or several, in any order.
        out: file to write; default ``report.html`` in the first folder.

    Raises:
        ConfigError: a folder is missing or holds no results.
        CorruptFileError: a file of a run cannot be read.
    """
    folders = [Path(run_folders)] if isinstance(run_folders, (str, Path)) else [Path(one) for one in run_folders]
    path = Path(out) if out is not None else folders[0] / REPORT_FILE
    evaluations, trainings = read_runs(folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render(evaluations, trainings))
    return path


def render(evaluations: Sequence[EvaluationRun], trainings: Sequence[TrainingRun]) -> str:
    """The whole page."""
    rows = [row for run in evaluations for row in run.summary["rows"]]
    body = []
    if rows:
        single = [row for row in rows if (row.get("batch_size") or 1) == 1]
        colours = sections.colour_of(single)
        compared = [one for run in evaluations for one in run.summary.get("comparisons", [])]
        body += [
            sections.tiles(single),
            sections.headline(single, colours),
            batches(rows, colours),
            sections.position_plots(single, colours),
            sections.speed_plots(single, colours),
            sections.comparisons([one for one in compared if split_name(one["to"])[1] == 1]),
        ]
    else:
        body.append(section("Results", "", missing("No evaluation run given: run eval.py and pass its folder.")))
    body.append(story.training(trainings))
    if rows:
        body.append(story.samples(evaluations))
        body.append(sections.losslessness(rows, [run.divergences for run in evaluations if run.divergences]))
    body += [story.provenance([*evaluations, *trainings]), story.glossary()]
    return page("SpecDiff-2 report", _subtitle(evaluations, trainings), [part for part in body if part])


def _subtitle(evaluations: Sequence[EvaluationRun], trainings: Sequence[TrainingRun]) -> str:
    """Machine, dtype and threads: no speed means anything without them."""
    runs: list[EvaluationRun | TrainingRun] = [*evaluations, *trainings]
    if not runs:
        return ""
    run = runs[0]
    known = {**run.provenance, **(run.summary if isinstance(run, EvaluationRun) else {})}
    facts = [known.get("machine"), known.get("dtype"), known.get("runtime")]
    if known.get("threads"):
        facts.append(f"{known['threads']} thread" + ("s" if known["threads"] != 1 else ""))
    return " · ".join(str(fact) for fact in facts if fact)
