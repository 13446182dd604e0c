"""Sections of the report about decoding: headline, curves by position, speed, stages, losslessness.

Summary rows in, HTML out. Whatever is missing is said, not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.plots import Bar, Series, StackedBar
from specdiff2.evaluation.report_style import card, cards, missing, section, table
from specdiff2.evaluation.table import DASH, TIMES, group_title, grouped, interval, method_label, number

Row = dict[str, Any]
_HEAD = (
    "method", "K", "gamma", "tokens/s", "speed-up", "speed-up (paper's protocol)", "mean streak", "tau",
    "draft ms", "verify ms", "other ms", "overhead",
)  # fmt: skip


def colour_of(rows: Sequence[Row]) -> dict[str, int]:
    """One colour per method throughout the report; the baseline is grey."""
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != BASELINE]
    colours = {name: 1 + index % (plots.NUM_COLOURS - 1) for index, name in enumerate(names)}
    return {BASELINE: 0, **colours}


def speculative(rows: Sequence[Row]) -> list[Row]:
    """Rows of methods that draft."""
    return [row for row in rows if row["accept_rate"]]


def tiles(rows: Sequence[Row]) -> str:
    """The few numbers a reader looks for first, over the first (benchmark, temperature)."""
    groups = grouped(rows)
    group = speculative(groups[0]) if groups else []
    if not group:
        return ""
    where = f" ({group[0]['benchmark']}, T={group[0]['temperature']:g})" if len(groups) > 1 else ""
    items = []
    fast = [row for row in group if row["speedup"] is not None]
    if fast:
        best = max(fast, key=lambda row: row["speedup"])
        ci = f", 95% CI {interval(best['speedup_ci'])}" if best["speedup_ci"] else ""
        items.append((number(best["speedup"], 2, TIMES), f"best speed-up: {method_label(best['method'])}{ci}{where}"))
    streaks = [row for row in group if row["mean_streak"] is not None]
    if streaks:
        best = max(streaks, key=lambda row: row["mean_streak"])
        items.append((number(best["mean_streak"], 2), f"longest mean streak: {method_label(best['method'])}{where}"))
        items.append((number(best["tau"], 2), "tokens per verifier pass (tau) of the same method"))
    checks = [row["lossless_check"] for row in rows if row["lossless_check"]]
    if checks:
        same, all_ = sum(c["identical"] for c in checks), sum(c["checked"] for c in checks)
        items.append((f"{same}/{all_}", "outputs token for token as the verifier alone, at temperature 0"))
    overheads = [row["overhead"] for row in group if row["overhead"] is not None]
    if overheads:
        items.append((f"{100 * max(overheads):.1f}%", "largest share of a round outside both models"))
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in items
    ) + "</div>"  # fmt: skip


def headline(rows: Sequence[Row], colours: dict[str, int]) -> str:
    """One table per benchmark and temperature."""
    parts = []
    for group in grouped(rows):
        fast = [row["speedup"] for row in speculative(group) if row["speedup"] is not None]
        graded = any(row.get("accuracy") for row in group)
        body = [_headline_row(row, colours, bool(fast) and row["speedup"] == max(fast), graded) for row in group]
        head = [*_HEAD, "accuracy"] if graded else _HEAD
        parts.append(group_heading(group) + table(head, body) + _wins(group))
    parts.append(
        '<p class="foot">Speed-up: pooled decoding tokens/s over the verifier alone on the same prompts and seeds, '
        "prefill apart; brackets: 95% confidence interval from resampling prompts. The mean streak does not count the "
        "bonus token, tau does. Milliseconds are per round.</p>"
    )
    return section("Results", "All methods decoded every prompt in turn, in the same run.", *parts)


def _wins(group: Sequence[Row]) -> str:
    """Which of several drafters the accepted tokens came from; empty where every method has one."""
    body = [
        f"<tr><td>{escape(method_label(row['method']))}</td><td class=text>{escape(name)}</td>"
        f"<td>{number(None if share is None else 100 * share, 1, '%')}</td><td>{row['drafter_rounds_won'][name]}</td>"
        f"<td>{row['drafter_accepted_tokens'][name]}</td></tr>"
        for row in group
        for name, share in row.get("drafter_win_share", {}).items()
    ]
    if not body:
        return ""
    note = "A drafter wins a round when all accepted tokens begin one of its drafts; a tie counts for everyone in it."
    head = ("method", "drafter", "share of rounds won", "rounds won", "accepted tokens in them")
    return table(head, body, num_text=2) + f'<p class="foot">{note}</p>'


def group_heading(group: Sequence[Row]) -> str:
    """Benchmark, temperature and number of prompts, above what follows."""
    return f'<h3 class="group">{escape(group_title(group[0]))}</h3>'


def _headline_row(row: Row, colours: dict[str, int], best: bool, graded: bool) -> str:
    name = f'<span class="swatch b{colours[row["method"]]}"></span>{escape(method_label(row["method"]))}'
    drafted = bool(row["accept_rate"])
    overhead = DASH if row["overhead"] is None else f"{100 * row['overhead']:.1f}%"
    cells = [
        name,
        str(row["num_drafts"]) if drafted else DASH,
        str(row["gamma"]) if drafted else DASH,
        number(row["tokens_per_s"], 1),
        _with_interval(number(row["speedup"], 2, TIMES), row["speedup_ci"]),
        _with_interval(number(row["speedup_paper"], 2, TIMES), row["speedup_paper_ci"]),
        _with_interval(number(row["mean_streak"], 2), row["mean_streak_ci"]) if drafted else DASH,
        number(row["tau"], 2),
        number(row["draft_ms"], 1) if drafted else DASH,
        number(row["verify_ms"], 1),
        number(row["other_ms"], 1),
        overhead,
    ]
    if graded:
        score = row.get("accuracy")
        cells.append(
            f"{100 * score['accuracy']:.0f}%<small>{score['correct']}/{score['graded']}</small>" if score else DASH
        )
    return f"<tr{' class=best' if best else ''}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _with_interval(value: str, bounds: Sequence[float] | None) -> str:
    return value + (f"<small>{interval(bounds)}</small>" if bounds else "")


def position_plots(rows: Sequence[Row], colours: dict[str, int]) -> str:
    """accept_rate@j and survival@j: two plots, since they are two things."""
    lead = "How far drafts are right, by position in the window. Hollow points rest on fewer than 20 rounds."
    parts = []
    for group in grouped(rows):
        drafting = speculative(group)
        if drafting:
            parts.append(
                group_heading(group)
                + cards(
                    card(
                        "accept_rate@j",
                        "Position j accepted, given that 1 to j-1 were.",
                        _by_position(drafting, colours, "accept_rate", "conditional acceptance rate"),
                    ),
                    card(
                        "survival@j",
                        "Positions 1 to j all accepted.",
                        _by_position(drafting, colours, "survival", "share of rounds"),
                    ),
                )
            )
    return section("Acceptance by position", lead, *(parts or [missing("No speculative method in these runs.")]))


def _by_position(rows: Sequence[Row], colours: dict[str, int], key: str, y_label: str) -> str:
    series = [
        Series(
            method_label(row["method"]),
            range(1, len(row[key]) + 1),
            row[key],
            colours[row["method"]],
            counts=row.get("num_reached"),
        )
        for row in rows
    ]
    if not any(one.points() for one in series):
        return missing("No drafted position was reached.")
    options = {"x_label": "position j in the draft window", "y_label": y_label, "integer_x": True}
    return plots.line_chart(series, label=f"{key} by position", y_range=(0.0, 1.0), **options)  # type: ignore[arg-type]


def speed_plots(rows: Sequence[Row], colours: dict[str, int]) -> str:
    """Speed-up with whiskers, and where the time of a round goes."""
    parts = []
    for group in grouped(rows):
        fast = [row for row in group if row["speedup"] is not None]
        bars = [Bar(method_label(r["method"]), r["speedup"], r["speedup_ci"], colours[r["method"]]) for r in fast]
        timed = [row for row in group if row["draft_ms"] is not None]
        stacks = [
            StackedBar(
                method_label(row["method"]),
                {"draft": row["draft_ms"], "verify": row["verify_ms"], "other": row["other_ms"]},
            )
            for row in timed
        ]
        parts.append(
            group_heading(group)
            + cards(
                card("Speed-up", "Whiskers: 95% confidence interval.", _speedup_bars(bars)),
                card("A round, by stage", "Drafting, verifying, and everything else.", _stage_bars(stacks)),
            )
        )
    return section("Speed", "Decoding only; prefill and warm-up are left out.", *parts)


def _speedup_bars(bars: Sequence[Bar]) -> str:
    if not bars:
        return missing("No baseline in this run: no speed-up.")
    x_label = f"speed-up over the verifier alone ({TIMES})"
    return plots.bar_chart(bars, label="speed-up per method", x_label=x_label, unit=TIMES, reference=1.0)


def _stage_bars(bars: Sequence[StackedBar]) -> str:
    if not bars:
        return missing("No rounds in this run.")
    x_label = "wall-clock time per round (ms)"
    return plots.stacked_bars(bars, label="stages of a round", x_label=x_label, unit="ms", colours=(2, 1, 0))


def comparisons(found: Sequence[dict[str, Any]]) -> str:
    """Paired differences of the mean streak between methods."""
    rows = []
    for one in found:
        apart = one["ci"] is not None and (one["ci"][0] > 0 or one["ci"][1] < 0)
        verdict = DASH if one["ci"] is None else ("apart from 0" if apart else "0 is inside")
        names = f"{method_label(one['from'])} → {method_label(one['to'])}"
        cells = [f"{one['benchmark']}, T={one['temperature']:g}", names, number(one["mean_streak_difference"], 3),
                 interval(one["ci"], 3), verdict]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td{' class=text' if i < 2 else ''}>{escape(cell)}</td>"
                                     for i, cell in enumerate(cells)) + "</tr>")  # fmt: skip
    if not rows:
        return ""
    head = ("benchmark", "from → to", "mean streak difference", "95% CI", "verdict")
    lead = "Difference of the mean streak over the same prompts, with an interval from resampling prompts in pairs."
    return section("Streak differences", lead, table(head, rows, num_text=2))


def losslessness(rows: Sequence[Row], explained: Sequence[dict[str, Any]]) -> str:
    """Token comparison at temperature 0, and what the verifier says about each divergence."""
    lead = "At temperature 0 every method must give the tokens of the verifier alone."
    checked = [row for row in rows if row["lossless_check"]]
    if not checked:
        note = "Nothing to compare: no run at temperature 0 with a baseline. Above 0 the law of the text is preserved, "
        return section(
            "Losslessness", lead, missing(note + "not its tokens; the exact tests of the package check the law.")
        )
    body = []
    for row in checked:
        check = row["lossless_check"]
        same = check["checked"] == check["identical"]
        state = '<span class="good">✓ identical</span>' if same else '<span class="bad">differs</span>'
        first = check["first_divergences"][0] if check["first_divergences"] else None
        where = f"prompt {first['prompt_id']}, token {first['position']}" if first else DASH
        gap = number(check.get("max_margin_ulp"), 1)
        body.append(
            f"<tr><td>{escape(method_label(row['method']))}</td><td class=text>{escape(row['benchmark'])}</td>"
            f"<td class=text>{escape(where)}</td><td>{check['checked']}</td><td>{check['identical']}</td>"
            f"<td>{state}</td><td>{gap}</td></tr>"
        )
    head = ("method", "benchmark", "first divergence", "outputs compared", "identical", "verdict",
            "largest gap of candidates, in spacings")  # fmt: skip
    return section("Losslessness", lead, table(head, body, num_text=3), *(_margins(one) for one in explained))


def _margins(found: dict[str, Any]) -> str:
    """Gap between the two candidates at each divergence, in spacings of the dtype."""
    dtype = escape(str(found.get("dtype")))
    if not found.get("divergences"):
        return f'<p class="foot">Checked against the verifier in {dtype}: no divergence to explain.</p>'
    body = []
    for one in found["divergences"]:
        cells = [method_label(one["method"]), str(one["prompt_id"]), str(one["position"]), number(one["margin"], 4),
                 number(one["margin_ulp"], 1), number(one["top2_margin"], 4)]  # fmt: skip
        body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = ("method", "prompt", "token", "gap of the two candidates", "in spacings", "top-2 gap")
    note = (
        f"Logit gaps from one plain full forward pass in {dtype}. A spacing is the distance between neighbouring "
        "numbers of that type at the logit's size: a gap of a few spacings is a near-tie that rounding decides; "
        "a large one would be a bug."
    )
    listed = f"<details><summary>All {len(body)} divergences</summary>{table(head, body)}</details>"
    return listed + f'<p class="foot">{note}</p>'
