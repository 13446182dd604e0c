"""The page of a sweep: speed-up and mean streak over each swept number, the merged table, failed jobs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.plots import Bar, Series
from specdiff2.evaluation.report_sections import colour_of
from specdiff2.evaluation.report_style import card, cards, missing, page, section, table
from specdiff2.evaluation.table import TIMES, interval, lossless_note, method_label, number

Row = dict[str, Any]
Failed = tuple[str, dict[str, str], str, str]  # job, overrides, error, traceback
_QUANTITIES = (
    ("speedup", "Speed-up", f"speed-up over the verifier alone ({TIMES})"),
    ("mean_streak", "Mean streak", "accepted draft tokens per round"),
)


def sweep_page(swept: Sequence[str], rows: Sequence[Row], failed: Sequence[Failed]) -> str:
    """The whole document."""
    body = []
    colours = colour_of(rows)
    for key in swept:
        body.append(_over(key, rows, colours, others=[name for name in swept if name != key]))
    if not swept:
        body.append(section("Curves", "", missing("No setting differs between the jobs.")))
    body.append(_table(swept, rows))
    if failed:
        body.append(_failures(failed))
    finished = len({row["job"] for row in rows})
    subtitle = f"{finished} finished jobs" + (f", {len(failed)} not finished" if failed else "")
    return page("SpecDiff-2 sweep" + (f" over {', '.join(swept)}" if swept else ""), subtitle, body)


def _over(key: str, rows: Sequence[Row], colours: dict[str, int], others: Sequence[str]) -> str:
    """Both quantities over one swept setting; one line per method and per value of the other settings."""
    parts = []
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        drafting = [row for row in rows if row["benchmark"] == benchmark and row["accept_rate"]]
        drawings = [
            card(title, "", _drawing(key, drafting, colours, others, name, label)) for name, title, label in _QUANTITIES
        ]
        parts.append(f'<h3 class="group">{escape(benchmark)}</h3>' + cards(*drawings))
    lead = "Confidence intervals are in the table."
    return section(f"Over {key}", lead, *(parts or [missing("No finished job.")]))


def _drawing(
    key: str, rows: Sequence[Row], colours: dict[str, int], others: Sequence[str], name: str, label: str
) -> str:
    """Lines over a numeric setting, bars over any other."""
    rows = [row for row in rows if row[name] is not None]
    if not rows:
        return missing("No finished job with this number.")
    with_method = len({row["method"] for row in rows}) > 1
    if not all(isinstance(row[key], (int, float)) for row in rows):
        bars = [
            Bar(_line_name(row, [key, *others], with_method), row[name], row.get(f"{name}_ci"), colours[row["method"]])
            for row in rows
        ]
        return plots.bar_chart(
            bars, label=f"{name} by {key}", x_label=label, reference=1.0 if name == "speedup" else None
        )
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_line_name(row, others, with_method), []).append(row)
    # several lines of one method get colours of their own
    several = len(lines) > len({row["method"] for row in rows})
    series = []
    for index, (line_name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row[key])
        colour = 1 + index % (plots.NUM_COLOURS - 1) if several else colours[points[0]["method"]]
        series.append(Series(line_name, [row[key] for row in points], [row[name] for row in points], colour))
    ticks = sorted({float(row[key]) for row in rows})
    return plots.line_chart(
        series, label=f"{name} over {key}", x_label=key, y_label=label, x_ticks=ticks, from_zero=True
    )


def _line_name(row: Row, settings: Sequence[str], with_method: bool) -> str:
    """Method and settings; the method is left out where the settings say enough."""
    extra = ", ".join(f"{key.rsplit('.', 1)[-1]}={row[key]}" for key in settings)
    name = method_label(row["method"])
    return ", ".join(part for part in (name if with_method or not extra else "", extra) if part)


def _table(swept: Sequence[str], rows: Sequence[Row]) -> str:
    if not rows:
        return section("Table", "", missing("No finished job."))
    head = [
        *swept,
        "method",
        "benchmark",
        "tokens/s",
        "speed-up",
        "mean streak",
        "tau",
        "draft ms",
        "verify ms",
        "other ms",
    ]
    body = []
    for row in rows:
        texts = [
            *("" if row[key] is None else str(row[key]) for key in swept),
            method_label(row["method"]),
            row["benchmark"],
        ]
        ci = f"<small>{interval(row['speedup_ci'])}</small>" if row["speedup_ci"] else ""
        values = [
            number(row["tokens_per_s"], 1),
            number(row["speedup"], 2, TIMES) + ci,
            number(row["mean_streak"], 2),
            number(row["tau"], 2),
            *(number(row[f"{stage}_ms"], 1) for stage in ("draft", "verify", "other")),
        ]
        cells = [f"<td class=text>{escape(text)}</td>" for text in texts] + [f"<td>{value}</td>" for value in values]
        body.append("<tr>" + "".join(cells) + "</tr>")
    note = lossless_note(rows)
    return section(
        "Table",
        "All finished jobs; the same numbers are in sweep.csv.",
        table(head, body, num_text=len(swept) + 2),
        *([f'<p class="foot">{escape(note)}</p>'] if note else []),
    )


def _failures(failed: Sequence[Failed]) -> str:
    blocks = []
    for job, overrides, error, traceback in failed:
        settings = ", ".join(f"{key}={value}" for key, value in overrides.items())
        log = f"<details><summary>Traceback</summary><pre>{escape(traceback)}</pre></details>" if traceback else ""
        blocks.append(card(f"Job {job}", settings, f'<p class="bad">{escape(error or "It did not finish.")}</p>{log}'))
    return section(
        "Jobs without a result", "Run the same command again with the same run_id to repeat only these.", *blocks
    )
