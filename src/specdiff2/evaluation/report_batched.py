"""Section of the report about batch sizes: tokens per second and speed-up over the prompts decoded at once.

Summary rows in, HTML out; empty for runs that decoded one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.batched_rows import by_method
from specdiff2.evaluation.plots import Series
from specdiff2.evaluation.report_style import card, cards, section, table
from specdiff2.evaluation.table import TIMES, group_title, grouped, interval, method_label, number

Row = dict[str, Any]
_LEAD = (
    "Speculation uses arithmetic that a small batch leaves idle, so its gain shrinks as batches grow. A prompt that "
    "ends gives its place to the next one of its block. Milliseconds are a prompt's share of a round; intervals come "
    "from resampling blocks of prompts, in pairs."
)


def batches(rows: Sequence[Row], colours: dict[str, int]) -> str:
    """Curves and a table for each benchmark and temperature."""
    parts = []
    for group in grouped(rows):
        lines = by_method(group)
        if lines:
            drawings = [
                card("Tokens per second", "All prompts of a batch together.",
                     _chart(lines, colours, "tokens_per_s", "tokens/s")),
                card("Speed-up", "Over the verifier alone at the same batch size. Whiskers: 95% confidence interval.",
                     _chart(lines, colours, "speedup", f"speed-up ({TIMES})")),
            ]  # fmt: skip
            heading = f'<h3 class="group">{escape(group_title(group[0]))}</h3>'
            parts.append(heading + cards(*drawings) + table(_HEAD, [_cells(row) for row in group], num_text=1))
    return section("Batch size", _LEAD, *parts) if parts else ""


_HEAD = ("method", "batch size", "tokens/s", "speed-up at this batch size", "over the verifier alone, one by one",
         "mean streak", "draft ms", "verify ms", "outputs as one by one")  # fmt: skip


def _cells(row: Row) -> str:
    check = row["lossless_check"]
    same = f"{check['identical']}/{check['checked']}" if check else number(None, 0)
    cells = [
        escape(method_label(row["method"])),
        str(row["batch_size"]),
        number(row["tokens_per_s"], 1),
        *(
            number(row[key], 2, TIMES) + (f"<small>{interval(row[f'{key}_ci'])}</small>" if row[f"{key}_ci"] else "")
            for key in ("speedup", "gain_over_single")
        ),
        number(row["mean_streak"], 2),
        number(row["draft_ms"], 1),
        number(row["verify_ms"], 1),
        same,
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _chart(lines: dict[str, list[Row]], colours: dict[str, int], key: str, y_label: str) -> str:
    series = [
        Series(
            method_label(name),
            [row["batch_size"] for row in rows],
            [row[key] for row in rows],
            colours[name],
            intervals=[row.get(f"{key}_ci") for row in rows],
        )
        for name, rows in lines.items()
    ]
    options: dict[str, Any] = {"x_label": "prompts decoded at once", "y_label": y_label, "from_zero": True}
    if not any(one.points() for one in series):
        return '<p class="missing">No baseline in this run: no speed-up.</p>'
    return plots.line_chart(series, label=f"{key} by batch size", log_x=True, **options)
