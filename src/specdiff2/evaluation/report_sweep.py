"""The page of a sweep: what was measured over each swept setting, the merged table, jobs without a result.

Numbers are curves, two of them also a heat map, names are bars. Rows in, HTML out; reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.plots import Bar, Series
from specdiff2.evaluation.report_sections import colour_of
from specdiff2.evaluation.report_style import card, cards, missing, page, section, table
from specdiff2.evaluation.sweep_axes import Axis
from specdiff2.evaluation.sweep_heatmap import heat_map
from specdiff2.evaluation.sweep_jobs import SweepJob
from specdiff2.evaluation.sweep_table import is_training, table_cells
from specdiff2.evaluation.sweep_training import BEST, CURVES
from specdiff2.evaluation.table import TIMES, method_label

Row = dict[str, Any]
MAX_LINES = 9  # above this, a line shows the best of the other settings
_MAX_CELLS = 12  # columns or rows of a heat map


@dataclass(frozen=True, slots=True)
class _Quantity:
    """One measured number: its column, what a chart of it is called, and its axis."""

    name: str
    title: str
    label: str
    reference: float | None = None


_EVALUATED = (
    _Quantity("speedup", "Speed-up", f"speed-up over the verifier alone ({TIMES})", 1.0),
    _Quantity("tokens_per_s", "Tokens per second", "tokens/s"),  # only where no baseline was measured
    _Quantity("mean_streak", "Mean streak", "accepted draft tokens per round"),
)
_TRAINED = (
    _Quantity(BEST, "Best drafter", "highest held-out streak"),
    _Quantity("val/streak", "End of training", "expected streak on held-out windows"),
    _Quantity("probe/mean_streak", "Decoding probe at the end", "accepted draft tokens per round"),
)


def sweep_page(
    axes: Sequence[Axis], rows: Sequence[Row], failed: Sequence[SweepJob], notes: Sequence[str], *, grid: bool = False
) -> str:
    """The whole document; ``grid``: the rows are methods of one run, not jobs."""
    training = is_training(rows)
    body = [_over(axis, [other for other in axes if other is not axis], rows) for axis in axes]
    if not axes:
        body.append(section("Curves", "", missing("No setting differs between the jobs.")))
    body += [_together(*pair, rows) for pair in combinations([axis for axis in axes if axis.numbers], 2)]
    if training:
        body.append(_over_steps(axes, rows))
    body.append(_table(axes, rows, notes, "summary.json" if grid else "sweep.csv and sweep.parquet"))
    if failed:
        body.append(_failures(failed))
    finished = len({row["job"] for row in rows})
    subtitle = f"{finished} settings in one run" if grid else f"{finished} finished jobs"
    if failed:
        subtitle += f", {len(failed)} not finished"
    title = f"SpecDiff-2 {'training ' * training}{'grid' if grid else 'sweep'}"
    names = ", ".join(axis.key for axis in axes)
    return page(f"{title} over {names}" if axes else title, subtitle, body)


def _over(axis: Axis, others: Sequence[Axis], rows: Sequence[Row]) -> str:
    """Every quantity over one swept setting, one line per method and per value of the other settings."""
    parts = []
    for benchmark, group in _groups(axis, rows):
        drawings = [card(one.title, *_drawing(axis, others, group, one)) for one in _quantities(group)]
        parts += [f'<h3 class="group">{escape(benchmark)}</h3>'] * bool(benchmark) + [cards(*drawings)]
    lead = "Whiskers are 95% confidence intervals." if not is_training(rows) else ""
    return section(f"Over {axis.key}", lead, *(parts or [missing("No finished job with this setting.")]))


def _groups(axis: Axis, rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows that set the axis and have something to draw, by benchmark (an empty name for trainings)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row[axis.key] is not None and row.get("method") != BASELINE:
            groups.setdefault(row.get("benchmark", ""), []).append(row)
    return [(benchmark, group) for benchmark, group in groups.items() if _quantities(group)]


def _quantities(rows: Sequence[Row]) -> list[_Quantity]:
    """Those that some row has; the bare speed only in place of a speed-up."""
    known = [one for one in (*_EVALUATED, *_TRAINED) if any(row.get(one.name) is not None for row in rows)]
    return [one for one in known if one.name != "tokens_per_s" or known[0].name != "speedup"]


def _drawing(axis: Axis, others: Sequence[Axis], rows: Sequence[Row], quantity: _Quantity) -> tuple[str, str]:
    """(note, chart): lines over numbers, bars over names."""
    name, rows = quantity.name, [row for row in rows if row.get(quantity.name) is not None]
    with_method = len({row.get("method") for row in rows}) > 1
    marks = {_mark_name(row, others if axis.numbers else [axis, *others], with_method) for row in rows}
    note = ""
    if len(marks) > MAX_LINES and others:
        rows, others, note = _best_of_others(axis, rows, name), [], "Highest over the other settings."
    if axis.numbers is None:
        colours = colour_of([{"method": row.get("method")} for row in rows])
        bars = [
            Bar(_mark_name(row, [axis, *others], with_method), row[name], row.get(f"{name}_ci"),
                colours[row.get("method")])  # type: ignore[index]
            for row in rows
        ]  # fmt: skip
        label = f"{name} by {axis.key}"
        return note, plots.bar_chart(bars, label=label, x_label=quantity.label, reference=quantity.reference)
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: axis.number(row[axis.key])):
        lines.setdefault(_mark_name(row, others, with_method) or quantity.title, []).append(row)
    series = []
    for index, (line_name, points) in enumerate(lines.items()):
        xs, ys = [axis.number(row[axis.key]) for row in points], [row[name] for row in points]
        intervals = [row.get(f"{name}_ci") for row in points]
        series.append(Series(line_name, xs, ys, 1 + index % (plots.NUM_COLOURS - 1), intervals=intervals))
    ticks = sorted({x for one in series for x in one.x})
    return note, plots.line_chart(
        series, label=f"{name} over {axis.key}", x_label=axis.title, y_label=quantity.label, x_ticks=ticks,
        from_zero=True, log_x=axis.is_log,
    )  # fmt: skip


def _best_of_others(axis: Axis, rows: Sequence[Row], name: str) -> list[Row]:
    """For each method and value of the axis the row with the highest value."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (str(row.get("method")), str(row[axis.key]))
        if key not in best or row[name] > best[key][name]:
            best[key] = row
    return list(best.values())


