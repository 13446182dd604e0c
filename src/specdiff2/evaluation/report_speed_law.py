"""The speed law as a page and as Markdown: predicted over measured speed-ups, errors, and extrapolated gains.

Plain values of ``speed_law_check.check_runs`` (and ``runtime.speed_law_extrapolation``) in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specdiff2.evaluation import plots, svg
from specdiff2.evaluation.plots import Series
from specdiff2.evaluation.report_style import card, cards, missing, page, section, table
from specdiff2.evaluation.speed_law_check import SPLITS
from specdiff2.evaluation.svg import WIDTH, Frame
from specdiff2.evaluation.table import TIMES, interval, method_label, number

Row = dict[str, Any]
_TITLES = {
    "other_runs": "Costs from all other runs, acceptance from the run itself",
    "other_prompts": "Costs and acceptance from every second prompt, for the prompts between them",
    "shorter_windows": "Shorter windows from the longest one's acceptance, without decoding them",
}
_HEAD = ("run", "method", "benchmark", "T", "gamma", "K", "measured", "95% CI", "predicted", "error")
_NEEDED = ("hardware", "devices", "attention of the drafter", "K", "fits")
_MOST_KNOTS = 40  # of the drawn curve of the verifier


def speed_law_page(result: Row) -> str:
    """The whole document."""
    rows = [row for pool in result["pools"] for row in pool["rows"]]
    within = sum(row["within"] for row in rows)
    told = f"{within} of {len(rows)} predictions within {100 * result['tolerance']:g}% of the measured speed-up"
    return page("SpecDiff-2 speed law", told, speed_law_sections(result))


def speed_law_sections(result: Row) -> list[str]:
    """Its sections, for a page of more."""
    parts = []
    for pool in result["pools"]:
        key = pool["law"]["key"]
        where = (
            f"{key['machine']}, {key['dtype']}, {key['threads']} threads, {key['runtime']}, {len(pool['runs'])} runs"
        )
        for split in SPLITS:
            rows = [row for row in pool["rows"] if row["split"] == split]
            if rows:
                parts.append(_split(split, rows, where, result["tolerance"]))
        parts.append(_costs(pool["law"], where))
    if result["not_predicted"]:
        parts.append(_not_predicted(result["not_predicted"]))
    if result.get("extrapolation"):
        parts.append(_extrapolation(result["extrapolation"]))
    return parts


def speed_law_markdown(result: Row) -> str:
    """Tables for a terminal or a README."""
    blocks = []
    for pool in result["pools"]:
        for split in SPLITS:
            rows = [row for row in pool["rows"] if row["split"] == split]
            if rows:
                within = f"{sum(row['within'] for row in rows)} of {len(rows)} within {100 * result['tolerance']:g}%"
                notes = [f"- {_where(row)}: {'; '.join(row['reasons'])}" for row in rows if row["reasons"]]
                lines = _markdown(_HEAD, [_cells(row) for row in rows], 3)
                blocks.append(
                    "\n".join([f"**{_TITLES[split]}: {within}**", "", *lines, *([""] if notes else []), *notes])
                )
    if result["not_predicted"]:
        lines = [f"- {_where(row)}: {row['reason']}" for row in result["not_predicted"]]
        blocks.append("\n".join(["**Not predicted**", "", *lines]))
    found = result.get("extrapolation")
    if found:
        head, rows = _extrapolated_rows(found)
        notes = [f"- {text}" for text in found["assumptions"]]
        title = f"**{found['label'].upper()}, not measured: mean streak needed for the stated gains**"
        blocks.append("\n".join([title, "", *_markdown(head, rows, 3), "", *notes]))
    return "\n\n".join(blocks)


def scatter(rows: Sequence[Row], tolerance: float, label: str) -> str:
    """Predicted over measured speed-ups, the diagonal, and the band of ``tolerance`` around it."""
    values = [row[name] for row in rows for name in ("measured", "predicted")]
    ticks = svg.nice_ticks(0.0, max(values) * (1 + tolerance), 5)
    frame = Frame(46, WIDTH - 14, 30, 368, (0.0, ticks[-1]), (0.0, ticks[-1]))
    body = frame.axes(ticks, ticks, f"measured speed-up ({TIMES})", f"predicted speed-up ({TIMES})")
    for slope, css in ((1.0, "axis"), (1.0 + tolerance, "mark"), (1.0 - tolerance, "mark")):
        end = ticks[-1] / max(slope, 1.0)
        body.append(svg.line(frame.x(0), frame.y(0), frame.x(end), frame.y(end * slope), css))
    for row in rows:
        x, y = frame.x(row["measured"]), frame.y(row["predicted"])
        hover = f"{_where(row)}: {row['predicted']:.2f} predicted, {row['measured']:.2f} measured"
        css = "f1 point" if row["within"] else "s2 hollow"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.6" class="{css}"><title>{escape(hover)}</title></circle>')
    return svg.document(body, 420, label)


def _split(split: str, rows: Sequence[Row], where: str, tolerance: float) -> str:
    within = sum(row["within"] for row in rows)
    lead = f"{within} of {len(rows)} speed-ups within {100 * tolerance:g}%. {where}."
    note = f"Dashed: {100 * tolerance:g}% off. Hollow: outside."
    body = []
    for row in sorted(rows, key=lambda row: -abs(row["error"])):
        cells = [
            f"<td{' class=text' if index < 3 else ''}>{escape(cell)}</td>" for index, cell in enumerate(_cells(row))
        ]
        body.append("<tr>" + "".join(cells) + "</tr>")
    notes = [f'<p class="foot">{escape(_where(row))}: {escape("; ".join(row["reasons"]))}.</p>'
             for row in rows if row["reasons"]]  # fmt: skip
    drawing = card("Predicted and measured", note, scatter(rows, tolerance, f"speed law, {split}"))
    return section(_TITLES[split], lead, cards(drawing), table(_HEAD, body, num_text=3), *notes)


def _costs(law: Row, where: str) -> str:
    """The fitted costs: the verifier's curve, and the coefficients."""
    step = -(-len(law["nodes"]) // _MOST_KNOTS)
    kept = sorted({*range(0, len(law["nodes"]), step), len(law["nodes"]) - 1})
    series = Series("verify", [law["nodes"][i] for i in kept], [law["verify_ms"][i] for i in kept])
    curve = plots.line_chart(
        [series], label="verifier pass over nodes", x_label="nodes of the pass", y_label="ms", from_zero=True
    )
    body = []
    for kind in ("draft_ms", "other_ms"):
        for name, parts in law[kind].items():
            values = "".join(f"<td>{number(value, 3)} ms a {part}</td>" for part, value in parts.items())
            short = f"<code>{escape(name)}</code>"
            body.append(f"<tr><td class=text>{kind.removesuffix('_ms')}</td>{values}<td class=text>{short}</td></tr>")
    slope = f"{1e3 * law['context_ms_per_token']:.3f} ms for 1000 more tokens in the cache"
    note = f"At the mean load of its runs; {slope}."
    costs = table(("stage", "each pass or round", "each drawn token or node", "what it depends on"), body)
    return section("Fitted costs", where, cards(card("A pass of the verifier", note, curve)), costs)


def _not_predicted(rows: Sequence[Row]) -> str:
    body = [f"<tr><td>{escape(_where(row))}</td><td class=text>{escape(row['reason'])}</td></tr>" for row in rows]
    return section("Not predicted", "What the law says nothing about.", table(("what", "why"), body, num_text=2))


def _extrapolation(found: Row) -> str:
    """Lines over the mean streak for each hardware and attention, and the streaks that the stated gains need."""
    drawings = []
    for name in found["hardware"]:
        for attention in dict.fromkeys(row["attention"] for row in found["rows"]):
            rows = [row for row in found["rows"] if (row["hardware"], row["attention"]) == (name, attention)]
            if rows:
                drawings.append(
                    card(f"{found['hardware'][name]['name']}: {attention}", "Extrapolated.", _lines(rows, found))
                )
    head, cells = _extrapolated_rows(found)
    body = [
        "<tr>" + "".join(f"<td{' class=text' if i < 3 else ''}>{escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in cells
    ]
    notes = "".join(f'<p class="foot">{escape(text)}</p>' for text in found["assumptions"])
    lead = (
        "Nothing here was measured on this hardware: published bandwidth, arithmetic and model sizes, with the mean "
        "streak left open."
    )
    parts = [cards(*drawings) if drawings else missing("No hardware."), table(head, body, num_text=3), notes]
    return section("Extrapolated to larger models", lead, *parts)


def _lines(rows: Sequence[Row], found: Row) -> str:
    most = max(row["num_drafts"] for row in rows)
    series = []
    for colour, row in enumerate((row for row in rows if row["num_drafts"] == most), start=1):
        streaks, gains = ([one[key] for one in row["speedups"]] for key in ("streak", "speedup"))
        fits = "" if row["fits"] else " (too small)"
        series.append(Series(f"{row['num_devices']} devices{fits}", streaks, gains, 1 + (colour - 1) % 5))
    ends = [series[0].x[0], series[0].x[-1]]
    for name, gain in found["stated_gains"].items():
        series.append(Series(f"{name} {gain:g}{TIMES}", ends, [gain, gain], 0))
    return plots.line_chart(
        series, label="extrapolated speed-up over the mean streak", x_label="mean streak", from_zero=True,
        y_label=f"extrapolated speed-up ({TIMES}), K={most}", integer_x=True,
    )  # fmt: skip


def _extrapolated_rows(found: Row) -> tuple[list[str], list[list[str]]]:
    gains = found["stated_gains"]
    stages = ("step_ms", "draft_ms", "verify_ms")
    head = [*_NEEDED, *(f"{name.removesuffix('_ms')} ms" for name in stages)]
    head += [f"streak for {gain:g}{TIMES} ({name})" for name, gain in gains.items()]
    rows = []
    for row in found["rows"]:
        needed = [row["streak_needed"][name] for name in gains]
        rows.append([
            row["hardware"], str(row["num_devices"]), row["attention"], str(row["num_drafts"]),
            "yes" if row["fits"] else f"no, {row['memory_gib']:.0f} GiB", *(number(row[name], 1) for name in stages),
            *(f"above {row['gamma']}" if value is None else f"{value:.1f}" for value in needed),
        ])  # fmt: skip
    return head, rows


def _cells(row: Row) -> list[str]:
    return [
        row["run"], method_label(row["method"]), row["benchmark"], f"{row['temperature']:g}", str(row["gamma"]),
        str(row["num_drafts"]), number(row["measured"], 2, TIMES), interval(row["measured_ci"]),
        number(row["predicted"], 2, TIMES), f"{100 * row['error']:+.1f}%",
    ]  # fmt: skip


def _where(row: Row) -> str:
    parts = [row["run"], row.get("method"), row.get("benchmark"), row.get("split")]
    return ", ".join(part for part in parts if part)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], num_text: int) -> list[str]:
    rule = "|" + "|".join([" --- "] * num_text + [" ---: "] * (len(head) - num_text)) + "|"
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
