"""The page of ``task=budgeted``: accuracy and tokens thought over the seconds, and the table behind them.

Summary rows in (``budgeted_summary``), HTML or text out. The charts are labelled, so that ``plot_files`` can make SVG
files of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.json_files import write_text
from specdiff2.evaluation.plots import Series
from specdiff2.evaluation.report_sections import colour_of, group_heading
from specdiff2.evaluation.report_style import card, cards, missing, page, section, table
from specdiff2.evaluation.table import DASH, group_title, grouped, interval, lossless_note, method_label, number

Row = dict[str, Any]
_HEAD = ("method", "budget", "accuracy", "minus the verifier alone", "tokens thought", "finished", "tokens/s", "tau")
_NOTE = (
    "Each method thinks once about each prompt; the thought is cut at every budget and the answer decoded outside it. "
    "Prefill counts into the budget and into tokens/s, warm-up does not. Brackets: 95% intervals (accuracy: Wilson; "
    "difference: prompts resampled in pairs). Finished: the model had stopped thinking by itself."
)


def budgeted_section(rows: Sequence[Row]) -> str:
    """Charts and table of every (benchmark, temperature)."""
    if not rows:
        return section("Accuracy within a budget", "", missing("No thought was measured."))
    colours, parts = colour_of(rows), []
    for group in grouped(rows):
        charts = cards(
            card("Accuracy", "Whiskers: 95% confidence interval.", _chart(group, colours, "accuracy", "accuracy")),
            card("Tokens thought", "Mean over prompts.", _chart(group, colours, "tokens_thought", "tokens thought")),
        )
        body = []
        for row in group:
            cells = _cells(row)
            name = f'<span class="swatch b{colours[row["method"]]}"></span>{escape(cells[0])}'
            body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (name, *map(escape, cells[1:]))) + "</tr>")
        parts.append(group_heading(group[0:1]) + charts + table(_HEAD, body))
    errors = sum(row["num_scorer_errors"] for row in rows)
    notes = [_NOTE, lossless_note(rows), f"{errors} answers made the scorer fail: counted as wrong." if errors else ""]
    lead = "The model thinks, is told at the budget that time is over, and answers."
    return section(
        "Accuracy within a budget", lead, *parts, *(f'<p class="foot">{escape(note)}</p>' for note in notes if note)
    )


def _chart(group: Sequence[Row], colours: dict[str, int], key: str, y_label: str) -> str:
    """One line per method over the seconds, on a logarithmic axis."""
    series = []
    for method in dict.fromkeys(row["method"] for row in group):
        mine = [row for row in group if row["method"] == method]
        values = [row[key]["accuracy"] if key == "accuracy" else row[key] for row in mine]
        series.append(
            Series(method_label(method), [row["budget_s"] for row in mine], values, colours[method],
                   intervals=[row[f"{key}_ci"] for row in mine])
        )  # fmt: skip
    several = len({row["budget_s"] for row in group}) > 1
    return plots.line_chart(
        series, label=f"{y_label} over budget", x_label="seconds of thinking", y_label=y_label, log_x=several,
        from_zero=True,
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    """One row as text, in the order of the table's head."""
    score, gain = row["accuracy"], row["accuracy_difference"]
    return [
        method_label(row["method"]),
        f"{row['budget_s']:g} s",
        f"{100 * score['accuracy']:.1f}% {_percent(row['accuracy_ci'])}",
        DASH if gain is None else f"{100 * gain:+.1f} points {_percent(row['accuracy_difference_ci'])}",
        number(row["tokens_thought"], 1),
        f"{100 * row['share_finished']:.0f}%",
        number(row["tokens_per_s"], 1),
        number(row["tau"], 2),
    ]


def _percent(bounds: Sequence[float] | None) -> str:
    return interval(None if bounds is None else [100 * bound for bound in bounds], 1)


def budgeted_table(rows: Sequence[Row]) -> str:
    """The same tables as aligned text."""
    blocks = []
    for group in grouped(rows):
        lines = [list(_HEAD), *map(_cells, group)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        blocks.append("\n".join([group_title(group[0]), *(text.rstrip() for text in texts)]))
    return "\n\n".join(filter(None, [*blocks, lossless_note(rows)]))


def write_budgeted_report(folder: Path, summary: dict[str, Any]) -> Path:
    """``report.html`` in the run folder; returns its path."""
    facts = [summary.get(key) for key in ("machine", "dtype", "runtime")]
    threads = f"{summary['threads']} threads" if summary.get("threads") else None
    text = page(
        "SpecDiff-2 within a time budget",
        " · ".join(str(fact) for fact in (*facts, threads) if fact),
        [budgeted_section(summary["rows"])],
    )
    path = folder / "report.html"
    write_text(path, text)
    return path
