"""Charts of the report as inline SVG: lines, bars with intervals, stacked bars.

Numbers in, text out; reads neither records nor models. Every mark carries its value as a hover title, every
series its name beside it, and shapes as well as colours tell series apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from specdiff2.evaluation import svg
from specdiff2.evaluation.svg import WIDTH, Frame

NUM_COLOURS = 6
FEW_OBSERVATIONS = 20
MANY_POINTS = 40  # above this a curve is drawn without markers, smoothed over its faint raw line
_LABEL_GAP = 16.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line. A None value leaves a gap. ``colour`` indexes the palette (0 is the neutral grey).

    ``counts``, where given, are the observations behind each point: points with fewer than
    ``FEW_OBSERVATIONS`` are drawn hollow.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    counts: Sequence[int] | None = None

    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar with an optional interval."""

    label: str
    value: float
    interval: Sequence[float] | None = None
    colour: int = 1


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One bar made of named parts, in the order of the legend."""

    label: str
    parts: dict[str, float] = field(default_factory=dict)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    integer_x: bool = False,
    x_ticks: Sequence[float] | None = None,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    height: float = 300,
) -> str:
    """Lines over a shared x axis, each named at its end; ``marks`` are labelled vertical lines.

    ``x_ticks`` labels just these values (thinned where they would collide); ``from_zero`` keeps 0 on the y axis.

    Raises:
        ValueError: no series has a point.
    """
    series = [one for one in series if one.points()]
    if not series:
        raise ValueError(f"chart {label!r} has no points")
    if y_range is None and from_zero:
        values = [y for one in series for _, y in one.points()]
        y_range = (min(0.0, *values), max(0.0, *values))
    frame, default_ticks, y_ticks = _line_frame(series, y_range, integer_x or x_ticks is not None, height)
    shown = default_ticks if x_ticks is None else _apart(x_ticks, frame)
    body = frame.axes(shown, y_ticks, x_label, y_label)
    for x, name in marks:
        side = "end" if frame.x(x) > (frame.left + frame.right) / 2 else "start"
        body.append(svg.line(frame.x(x), frame.top, frame.x(x), frame.bottom, "mark"))
        body.append(svg.text(frame.x(x) + (-6 if side == "end" else 6), frame.top + 12, name, "mark-label", side))
    for one in series:
        body += _line_marks(frame, one)
    body += _end_labels(frame, series)
    return svg.document(body, height, label)


def _line_frame(
    series: Sequence[Series], y_range: tuple[float, float] | None, integer_x: bool, height: float
) -> tuple[Frame, list[float], list[float]]:
    points = [point for one in series for point in one.points()]
    # positions without a value stay on the axis: a window does not get shorter because nobody got that far
    xs = [x for one in series for x in one.x] if integer_x else [x for x, _ in points]
    ys = [y for _, y in points]
    if y_range is None:
        # a flat zero line is as informative as the curve: keep it in view unless it is far away
        low, high = min(ys), max(ys)
        low, high = (0.0, high) if 0 < low < 0.5 * high else ((low, 0.0) if 0.5 * low < high < 0 else (low, high))
    else:
        low, high = y_range
    y_ticks = svg.nice_ticks(low, high, 5)
    x_ticks = svg.integer_ticks(int(min(xs)), int(max(xs))) if integer_x else svg.nice_ticks(min(xs), max(xs), 5)
    tick_step = y_ticks[1] - y_ticks[0]
    left = 14 + max(svg.text_width(svg.format_number(tick, tick_step)) for tick in y_ticks)
    label_width = min(max(svg.text_width(one.label) for one in series) + 18, 0.36 * WIDTH)
    if integer_x:
        pad = 0.04 * (max(xs) - min(xs)) or 0.5
        x_range = (min(xs) - pad, max(xs) + pad)
    else:
        x_range = (x_ticks[0], max(max(xs), x_ticks[0] + 1e-9))
        x_ticks = [tick for tick in x_ticks if tick <= x_range[1]]
    return Frame(left, WIDTH - label_width, 30, height - 52, x_range, (y_ticks[0], y_ticks[-1])), x_ticks, y_ticks


def _apart(ticks: Sequence[float], frame: Frame) -> list[float]:
    """Ticks whose labels have room, from the right (the largest value is the most telling)."""
    kept: list[float] = []
    for tick in sorted(ticks, reverse=True):
        if not kept or frame.x(kept[-1]) - frame.x(tick) > svg.text_width(f"{tick:g}") + 8:
            kept.append(tick)
    return kept[::-1]


def _line_marks(frame: Frame, one: Series) -> list[str]:
    points = one.points()
    if len(points) > MANY_POINTS:
        raw = _path(frame, one.x, one.y, f"s{one.colour} raw")
        smooth = _running_mean([y for _, y in points])
        return [raw, _path(frame, [x for x, _ in points], smooth, f"s{one.colour} line")]
    parts = [_path(frame, one.x, one.y, f"s{one.colour} line")]
    for index, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        if y is None:
            continue
        count = one.counts[index] if one.counts is not None else FEW_OBSERVATIONS
        hover = f"{one.label}: {svg.format_number(y)} at {svg.format_number(x)}"
        hover += f", from {count} observations" if one.counts is not None else ""
        parts.append(_marker(frame.x(x), frame.y(y), one.colour, hover, hollow=count < FEW_OBSERVATIONS))
    return parts


def _path(frame: Frame, xs: Sequence[float], ys: Sequence[float | None], css: str) -> str:
    """A polyline that starts anew after every gap."""
    steps, pen_down = [], False
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            pen_down = False
            continue
        clipped = min(max(y, frame.y_range[0]), frame.y_range[1])
        steps.append(f"{'L' if pen_down else 'M'}{frame.x(x):.1f},{frame.y(clipped):.1f}")
        pen_down = True
    return f'<path d="{" ".join(steps)}" class="{css}"/>'


def _marker(x: float, y: float, colour: int, hover: str, *, hollow: bool = False) -> str:
    """Circle, square, triangle or diamond by colour, so that colour is never the only difference."""
    title = f"<title>{escape(hover)}</title>"
    css = f"s{colour} hollow" if hollow else f"f{colour} point"
    shape = colour % 4
    if shape == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" class="{css}">{title}</circle>'
    outlines: dict[int, list[tuple[float, float]]] = {
        0: [(-4.5, 0), (0, -4.5), (4.5, 0), (0, 4.5)],
        2: [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        3: [(0, -5), (4.8, 4), (-4.8, 4)],
    }
    outline = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in outlines[shape])
    return f'<polygon points="{outline}" class="{css}">{title}</polygon>'


def _end_labels(frame: Frame, series: Sequence[Series]) -> list[str]:
    """Names at the right ends, moved apart where they would overlap, with a leader where they moved."""
    ends = []
    for one in series:
        points = one.points()
        values = _running_mean([y for _, y in points]) if len(points) > MANY_POINTS else [y for _, y in points]
        ends.append((frame.y(values[-1]), frame.x(points[-1][0]), one))
    ends.sort(key=lambda end: end[0])
    heights = spread([end[0] for end in ends], _LABEL_GAP, frame.top + 4, frame.bottom)
    parts, room = [], WIDTH - frame.right - 14
    for (y, x, one), label_y in zip(ends, heights, strict=True):
        if abs(label_y - y) > 3 or frame.right - x > 12:
            parts.append(svg.line(x + 7, y, frame.right + 11, label_y, f"s{one.colour} leader"))
        name = svg.shorten(one.label, room)
        parts.append(svg.text(frame.right + 14, label_y + 4.5, name, f"f{one.colour} name"))
    return parts


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending positions moved as little as needed to lie ``gap`` apart within ``low .. high``."""
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, moved[-1] + gap if moved else low))
    ceiling = high
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def _running_mean(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the curve."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def bar_chart(bars: Sequence[Bar], *, label: str, x_label: str, unit: str = "", reference: float | None = None) -> str:
    """Horizontal bars from 0, whiskers for intervals, the name above each bar and the value behind it.

    ``reference`` draws a vertical line (1.0 for a speed-up: no gain). Raises ValueError without bars.
    """
    if not bars:
        raise ValueError(f"chart {label!r} has no bars")
    row, top = 46.0, 8.0
    highest = max(max([bar.value, *(bar.interval or ())]) for bar in bars)
    ticks = svg.nice_ticks(0.0, max(highest, reference or 0.0), 5)
    frame = Frame(14, WIDTH - 72, top, top + row * len(bars), (0.0, ticks[-1]), (0.0, 1.0))
    body = _vertical_grid(frame, ticks, x_label)
    if reference is not None:
        body.append(svg.line(frame.x(reference), top, frame.x(reference), frame.bottom, "mark"))
    for index, bar in enumerate(bars):
        y = top + index * row
        middle, end = y + 31, frame.x(bar.value)
        shown = f"{bar.value:.2f}{unit}"
        hover = f"{bar.label}: {shown}" + (
            f", 95% CI {bar.interval[0]:.2f} to {bar.interval[1]:.2f}" if bar.interval else ""
        )
        body.append(svg.text(frame.left, y + 16, svg.shorten(bar.label, 0.8 * WIDTH), "name ink"))
        body.append(svg.rect(frame.left, middle - 9, end - frame.left, 18, f"f{bar.colour} bar", hover))
        if bar.interval:
            low, high = frame.x(bar.interval[0]), frame.x(bar.interval[1])
            for x1, y1, x2, y2 in ((low, 0, high, 0), (low, -5, low, 5), (high, -5, high, 5)):
                body.append(svg.line(x1, middle + y1, x2, middle + y2, "whisker"))
            end = max(end, high)
        body.append(svg.text(end + 8, middle + 5, shown, "value"))
    return svg.document(body, frame.bottom + 50, label)


def stacked_bars(bars: Sequence[StackedBar], *, label: str, x_label: str, unit: str, colours: Sequence[int]) -> str:
    """Horizontal bars of parts with a legend; parts wide enough carry their number, the total stands behind.

    Raises ValueError without bars.
    """
    if not bars:
        raise ValueError(f"chart {label!r} has no bars")
    row, top = 46.0, 34.0
    ticks = svg.nice_ticks(0.0, max(sum(bar.parts.values()) for bar in bars), 5)
    frame = Frame(14, WIDTH - 88, top, top + row * len(bars), (0.0, ticks[-1]), (0.0, 1.0))
    body = _legend(list(bars[0].parts), colours) + _vertical_grid(frame, ticks, x_label)
    for index, bar in enumerate(bars):
        y, start = top + index * row, 0.0
        body.append(svg.text(frame.left, y + 16, svg.shorten(bar.label, 0.8 * WIDTH), "name ink"))
        for (name, value), colour in zip(bar.parts.items(), colours, strict=True):
            left, width = frame.x(start), frame.x(start + value) - frame.x(start)
            body.append(svg.rect(left, y + 22, width, 18, f"f{colour} bar", f"{bar.label}, {name}: {value:.2f} {unit}"))
            inside = f"{value:.1f}"
            if svg.text_width(inside, 12) + 8 < width:
                body.append(svg.text(left + width / 2, y + 35.5, inside, "inside", "middle"))
            start += value
        body.append(svg.text(frame.x(start) + 8, y + 36, f"{start:.1f} {unit}", "value"))
    return svg.document(body, frame.bottom + 50, label)


def _vertical_grid(frame: Frame, ticks: Sequence[float], x_label: str) -> list[str]:
    step = ticks[1] - ticks[0]
    parts = []
    for tick in ticks:
        parts.append(svg.line(frame.x(tick), frame.top, frame.x(tick), frame.bottom, "grid"))
        parts.append(svg.text(frame.x(tick), frame.bottom + 18, svg.format_number(tick, step), "tick", "middle"))
    parts.append(svg.text((frame.left + frame.right) / 2, frame.bottom + 40, x_label, "axis-title", "middle"))
    return parts


def _legend(names: Sequence[str], colours: Sequence[int]) -> list[str]:
    parts, x = [], 14.0
    for name, colour in zip(names, colours, strict=True):
        parts.append(svg.rect(x, 6, 13, 13, f"f{colour}"))
        parts.append(svg.text(x + 19, 17, name, "name ink"))
        x += 19 + svg.text_width(name) + 22
    return parts
