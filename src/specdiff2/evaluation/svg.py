"""Small building blocks of inline SVG charts: escaping, number formats, ticks, scales and the frame.

Colours come from CSS variables of the page (``report_style``), so one drawing serves light and dark mode.
Lengths are SVG user units; a chart is ``WIDTH`` wide and scales with its box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 480
FONT = 15  # the largest size the style sheet sets (on phones); room is kept for it everywhere
# widths of bold characters of a wide font (DejaVu Sans Bold) in font sizes: labels get room by these
_NARROW, _WIDE = (
    frozenset("ijltfr.,:;'|!()[] -_/"),
    frozenset("mwMW@%=+<>\N{MULTIPLICATION SIGN}\N{HORIZONTAL ELLIPSIS}"),
)


def text_width(text: str, size: float = FONT) -> float:
    """Estimated width of a line of text, rather too wide than too narrow."""
    return size * sum(0.5 if c in _NARROW else 1.05 if c in _WIDE else 0.8 if c.isupper() else 0.71 for c in text)


def shorten(text: str, max_width: float, size: float = FONT) -> str:
    """The text, cut with an ellipsis where it would not fit."""
    if text_width(text, size) <= max_width:
        return text
    kept = len(text)
    while kept > 1 and text_width(text[:kept], size) + 1.05 * size > max_width:
        kept -= 1
    return text[:kept].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Round tick positions (1, 2, 2.5 or 5 times a power of ten apart) that cover ``low .. high``."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"axis from {low!r} to {high!r}: expected finite numbers")
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(target, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def integer_ticks(low: int, high: int, target: int = 8) -> list[float]:
    """Whole numbers from ``low`` to ``high``, thinned to about ``target``."""
    step = max(1, math.ceil((high - low + 1) / target))
    return [float(value) for value in range(low, high + 1, step)]


def format_number(value: float, step: float | None = None) -> str:
    """Short decimal text: as many digits as ``step`` needs, thousands as ``12k``."""
    if abs(value) >= 10_000 and (step is None or step >= 100):
        return f"{value / 1000:g}k"
    if step is None:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{value:.{digits}f}"
    scaled = step * 10**digits
    if abs(scaled - round(scaled)) > 1e-6:  # steps of 2.5, 0.25 need one digit more
        text = f"{value:.{digits + 1}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start", extra: str = "") -> str:
    """A line of text, escaped."""
    classes = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{classes} text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def rect(x: float, y: float, width: float, height: float, css: str, title: str = "") -> str:
    """A bar; ``title`` shows on hover."""
    hover = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0):.1f}" height="{height:.1f}" rx="2"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{css}">{hover}</rect>'


def document(body: Sequence[str], height: float, label: str) -> str:
    """The whole drawing, described by ``label`` for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">' + "".join(body) + "</svg>"
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """Plot area in a drawing and the scales of its two axes; ``log_x`` makes the horizontal one logarithmic."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def axes(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> list[str]:
        """Horizontal grid lines, tick labels and both axis titles (the y title lies above the axis)."""
        parts = [text(0, 14, y_label, "axis-title")]
        step_y = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 1.0
        for tick in y_ticks:
            parts.append(line(self.left, self.y(tick), self.right, self.y(tick), "grid"))
            parts.append(text(self.left - 8, self.y(tick) + 4.5, format_number(tick, step_y), "tick", "end"))
        step_x = min((b - a for a, b in pairwise(x_ticks)), default=None)
        for tick in x_ticks:
            parts.append(line(self.x(tick), self.bottom, self.x(tick), self.bottom + 5, "axis"))
            parts.append(text(self.x(tick), self.bottom + 20, format_number(tick, step_x), "tick", "middle"))
        parts.append(line(self.left, self.bottom, self.right, self.bottom, "axis"))
        parts.append(text((self.left + self.right) / 2, self.bottom + 42, x_label, "axis-title", "middle"))
        return parts
