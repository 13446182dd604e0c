"""Marks of a line chart: the line with its gaps, markers by shape as well as colour, vertical whiskers, the key."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specdiff2.evaluation import svg
from specdiff2.evaluation.svg import Frame


def whisker(frame: Frame, x: float, interval: Sequence[float], colour: int) -> list[str]:
    """A vertical interval, cut at the edges of the plot."""
    low, high = (frame.y(min(max(end, frame.y_range[0]), frame.y_range[1])) for end in interval)
    middle = frame.x(x)
    strokes = ((0, low, 0, high), (-4, low, 4, low), (-4, high, 4, high))
    return [svg.line(middle + x1, y1, middle + x2, y2, f"s{colour} error") for x1, y1, x2, y2 in strokes]


def polyline(frame: Frame, xs: Sequence[float], ys: Sequence[float | None], css: str) -> str:
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


def marker(x: float, y: float, colour: int, hover: str, *, hollow: bool = False) -> str:
    """One of six shapes by colour, so that colour is never the only difference."""
    title = f"<title>{escape(hover)}</title>"
    css = f"s{colour} hollow" if hollow else f"f{colour} point"
    shape = colour % 6
    if shape == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" class="{css}">{title}</circle>'
    outlines: dict[int, list[tuple[float, float]]] = {
        0: [(-4.5, 0), (0, -4.5), (4.5, 0), (0, 4.5)],
        2: [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        3: [(0, -5), (4.8, 4), (-4.8, 4)],
        4: [(0, 5), (4.8, -4), (-4.8, -4)],
        5: [(-5, -2), (-2, -2), (-2, -5), (2, -5), (2, -2), (5, -2), (5, 2), (2, 2), (2, 5), (-2, 5), (-2, 2), (-5, 2)],
    }
    outline = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in outlines[shape])
    return f'<polygon points="{outline}" class="{css}">{title}</polygon>'


def key(names: Sequence[tuple[str, int]], top: float) -> tuple[list[str], float]:
    """(label, colour) of every line with its marker, in as many columns as fit; also returns the lower end."""
    widest = max(svg.text_width(label) for label, _ in names) + 40
    num_columns = max(1, int(svg.WIDTH // widest))
    parts, row = [], 20.0
    for index, (label, colour) in enumerate(names):
        x, y = (index % num_columns) * svg.WIDTH / num_columns, top + 12 + row * (index // num_columns)
        parts += [svg.line(x + 2, y, x + 24, y, f"s{colour} line"), marker(x + 13, y, colour, label)]
        parts.append(svg.text(x + 31, y + 4.5, svg.shorten(label, svg.WIDTH / num_columns - 33), "name ink"))
    return parts, y + row


def running_mean(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the curve."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
