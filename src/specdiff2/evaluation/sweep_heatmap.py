"""A heat map over two numeric settings as inline SVG: the deeper the colour the higher the value, the best one framed.

Numbers in, text out, like ``plots``.
"""

from __future__ import annotations

from collections.abc import Mapping

from specdiff2.evaluation import svg
from specdiff2.evaluation.svg import WIDTH, Frame

_LIGHTEST, _DEEPEST = 0.06, 0.55  # opacity of the blue: text stays legible on it in both colour modes
_ROW = 38.0


def heat_map(cells: Mapping[tuple[float, float], float], *, label: str, x_label: str, y_label: str) -> str:
    """``cells``: value by (x, y). Equal steps on both axes whatever the numbers; smallest y at the bottom.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError(f"heat map {label!r} has no cells")
    xs, ys = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    low, high = min(cells.values()), max(cells.values())
    left = 14 + max(svg.text_width(f"{y:g}") for y in ys)
    frame = Frame(left, WIDTH - 6.0, 28, 28 + _ROW * len(ys), (0, len(xs)), (0, len(ys)))
    body = [svg.text(0, 14, y_label, "axis-title")]
    width = (frame.right - frame.left) / len(xs)
    best = max(cells, key=lambda key: cells[key])
    for (x, y), value in cells.items():
        column, row = xs.index(x), ys.index(y)
        x_left, y_top = frame.x(column), frame.y(row + 1)
        share = (value - low) / (high - low) if high > low else 1.0
        hover = f"{x_label}={x:g}, {y_label}={y:g}: {value:.3f}"
        opacity = _LIGHTEST + share * (_DEEPEST - _LIGHTEST)
        body.append(f'<g fill-opacity="{opacity:.2f}">'
                    + svg.rect(x_left + 1, y_top + 1, width - 2, _ROW - 2, "f1 cell", hover) + "</g>")  # fmt: skip
        if (x, y) == best:
            body.append('<g fill-opacity="0" stroke-width="2">'
                        + svg.rect(x_left + 2, y_top + 2, width - 4, _ROW - 4, "s1") + "</g>")  # fmt: skip
        if svg.text_width("0.00", 13) < width:
            body.append(svg.text(x_left + width / 2, y_top + _ROW / 2 + 4.5, f"{value:.2f}", "value", "middle"))
    body += [svg.text(frame.left - 8, frame.y(row + 0.5) + 4.5, f"{y:g}", "tick", "end") for row, y in enumerate(ys)]
    body += [svg.text(frame.x(i + 0.5), frame.bottom + 18, f"{x:g}", "tick", "middle") for i, x in enumerate(xs)]
    body.append(svg.text((frame.left + frame.right) / 2, frame.bottom + 40, x_label, "axis-title", "middle"))
    return svg.document(body, frame.bottom + 52, label)
