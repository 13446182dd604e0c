"""Charts are well-formed SVG, hold their marks, and never draw NaN."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from specdiff2.evaluation import svg
from specdiff2.evaluation.plots import (
    NUM_COLOURS,
    Bar,
    Series,
    StackedBar,
    bar_chart,
    line_chart,
    spread,
    stacked_bars,
)
from specdiff2.evaluation.report_style import STYLE

NAMESPACE = "{http://www.w3.org/2000/svg}"
LABELS = {"label": "a chart", "x_label": "position j", "y_label": "rate"}


def parse(drawing: str) -> ElementTree.Element:
    root = ElementTree.fromstring(drawing)
    assert root.tag == f"{NAMESPACE}svg"
    assert root.get("role") == "img"
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', drawing)
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter(f"{NAMESPACE}text")]


def count(root: ElementTree.Element, tag: str, css: str) -> int:
    return sum(css in (node.get("class") or "").split() for node in root.iter(f"{NAMESPACE}{tag}"))


def test_line_chart_has_marks_axes_and_labels() -> None:
    root = parse(
        line_chart(
            [Series("before <1>", [1, 2, 3], [0.4, 0.3, None], 1), Series("after", [1, 2, 3], [0.7, 0.6, 0.5], 2)],
            y_range=(0.0, 1.0),
            integer_x=True,
            **LABELS,
        )
    )
    assert count(root, "circle", "point") == 2  # the gap has no mark
    assert count(root, "polygon", "point") == 3
    assert count(root, "path", "line") == 2
    written = texts(root)
    assert {"position j", "rate", "before <1>", "after", "1", "2", "3", "0.0", "1.0"} <= set(written)


def test_a_position_without_a_value_stays_on_the_axis() -> None:
    root = parse(line_chart([Series("a", [1, 2, 3], [0.5, 0.0, None])], integer_x=True, **LABELS))
    assert "3" in texts(root)
    assert count(root, "circle", "point") == 2


def test_line_breaks_at_a_gap() -> None:
    drawing = line_chart([Series("a", [1, 2, 3, 4], [0.1, None, 0.3, 0.4])], **LABELS)
    path = next(node for node in parse(drawing).iter(f"{NAMESPACE}path"))
    assert (path.get("d") or "").count("M") == 2


def test_few_observations_are_hollow() -> None:
    root = parse(line_chart([Series("a", [1, 2, 3], [0.1, 0.2, 0.3], 1, [100, 20, 19])], **LABELS))
    assert count(root, "circle", "point") == 2
    assert count(root, "circle", "hollow") == 1
    assert "from 19 observations" in "".join(root.itertext())


def test_a_line_stands_on_enough_observations_only() -> None:
    root = parse(line_chart([Series("a", [1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], 1, [99, 50, 5, 2])], **LABELS))
    paths = {node.get("class"): node.get("d") or "" for node in root.iter(f"{NAMESPACE}path")}
    assert paths["s1 line"].count("L") == 1 and paths["s1 raw"].count("L") == 3


def test_whiskers_are_drawn_within_a_range_that_holds_them() -> None:
    series = Series("a", [1, 2, 3], [0.5, 0.6, 0.7], 2, intervals=[[0.1, 0.9], None, [0.6, 1.4]])
    root = parse(line_chart([series], **LABELS))
    whiskers = [node for node in root.iter(f"{NAMESPACE}line") if "error" in (node.get("class") or "")]
    assert len(whiskers) == 2 * 3
    heights = [float(node.get(end) or 0) for node in whiskers for end in ("y1", "y2")]
    ticks = [float(text) for text in texts(root) if re.fullmatch(r"\d\.\d", text)]
    assert max(ticks) >= 1.4 and min(heights) >= 30 and max(heights) <= 300 - 52
    assert "95% CI 0.1 to 0.9" in "".join(root.itertext())


def test_logarithmic_axis_puts_equal_factors_equally_far_apart() -> None:
    root = parse(line_chart([Series("a", [1, 2, 4, 8], [1.0, 2.0, 3.0, 4.0])], log_x=True, **LABELS))
    places = [float(node.get("cx") or 0) for node in root.iter(f"{NAMESPACE}circle")]
    steps = [b - a for a, b in pairwise(places)]
    assert len(steps) == 3 and max(steps) == pytest.approx(min(steps), abs=0.2)
    assert {"1", "2", "4", "8"} <= set(texts(root))
    with pytest.raises(ValueError, match="logarithmic"):
        line_chart([Series("a", [0, 1], [1.0, 2.0])], log_x=True, **LABELS)


def heights_of(root: ElementTree.Element, content: str) -> list[float]:
    nodes = (node for node in root.iter(f"{NAMESPACE}text") if content in "".join(node.itertext()))
    return sorted(float(node.get("y") or 0) for node in nodes)


def test_long_names_are_listed_below_and_many_short_ones_get_room() -> None:
    long = [Series(f"a method with a long name, K={k}", [1, 2], [0.1 * k, 0.2], k % 10) for k in range(1, 15)]
    root = parse(line_chart(long, **LABELS))
    assert {one.label for one in long} <= set(texts(root))  # none is cut
    high = float((root.get("viewBox") or "").split()[3])
    placed = heights_of(root, "long name")
    assert min(placed) > 300 and max(placed) < high
    short = parse(line_chart([Series(f"K={k}", [1, 2], [0.3, 0.3], k % 10) for k in range(1, 25)], **LABELS))
    ends = heights_of(short, "K=")
    assert all(b - a > 12 for a, b in pairwise(ends)) and ends[0] > 0


def test_every_colour_has_a_look_of_its_own() -> None:
    root = parse(line_chart([Series(f"K={k}", [1, 2], [k, k], k) for k in range(NUM_COLOURS)], **LABELS))
    styles = {node.get("class") for node in root.iter() if "point" in (node.get("class") or "")}
    assert len(styles) == NUM_COLOURS
    assert all(f"svg .f{k}{{" in STYLE and f".s{k}{{" in STYLE and f".b{k}{{" in STYLE for k in range(NUM_COLOURS))
    assert STYLE.count(f"--c{NUM_COLOURS - 1}:#") == 2  # light and dark


def test_long_curve_is_smoothed_over_its_raw_line() -> None:
    steps = list(range(200))
    root = parse(line_chart([Series("loss", steps, [math.sin(s) for s in steps])], marks=[(100, "streak")], **LABELS))
    assert count(root, "path", "raw") == 1
    assert count(root, "path", "line") == 1
    assert count(root, "circle", "point") == 0
    assert count(root, "line", "mark") == 1
    assert "streak" in texts(root)


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e6, 3e6], [-3.0, -2.0]])
def test_line_chart_survives_any_range(values: list[float]) -> None:
    root = parse(line_chart([Series("a", list(range(len(values))), values)], **LABELS))
    assert count(root, "circle", "point") == len(values)


def test_marks_stay_inside_the_drawing() -> None:
    root = parse(line_chart([Series("a", [1, 4, 8], [1.0, 1.5, 2.0])], x_ticks=[1, 4, 8], from_zero=True, **LABELS))
    for node in root.iter(f"{NAMESPACE}circle"):
        assert 0 <= float(node.get("cx") or -1) <= svg.WIDTH
        assert 0 <= float(node.get("cy") or -1) <= 300
    assert {"1", "4", "8"} <= set(texts(root))


def test_bar_chart_with_whiskers() -> None:
    root = parse(
        bar_chart([Bar("base", 1.0, None, 0), Bar("a & b", 1.5, [1.4, 1.7], 1)], label="s", x_label="x", reference=1.0)
    )
    assert count(root, "rect", "bar") == 2
    assert count(root, "line", "whisker") == 3
    assert count(root, "line", "mark") == 1
    assert {"base", "a & b", "1.50"} <= set(texts(root))
    widths = [float(node.get("width") or 0) for node in root.iter(f"{NAMESPACE}rect")]
    assert widths[1] / widths[0] == pytest.approx(1.5, rel=0.01)


def test_stacked_bars() -> None:
    bars = [
        StackedBar("a", {"draft": 5.0, "verify": 30.0, "other": 0.5}),
        StackedBar("b", {"draft": 0.0, "verify": 30.0, "other": 0.0}),
    ]
    root = parse(stacked_bars(bars, label="s", x_label="ms", unit="ms", colours=(2, 1, 0)))
    assert count(root, "rect", "bar") == 6
    assert {"draft", "verify", "other", "35.5 ms", "30.0 ms"} <= set(texts(root))


def test_empty_charts_are_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        line_chart([Series("a", [1], [None])], **LABELS)
    with pytest.raises(ValueError, match="no bars"):
        bar_chart([], label="s", x_label="x")
    with pytest.raises(ValueError, match="finite"):
        svg.nice_ticks(0.0, math.nan)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 1.7), (-2.3, 0), (300, 600), (0.001, 0.0042), (0, 1e6), (3, 3)])
def test_ticks_are_few_even_and_cover(low: float, high: float) -> None:
    ticks = svg.nice_ticks(low, high)
    assert 3 <= len(ticks) <= 8
    assert ticks[0] <= low
    assert ticks[-1] >= high
    steps = [b - a for a, b in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps))
    labels = [svg.format_number(tick, steps[0]) for tick in ticks]
    assert len(set(labels)) == len(labels)
    assert all(len(label) <= 7 for label in labels)


def test_labels_are_spread_apart() -> None:
    moved = spread([100.0, 101.0, 102.0, 250.0], 16.0, 0.0, 255.0)
    assert all(b - a >= 16.0 for a, b in pairwise(moved))
    assert spread([10.0, 50.0], 16.0, 0.0, 100.0) == [10.0, 50.0]
    assert spread([99.0, 100.0], 16.0, 0.0, 100.0) == [84.0, 100.0]


def test_long_names_are_shortened() -> None:
    assert svg.shorten("abc", 500) == "abc"
    assert svg.shorten("a" * 100, 100).endswith("\N{HORIZONTAL ELLIPSIS}")
    assert svg.text_width(svg.shorten("a" * 100, 100)) <= 100
