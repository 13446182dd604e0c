"""Whatever is swept has an axis and a plot; trainings merge like evaluations; nothing is lost in Parquet."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from record_builder import record, toy_records, write_run

from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.evaluation.sweep_axes import make_axis
from specdiff2.evaluation.sweep_heatmap import heat_map
from specdiff2.evaluation.sweep_jobs import parse_value
from specdiff2.evaluation.sweep_table import write_parquet

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def job(folder: Path, *overrides: str, records: Any = None, seconds: tuple[float, float] | None = None) -> Path:
    """A finished evaluation that ran from ``seconds[0]`` to ``seconds[1]``."""
    write_run(folder, toy_records() if records is None else records)
    status: dict[str, Any] = {"status": "done", "overrides": list(overrides), "host": "here"}
    if seconds:
        times = [(START + timedelta(seconds=one)).isoformat() for one in seconds]
        status |= dict(zip(("started_at", "ended_at"), times, strict=True))
    (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    return folder


def training(folder: Path, *overrides: str, best: float = 2.0, publish: bool = False) -> Path:
    """A finished training of ten steps whose streak rises to ``best``."""
    drafter = folder / "drafter/best"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(
        json.dumps({"training": {"run": "x", "step": 10, "objective": "Streak()", "val/streak_greedy": best}}), "utf-8"
    )
    (folder / "metrics.csv").write_text(
        "step,train/loss,val/streak,val/streak_greedy,val/accept_rate@1,val/accept_rate@2\n"
        f"0,2.0,,,,\n0,,0.5,0.8,0.3,0.2\n10,1.5,,,,\n10,,1.25,{best},0.75,0.5\n",
        encoding="utf-8",
    )
    config = {"publish": publish, "paths": {"drafters": "out/drafters"}, "model_name": "tiny"}
    (folder / "run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    (folder / "status.json").write_text(json.dumps({"status": "done", "overrides": list(overrides)}), encoding="utf-8")
    return folder


def page(folder: Path) -> str:
    return (folder / "sweep.html").read_text(encoding="utf-8")


def test_numbers_names_folders_flags_and_lists_are_axes() -> None:
    assert make_axis("sampler.K", [1, 8, 1, None]).numbers == {"1": 1.0, "8": 8.0}
    assert make_axis("data.temperatures", [[0.0], [1.0]]).numbers == {"[0.0]": 0.0, "[1.0]": 1.0}
    assert make_axis("optimizer.lr", [1e-5, 1e-4, 1e-3]).is_log and not make_axis("sampler.K", [1, 2, 4, 8]).is_log
    assert make_axis("compile", [True, False]).labels == {"True": "true", "False": "false"}
    assert make_axis("compile", [True, False]).numbers is None
    mixed = make_axis("sampler.num_nodes", [8, "auto", "null"])
    assert mixed.numbers is None and mixed.label("null") == "null" and mixed.label(None) == ""
    steps = make_axis("drafter", [f"out/drafters/smollm2_steps/step-{n}/best" for n in (25, 100)])
    assert steps.title == "drafter step" and steps.label("out/drafters/smollm2_steps/step-25/best") == "step-25"
    assert steps.number("out/drafters/smollm2_steps/step-100/best") == 100
    folders = make_axis("drafter", ["out/a/best", "out/b/last", "shipped"])
    assert folders.numbers is None and list(folders.labels.values()) == ["a/best", "b/last", "shipped"]
    long = make_axis("x", ["a" * 50 + "1", "a" * 50 + "z"])
    assert max(map(len, long.labels.values())) <= 36 and len(set(long.labels.values())) == 2


def test_values_are_read_as_hydra_wrote_them() -> None:
    texts = ["1e-3", "nan", "inf", "null", "True", "[0.5]", "[a, 2]", "[]", "[{a: 1}]"]
    assert [parse_value(text) for text in texts] == [
        1e-3, "nan", "inf", "null", True, [0.5], ["a", 2], [], "[{a: 1}]",
    ]  # fmt: skip


def test_two_numbers_are_lines_with_whiskers_and_a_heat_map(tmp_path: Path) -> None:
    for index, (k, gamma) in enumerate([(1, 4), (1, 8), (2, 4), (2, 8)]):
        job(tmp_path / str(index), f"sampler.K={k}", f"sampler.gamma={gamma}")
    merge_jobs(tmp_path)
    html = page(tmp_path)
    assert "sampler.K and sampler.gamma together" in html
    # 2 settings x (speed-up, streak) as lines; a heat map of each for both of the two methods
    assert html.count("<svg") == 2 * 2 + 2 * 2
    assert html.count('class="f1 cell"') == 4 * 4
    assert ' error"' in html  # whiskers of the intervals


def test_names_are_bars_with_short_labels_and_many_lines_become_the_best(tmp_path: Path) -> None:
    for index in range(12):
        job(tmp_path / str(index), f"seed={index}", f"drafter=out/{'ab'[index % 2]}/best")
    merge_jobs(tmp_path)
    html = page(tmp_path)
    assert html.count("Highest over the other settings.") == 2  # the bars; over the seed there are four lines
    names = set(re.findall(r'class="name ink"[^>]*>([^<]+)<', html))
    assert names == {"SpecDiff, drafter=a", "SpecDiff, drafter=b", "SpecDiff-2, drafter=a", "SpecDiff-2, drafter=b"}


def test_without_a_baseline_the_speed_itself_is_drawn(tmp_path: Path) -> None:
    for index in range(2):
        job(tmp_path / str(index), f"sampler.K={index + 1}", records=[record()])
    merge_jobs(tmp_path)
    assert "Tokens per second" in page(tmp_path) and "Speed-up</h3>" not in page(tmp_path)


def test_heat_map_frames_the_best_cell() -> None:
    cells = {(1.0, 4.0): 1.0, (1.0, 8.0): 1.5, (2.0, 4.0): 2.0}
    drawing = heat_map(cells, label="speedup", x_label="K", y_label="gamma")
    assert drawing.count('class="f1 cell"') == 3 and drawing.count('class="s1"') == 1
    assert re.findall(r'fill-opacity="([\d.]+)"><rect [^>]*class="f1', drawing) == ["0.06", "0.31", "0.55"]
    assert "K=2, gamma=4: 2.000" in drawing
    with pytest.raises(ValueError, match="no cells"):
        heat_map({}, label="x", x_label="a", y_label="b")


def test_parquet_keeps_lists_objects_and_columns_of_several_types(tmp_path: Path) -> None:
    job(tmp_path / "0", "sampler.num_nodes=8", "seed=0")
    job(tmp_path / "1", "sampler.num_nodes=auto", "seed=1")
    merge_jobs(tmp_path)
    rows = pq.read_table(tmp_path / "sweep.parquet").to_pylist()
    stored = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))["rows"]
    assert [row["sampler.num_nodes"] for row in rows] == ["8"] * 3 + ["auto"] * 3  # one column has one type
    for mine, theirs in zip(rows, stored, strict=True):
        same = [key for key in theirs if key not in ("sampler.num_nodes", "accuracy", "lossless_check")]
        assert {key: mine[key] for key in same} == {key: theirs[key] for key in same}
    assert isinstance(rows[1]["survival"], list) and rows[1]["stop_reasons"]["length"] == 4
    write_parquet(tmp_path / "none.parquet", [])
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_trainings_are_merged_with_their_curves(tmp_path: Path) -> None:
    for index, rate in enumerate(["1e-4", "1e-3"]):
        training(tmp_path / str(index), f"optimizer.lr={rate}", best=2.0 + index, publish=True)
    result = merge_jobs(tmp_path)
    assert [row["best_streak"] for row in result.rows] == [2.0, 3.0] and result.rows[0]["val/streak"] == 1.25
    assert result.rows[0]["val/accept_rate"] == [0.75, 0.5] and result.rows[0]["trained_with"] == "Streak()"
    assert result.rows[0]["published"] == "out/drafters/tiny/best"
    assert "several jobs published" in str(result) and str(tmp_path / "1/drafter/best") in str(result)
    html = page(tmp_path)
    # best and final streak over the rate; both streaks over the steps
    assert "training sweep" in html and html.count("<svg") == 4 and "lr=0.0001" in html
    curves = pq.read_table(tmp_path / "sweep.parquet").to_pylist()[1]["curves"]
    assert curves["val/streak_greedy"] == [[0, 0.8], [10, 3]]
    assert "curves" not in (tmp_path / "sweep.csv").read_text(encoding="utf-8").split("\n")[0]


def test_planned_jobs_without_a_folder_are_listed(tmp_path: Path) -> None:
    job(tmp_path / "0", "sampler.K=1")
    plan = {"search": False, "jobs": {"0": ["sampler.K=1"], "1": ["sampler.K=2"]}}
    (tmp_path / "sweep_jobs.json").write_text(json.dumps(plan), encoding="utf-8")
    result = merge_jobs(tmp_path)
    assert [one.status for one in result.failed] == ["not started"] and result.swept == ["sampler.K"]
    assert "job 1 was not started" in str(result) and "It was not started" in page(tmp_path)


@pytest.mark.parametrize(("second", "together"), [((5.0, 9.0), True), ((10.0, 12.0), False)])
def test_speeds_of_jobs_at_the_same_time_are_not_comparable(
    tmp_path: Path, second: tuple[float, float], together: bool
) -> None:
    job(tmp_path / "0", "sampler.K=1", seconds=(0.0, 10.0))
    job(tmp_path / "1", "sampler.K=2", seconds=second)
    assert ("at the same time" in str(merge_jobs(tmp_path))) is together


def test_a_search_puts_the_best_setting_on_top(tmp_path: Path) -> None:
    slow, fast = ([record(round_s=(0.0, seconds, 0.0))] for seconds in (0.5, 0.25))
    job(tmp_path / "aa", "sampler.K=1", "run_id=x/y", records=slow)
    job(tmp_path / "bb", "sampler.K=2", "run_id=x/y", records=fast)
    (tmp_path / "sweep_jobs.json").write_text(json.dumps({"search": True, "jobs": {}}), encoding="utf-8")
    result = merge_jobs(tmp_path)
    assert [row["sampler.K"] for row in result.rows] == [2, 1]
    best = yaml.safe_load((tmp_path / "best.yaml").read_text(encoding="utf-8"))
    assert best == {
        "job": "bb",
        "tokens_per_s": 12.0,  # 3 tokens in one round of 0.25 s
        "overrides": ["sampler.K=2"],
        "command": "python eval.py sampler.K=2",
    }
