"""Reports in a real headless Chromium, wide and on a phone: silent, offline, every chart drawn, nothing in the way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser
from page_checks import check_page, num_byte_values
from record_builder import baseline, grid_run, record, toy_records, training_run, write_run

from specdiff2.evaluation.plots import Series, line_chart
from specdiff2.evaluation.records import Record
from specdiff2.evaluation.report import write_report
from specdiff2.evaluation.report_style import card, cards, page
from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.runtime.grid_page import write_grid_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def many_methods(num_methods: int, benchmark: str, temperature: float, num_prompts: int = 3) -> list[Record]:
    """A suite's worst page: long names, a window of 32, streaks of all lengths."""
    rng, records = random.Random(num_methods), []
    for index in range(num_prompts):
        place = {"prompt_id": f"p{index}", "benchmark": benchmark, "temperature": temperature}
        records.append(baseline(num_tokens=40, **place))
        for number in range(num_methods):
            rounds, left = [], 40
            while left:
                accepted = min(int(rng.expovariate(0.3)), 31, left - 1)
                rounds.append((32, accepted, accepted + 1))
                left -= accepted + 1
            records.append(record(f"specdiff2_K-{number + 1}_temperature-0.{number}", rounds=rounds, **place))
    return records


def look(browser: Browser, path: Path, num_charts: int, folder: Path, dark: bool = False) -> None:
    for width in WIDTHS:
        page_, found = check_page(browser, path, width, dark=dark)
        assert found == num_charts
        shot = page_.screenshot(folder / f"{path.stem}_{width}.png")
        assert num_byte_values(shot) > 100


@pytest.mark.parametrize("dark", [False, True])
def test_single_run_report(browser: Browser, tmp_path: Path, dark: bool) -> None:
    evaluation = write_run(tmp_path / "eval", toy_records(num_prompts=12))
    gap = {"margin": 0.03, "margin_ulp": 1.0, "top2_margin": 0.03}
    place = {"method": "specdiff2", "benchmark": "toy", "prompt_id": "gsm_symbolic/test/t95/2095000001", "position": 3}
    explained = {"dtype": "bfloat16", "methods": [], "divergences": [place | gap]}
    (evaluation / "divergences.json").write_text(json.dumps(explained), encoding="utf-8")
    path = write_report([evaluation, training_run(tmp_path / "train")])
    look(browser, path, 2 + 2 + 6, tmp_path, dark)


def test_report_of_many_methods_and_benchmarks(browser: Browser, tmp_path: Path) -> None:
    records = many_methods(14, "gsm_symbolic", 0.0) + many_methods(3, "humaneval", 1.0)
    look(browser, write_report(write_run(tmp_path / "eval", records)), 2 * (2 + 2), tmp_path)


def test_report_without_rounds(browser: Browser, tmp_path: Path) -> None:
    look(browser, write_report(write_run(tmp_path / "eval", [record(rounds=[], decode_s=0.0)])), 0, tmp_path)


def test_sweep_report(browser: Browser, tmp_path: Path) -> None:
    for index, (k, sampler) in enumerate((k, s) for k in (1, 8) for s in ("specdiff2", "tree_lookup", "traversal")):
        job = write_run(tmp_path / str(index), toy_records())
        overrides = [f"sampler.K={k}", f"sampler={sampler}"]
        (job / ".hydra").mkdir()
        (job / ".hydra" / "overrides.yaml").write_text("".join(f"- {one}\n" for one in overrides), encoding="utf-8")
        status = {"status": "done", "overrides": overrides}
        if index == 5:
            status |= {"status": "failed", "error": "ConfigError: " + "a long message without end " * 9}
        (job / "status.json").write_text(json.dumps(status), encoding="utf-8")
    merge_jobs(tmp_path)
    for width in WIDTHS:
        page_, num_charts = check_page(browser, tmp_path / "sweep.html", width)
        assert num_charts >= 4  # speed-up and streak over both settings
        assert num_byte_values(page_.screenshot(tmp_path / f"sweep_{width}.png")) > 100


def test_grid_page(browser: Browser, tmp_path: Path) -> None:
    look(browser, write_grid_page(grid_run(tmp_path)), 2 * 2 + 2, tmp_path)  # over K, over gamma, both together


def test_whiskers_and_logarithmic_axes_are_drawn(browser: Browser, tmp_path: Path) -> None:
    seconds = [1, 2, 4, 8, 15]
    series = [
        Series(name, seconds, [base + x / 40 for x in seconds], colour, None,
               [[base + x / 40 - 0.05, base + x / 40 + 0.05] for x in seconds])
        for colour, (name, base) in enumerate((("autoregressive", 0.1), ("specdiff2", 0.2), ("tree", 0.22)))
    ]  # fmt: skip
    chart = line_chart(series, label="accuracy", x_label="seconds", y_label="accuracy", log_x=True, x_ticks=seconds)
    path = tmp_path / "chart.html"
    path.write_text(
        page("Budget", "", [cards(card("Accuracy", "", chart), card("Again", "", chart))]), encoding="utf-8"
    )
    look(browser, path, 2, tmp_path)


FAULTS = {
    "no marks": '<svg viewBox="0 0 480 300" aria-label="a"><text x="5" y="20">x</text></svg>',
    "outside its drawing": '<svg viewBox="0 0 480 300" aria-label="a"><circle cx="500" cy="9" r="4"/></svg>',
    "texts on each other": '<svg viewBox="0 0 480 300" aria-label="a"><rect x="9" y="90" width="9" height="90"/>'
                           '<text x="5" y="20">speed-up</text><text x="25" y="22">streak</text></svg>',
    "wider than the window": '<div style="width:2000px">wide</div>',
    "text outside its box": '<div class="card" style="width:90px;white-space:nowrap">a line that does not fit</div>',
    "boxes on each other": '<div class="card">one</div><div class="card" style="margin-top:-40px">two</div>',
    "console: error: ['broken']": "<script>console.error('broken')</script>",
    "console: exception": "<script>absent()</script>",
    "request: http": '<img src="http://127.0.0.1:9/logo.png">',
}  # fmt: skip


@pytest.mark.parametrize("named", FAULTS)
def test_planted_faults_are_found(browser: Browser, tmp_path: Path, named: str) -> None:
    path = tmp_path / "bad.html"
    path.write_text(page("Bad", "", [FAULTS[named]]), encoding="utf-8")
    with pytest.raises(AssertionError, match="at 1280 pixels") as caught:
        check_page(browser, path, 1280)
    assert named in str(caught.value)


def test_blank_screenshots_are_told_from_drawn_ones(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "blank.html"
    path.write_text("<!DOCTYPE html><html><body></body></html>", encoding="utf-8")
    page_, num_charts = check_page(browser, path, 390)
    assert num_charts == 0 and num_byte_values(page_.screenshot(tmp_path / "blank.png")) < 20