def _mark_name(row: Row, settings: Sequence[Axis], with_method: bool) -> str:
    """Method and settings; the method is left out where the settings say enough."""
    extra = ", ".join(f"{axis.title}={axis.label(row[axis.key])}" for axis in settings if row[axis.key] is not None)
    name = method_label(row["method"]) if "method" in row else ""
    return ", ".join(part for part in (name if with_method or not extra else "", extra) if part)


def _together(first: Axis, second: Axis, rows: Sequence[Row]) -> str:
    """Heat maps over two numeric settings, per benchmark and method; the best of what else was swept."""
    parts = []
    for benchmark, group in _groups(first, rows):
        for method in dict.fromkeys(row.get("method") for row in group):
            chosen = [row for row in group if row.get("method") == method and row[second.key] is not None]
            maps = [_heat_card(first, second, chosen, one) for one in _quantities(chosen)]
            if any(maps):
                title = ", ".join(part for part in (benchmark, method_label(method) if method else "") if part)
                parts += [f'<h3 class="group">{escape(title)}</h3>', cards(*filter(None, maps))]
    if not parts:
        return ""
    return section(f"{first.key} and {second.key} together", "The frame marks the highest value.", *parts)


def _heat_card(first: Axis, second: Axis, rows: Sequence[Row], quantity: _Quantity) -> str:
    """Empty where the settings do not form a grid worth drawing."""
    cells: dict[tuple[float, float], float] = {}
    for row in rows:
        if row.get(quantity.name) is not None:
            key = (first.number(row[first.key]), second.number(row[second.key]))
            cells[key] = max(row[quantity.name], cells.get(key, row[quantity.name]))
    sizes = [len({key[axis] for key in cells}) for axis in (0, 1)]
    if min(sizes) < 2 or max(sizes) > _MAX_CELLS:
        return ""
    note = "Highest over the other settings." if len(cells) < len(rows) else ""
    label = f"{quantity.name} over {first.key} and {second.key}"
    return card(quantity.title, note, heat_map(cells, label=label, x_label=first.title, y_label=second.title))


def _over_steps(axes: Sequence[Axis], rows: Sequence[Row]) -> str:
    """The held-out streak while training, one line per job; the best ones where there are many."""
    shown = sorted(rows, key=lambda row: -(row.get(BEST) or 0.0))[:MAX_LINES]
    drawings = []
    for name in CURVES:
        series = [
            Series(_mark_name(row, axes, False) or f"job {row['job']}", *zip(*row["curves"][name], strict=True), colour)
            for colour, row in enumerate(shown, start=1)
            if row.get("curves", {}).get(name)
        ]
        if series:
            label = f"{name} over training steps"
            drawings.append(card(name, "", plots.line_chart(series, label=label, x_label="step", y_label=name)))
    lead = f"The {len(shown)} best of {len(rows)} runs." if len(shown) < len(rows) else ""
    return section("Over training", lead, cards(*drawings) if drawings else missing("No held-out metrics."))


def _table(axes: Sequence[Axis], rows: Sequence[Row], notes: Sequence[str], files: str) -> str:
    if not rows:
        return section("Table", "", missing("No finished job."))
    head, lines, num_text = table_cells(rows, axes)
    body = [
        "<tr>" + "".join(f"<td{' class=text' * (i < num_text)}>{escape(cell)}</td>" for i, cell in enumerate(line))
        + "</tr>"
        for line in lines
    ]  # fmt: skip
    lead = f"Everything that finished; the same numbers, and more, are in {files}."
    return section(
        "Table", lead, table(head, body, num_text), *(f'<p class="foot">{escape(note)}</p>' for note in notes)
    )


def _failures(failed: Sequence[SweepJob]) -> str:
    blocks = []
    for job in failed:
        settings = ", ".join(f"{key}={value}" for key, value in job.overrides.items())
        log = f"<details><summary>Traceback</summary><pre>{escape(job.traceback)}</pre></details>"
        reason = f'<p class="bad">{escape(f"It {job.why()}")}</p>'
        blocks.append(card(f"Job {job.name}", settings, reason + (log if job.traceback else "")))
    return section(
        "Jobs without a result", "Run the same command again with the same run_id to repeat only these.", *blocks
    )
