"""Charts of the report as inline SVG: lines, bars with intervals, stacked bars.

Numbers in, text out; reads neither records nor models. Every mark carries its value as a hover title, every
series its name beside it, and shapes as well as colours tell series apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdiff2.evaluation import line_marks, svg
from specdiff2.evaluation.svg import WIDTH, Frame

NUM_COLOURS = 10
FEW_OBSERVATIONS = 20
MANY_POINTS = 40  # above this a curve is drawn without markers, smoothed over its faint raw line
_LABEL_GAP = 16.0
_NAME_ROOM = 0.36 * WIDTH - 18  # of a name at the end of its line; longer ones are all listed below the chart


@dataclass(frozen=True, slots=True)
class Series:
    """One line. A None value leaves a gap. ``colour`` indexes the palette (0 is the neutral grey).

    ``counts``, where given, are the observations behind each point: points with fewer than
    ``FEW_OBSERVATIONS`` are drawn hollow. ``intervals``: a (low, high) whisker at each point, or None there.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    counts: Sequence[int] | None = None
    intervals: Sequence[Sequence[float] | None] | None = None

    def heights(self) -> list[float]:
        """All values on the y axis: points and both ends of their whiskers."""
        return [y for _, y in self.points()] + [end for one in self.intervals or () if one for end in one]

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
    log_x: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    height: float = 300,
) -> str:
    """Lines over a shared x axis, each named at its end or below; ``marks`` are labelled vertical lines.

    ``x_ticks`` labels just these values (thinned where they would collide); ``from_zero`` keeps 0 on the y axis;
    ``log_x`` makes the x axis logarithmic, labelled at the values that occur. Many series make the chart higher.

    Raises:
        ValueError: no series has a point, or a logarithmic axis has a value <= 0.
    """
    series = [one for one in series if one.points()]
    if not series:
        raise ValueError(f"chart {label!r} has no points")
    beside = _widest(series) <= _NAME_ROOM
    if beside:  # room for every name at its line's end
        height = max(height, 90 + _LABEL_GAP * len(series))
    if y_range is None and from_zero:
        values = [y for one in series for y in one.heights()]
        y_range = (min(0.0, *values), max(0.0, *values))
    frame, default_ticks, y_ticks = _line_frame(series, y_range, integer_x or x_ticks is not None, log_x, height)
    shown = default_ticks if x_ticks is None and not log_x else _apart(x_ticks or default_ticks, frame)
    body = frame.axes(shown, y_ticks, x_label, y_label)
    for x, name in marks:
        side = "end" if frame.x(x) > (frame.left + frame.right) / 2 else "start"
        body.append(svg.line(frame.x(x), frame.top, frame.x(x), frame.bottom, "mark"))
        body.append(svg.text(frame.x(x) + (-6 if side == "end" else 6), frame.top + 12, name, "mark-label", side))
    for one in series:
        body += _line_marks(frame, one)
    if beside:
        body += _end_labels(frame, series)
    else:
        listed, height = line_marks.key([(one.label, one.colour) for one in series], height)
        body += listed
    return svg.document(body, height, label)


def _widest(series: Sequence[Series]) -> float:
    """Room that the longest name needs."""
    return max(svg.text_width(one.label) for one in series) + 4


