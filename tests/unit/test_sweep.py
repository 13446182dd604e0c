"""Merging of a sweep's jobs: one table, nothing lost, failures listed (case 31's evaluation side)."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from record_builder import record, toy_records, write_run

from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.evaluation.sweep_jobs import parse_value
from specdiff2.types import ConfigError, CorruptFileError


def job(folder: Path, overrides: list[str], status: str | None = "done", error: str = "") -> Path:
    (folder / ".hydra").mkdir(parents=True)
    listed = "".join(f"- {entry}\n" for entry in overrides) or "[]\n"
    (folder / ".hydra" / "overrides.yaml").write_text(listed, encoding="utf-8")
    if status is not None:
        content = {"status": status, "overrides": overrides} | ({"error": error} if error else {})
        (folder / "status.json").write_text(json.dumps(content), encoding="utf-8")
    if status in (None, "done"):
        write_run(folder, toy_records())
    return folder


def test_merge_with_one_failed_and_one_killed_job(tmp_path: Path) -> None:
    for index, k in enumerate([1, 2, 4, 8, 16]):
        status = {1: "failed", 3: "running"}.get(index, "done")
        job(
            tmp_path / str(index), [f"sampler.K={k}", "seed=0"], status, "ConfigError: <b>bad</b>" if index == 1 else ""
        )
    (tmp_path / "1" / "traceback.txt").write_text("Traceback <here>\n", encoding="utf-8")
    result = merge_jobs(tmp_path)
    assert result.swept == ["sampler.K"]  # seed is the same in all jobs
    assert [one.name for one in result.failed] == ["1", "3"]
    assert len(result.rows) == 3 * 3
    assert {row["sampler.K"] for row in result.rows} == {1, 4, 16}

    table = str(result)
    assert "job 1 failed: ConfigError: <b>bad</b>" in table
    assert "job 3 did not finish" in table
    assert "sampler.K" in table.split("\n")[0]

    with (tmp_path / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert {"job", "sampler.K", "speedup", "speedup_ci_low", "speedup_ci_high", "mean_streak", "tau"} <= set(rows[0])

    text = (tmp_path / "sweep.json").read_text(encoding="utf-8")
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert [one["status"] for one in stored["jobs"]] == ["done", "failed", "done", "running", "done"]
    assert stored["rows"][0]["survival"] == []

    html = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 2  # speed-up and mean streak over K
    assert "Over sampler.K" in html
    assert "&lt;b&gt;bad&lt;/b&gt;" in html and "<b>bad</b>" not in html
    assert "Traceback &lt;here&gt;" in html
    assert not re.search(r"\bNone\b|\bnan\b", html)


def test_two_swept_variables_and_a_name(tmp_path: Path) -> None:
    for index, (k, sampler) in enumerate([(1, "greedy"), (1, "tree"), (4, "greedy"), (4, "tree")]):
        job(tmp_path / str(index), [f"sampler.K={k}", f"+sampler={sampler}"])
    result = merge_jobs(tmp_path)
    assert result.swept == ["sampler.K", "sampler"]
    html = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 4  # lines over K, bars over the name


def test_jobs_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "2"):
        job(tmp_path / name, [f"x={name}"])
    assert [row["x"] for row in merge_jobs(tmp_path).rows[::3]] == [2, 9, 10]


def test_merge_is_repeatable_and_leaves_no_scratch(tmp_path: Path) -> None:
    job(tmp_path / "0", ["x=1"])
    merge_jobs(tmp_path)
    first = (tmp_path / "sweep.csv").read_bytes()
    merge_jobs(tmp_path)
    assert (tmp_path / "sweep.csv").read_bytes() == first
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_job_does_not_lend_an_older_summary(tmp_path: Path) -> None:
    job(tmp_path / "0", ["x=1"])
    write_run(job(tmp_path / "1", ["x=2"], "failed"), toy_records())
    assert {row["x"] for row in merge_jobs(tmp_path).rows} == {1}


def test_without_status_files_a_summary_means_done(tmp_path: Path) -> None:
    job(tmp_path / "0", ["x=1"], status=None)
    assert len(merge_jobs(tmp_path).rows) == 3


def test_all_failed(tmp_path: Path) -> None:
    job(tmp_path / "0", ["x=1"], "failed")
    job(tmp_path / "1", ["x=2"], "failed")
    result = merge_jobs(tmp_path)
    assert result.rows == []
    assert "no finished job" in str(result)
    assert (tmp_path / "sweep.csv").exists()


def test_no_jobs_or_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no jobs"):
        merge_jobs(tmp_path)
    folder = job(tmp_path / "0", ["x=1"])
    (folder / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"summary\.json is not JSON"):
        merge_jobs(tmp_path)


def test_values() -> None:
    assert [parse_value(text) for text in ("3", "0.5", "a", "", None)] == [3, 0.5, "a", "", None]


def test_a_swept_key_named_like_a_result_hides_nothing(tmp_path: Path) -> None:
    for index, name in enumerate(["jsonl", "humaneval"]):
        job(tmp_path / str(index), [f"benchmark={name}", f"sampler.K={index + 1}"])
    result = merge_jobs(tmp_path)
    assert result.swept == ["override.benchmark", "sampler.K"]
    assert {(row["override.benchmark"], row["benchmark"]) for row in result.rows} == {
        ("jsonl", "toy"),
        ("humaneval", "toy"),
    }
    assert "humaneval" in str(result) and "override.benchmark" in (tmp_path / "sweep.csv").read_text(encoding="utf-8")


def test_the_lossless_note_stands_beside_both_tables(tmp_path: Path) -> None:
    job(tmp_path / "0", ["x=1"])
    note = "lossless check at T=0"
    assert note in str(merge_jobs(tmp_path)) and note in (tmp_path / "sweep.html").read_text(encoding="utf-8")
    (tmp_path / "0" / "records.jsonl").unlink()
    write_run(tmp_path / "0", [record(temperature=1.0)])
    assert note not in str(merge_jobs(tmp_path)) and note not in (tmp_path / "sweep.html").read_text(encoding="utf-8")