def _line_frame(
    series: Sequence[Series], y_range: tuple[float, float] | None, integer_x: bool, log_x: bool, height: float
) -> tuple[Frame, list[float], list[float]]:
    points = [point for one in series for point in one.points()]
    # positions without a value stay on the axis: a window does not get shorter because nobody got that far
    xs = [x for one in series for x in one.x] if integer_x else [x for x, _ in points]
    if y_range is None:
        ys = [y for one in series for y in one.heights()]
        # a flat zero line is as informative as the curve: keep it in view unless it is far away
        low, high = min(ys), max(ys)
        low, high = (0.0, high) if 0 < low < 0.5 * high else ((low, 0.0) if 0.5 * low < high < 0 else (low, high))
    else:
        low, high = y_range
    y_ticks = svg.nice_ticks(low, high, 5)
    tick_step = y_ticks[1] - y_ticks[0]
    left = 14 + max(svg.text_width(svg.format_number(tick, tick_step)) for tick in y_ticks)
    right = WIDTH - 14 - (_widest(series) if _widest(series) <= _NAME_ROOM else 0)
    x_ticks, x_range = _x_axis(xs, integer_x, log_x)
    frame = Frame(left, right, 30, height - 52, x_range, (y_ticks[0], y_ticks[-1]), log_x)
    return frame, x_ticks, y_ticks


def _x_axis(xs: Sequence[float], integer_x: bool, log_x: bool) -> tuple[list[float], tuple[float, float]]:
    """Ticks and range of the x axis, with some room beside the outer points."""
    low, high = min(xs), max(xs)
    if log_x:
        if low <= 0:
            raise ValueError(f"x={low!r} on a logarithmic axis: expected values > 0")
        pad = (high / low) ** 0.04 if high > low else 1.5
        return sorted(set(xs)), (low / pad, high * pad)
    if integer_x:
        pad = 0.04 * (high - low) or 0.5
        return svg.integer_ticks(int(low), int(high)), (low - pad, high + pad)
    ticks = svg.nice_ticks(low, high, 5)
    high = max(high, ticks[0] + 1e-9)
    return [tick for tick in ticks if tick <= high], (ticks[0], high)


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
        raw = line_marks.polyline(frame, one.x, one.y, f"s{one.colour} raw")
        smooth = line_marks.running_mean([y for _, y in points])
        return [raw, line_marks.polyline(frame, [x for x, _ in points], smooth, f"s{one.colour} line")]
    sure = one.y
    if one.counts is not None:  # the line itself stands on enough observations; what is left is drawn faintly
        sure = [y if n >= FEW_OBSERVATIONS else None for y, n in zip(one.y, one.counts, strict=True)]
    parts = [line_marks.polyline(frame, one.x, one.y, f"s{one.colour} raw")] if sure != one.y else []
    parts.append(line_marks.polyline(frame, one.x, sure, f"s{one.colour} line"))
    for index, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        if y is None:
            continue
        count = one.counts[index] if one.counts is not None else FEW_OBSERVATIONS
        hover = f"{one.label}: {svg.format_number(y)} at {svg.format_number(x)}"
        hover += f", from {count} observations" if one.counts is not None else ""
        interval = one.intervals[index] if one.intervals is not None else None
        if interval:
            hover += f", 95% CI {interval[0]:.3g} to {interval[1]:.3g}"
            parts += line_marks.whisker(frame, x, interval, one.colour)
        parts.append(line_marks.marker(frame.x(x), frame.y(y), one.colour, hover, hollow=count < FEW_OBSERVATIONS))
    return parts


def _end_labels(frame: Frame, series: Sequence[Series]) -> list[str]:
    """Names at the right ends, moved apart where they would overlap, with a leader where they moved."""
    ends = []
    for one in series:
        points = one.points()
        values = (
            line_marks.running_mean([y for _, y in points]) if len(points) > MANY_POINTS else [y for _, y in points]
        )
        ends.append((frame.y(values[-1]), frame.x(points[-1][0]), one))
    ends.sort(key=lambda end: end[0])
    heights = spread([end[0] for end in ends], _LABEL_GAP, frame.top + 4, frame.bottom)
    parts = []
    for (y, x, one), label_y in zip(ends, heights, strict=True):
        if abs(label_y - y) > 3 or frame.right - x > 12:
            parts.append(svg.line(x + 7, y, frame.right + 11, label_y, f"s{one.colour} leader"))
        parts.append(svg.text(frame.right + 14, label_y + 4.5, one.label, f"f{one.colour} name"))
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
