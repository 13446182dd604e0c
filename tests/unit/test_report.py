"""The report: every section, self-contained, everything escaped, and notes where inputs are missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from record_builder import baseline, record, toy_records, training_run, write_run

from specdiff2.evaluation.report import write_report
from specdiff2.evaluation.report_inputs import find_stages, read_metrics
from specdiff2.evaluation.report_story import coloured_rounds
from specdiff2.types import ConfigError, CorruptFileError

SECTIONS = ["Results", "Acceptance by position", "Speed", "Streak differences", "Training", "Sample", "Losslessness",
            "Provenance", "Glossary"]  # fmt: skip
VOID = {"meta", "br", "img", "hr", "input", "link"}


class Checker(HTMLParser):
    """Fails on unbalanced tags; collects headings and text."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.stack:
            return
        self.text.append(data)
        if self.stack and self.stack[-1] == "h2":
            self.headings.append(data)


def check(path: Path) -> tuple[Checker, str]:
    html = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(html)
    assert checker.stack == []
    assert not re.search(r"\bNaN\b|\bnan\b|\bNone\b|\binf\b", "\n".join(checker.text))
    assert not re.search(r"<script|<link|<iframe|@import|url\(|src=", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    return checker, html


def test_full_report(tmp_path: Path) -> None:
    evaluation = write_run(tmp_path / "eval", toy_records(), machine="CPU <&> co")
    gap = {"margin": 0.03, "margin_ulp": 1.0, "top2_margin": 0.03}
    place = {"method": "specdiff2", "benchmark": "toy", "prompt_id": "<p>", "position": 3}
    explained = {"dtype": "bfloat16", "methods": [], "divergences": [place | gap]}
    (evaluation / "divergences.json").write_text(json.dumps(explained), encoding="utf-8")
    path = write_report([evaluation, training_run(tmp_path / "train")], tmp_path / "out" / "report.html")
    checker, html = check(path)
    assert checker.headings == SECTIONS
    assert html.count("<svg") == 2 + 2 + 6  # curves, speed, training
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    text = "".join(checker.text)
    for term in (
        "SpecDiff-2",
        "accept_rate@j",
        "survival@j",
        "tau",
        "CPU <&> co",
        "python train.py",
        "abc123",
        "float32",
    ):
        assert term in text, term
    assert "Training loss, ce" in text
    assert "Training loss, streak <2>" in text
    assert not list(path.parent.glob("*.partial"))


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    records = []
    for index in range(2):
        extra = {"pieces": [evil, "a", "b"], "prompt": evil, "text": evil, "benchmark": evil}
        records += [baseline(f"{evil}{index}", **extra), record(evil, f"{evil}{index}", tokens=[1, 2, 3], **extra)]
    folder = write_run(
        tmp_path / "eval", records, command=evil, machine=evil, config={"key": evil}, versions={evil: evil}
    )
    _, html = check(write_report(folder))
    assert "alert" in html
    assert evil not in html


def test_sample_colours_accepted_and_outlines_the_bonus() -> None:
    pieces = ["a", "<b", " c", "\n", "e"]
    html = coloured_rounds(record(rounds=[(4, 2, 3), (2, 2, 2)], pieces=pieces))
    assert html.count('class="round"') == 2
    assert '<span class="acc">a&lt;b</span><span class="bonus"> c</span>' in html
    assert html.count("bonus") == 1  # the second round was cut and has none
    assert "round 1: 2 of 4 drafted tokens accepted" in html


def test_evaluation_alone_says_what_is_missing(tmp_path: Path) -> None:
    checker, _ = check(write_report(write_run(tmp_path, toy_records())))
    assert checker.headings == SECTIONS
    assert "No training run given" in "".join(checker.text)


def test_training_alone(tmp_path: Path) -> None:
    checker, _ = check(write_report([training_run(tmp_path / "train")]))
    assert "Training" in checker.headings
    assert "No evaluation run given" in "".join(checker.text)


def test_sampled_run_without_baseline_or_texts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record(prompt_id=f"p{i}", temperature=1.0) for i in range(3)])
    checker, _ = check(write_report(folder))
    text = "".join(checker.text)
    assert "No baseline in this run" in text
    assert "No token texts" in text
    assert "Nothing to compare" in text


def test_zero_rounds(tmp_path: Path) -> None:
    check(write_report(write_run(tmp_path, [record(rounds=[], decode_s=0.0), baseline(num_tokens=0, decode_s=0.0)])))


def test_default_path_and_one_folder(tmp_path: Path) -> None:
    assert write_report(write_run(tmp_path, toy_records())) == tmp_path / "report.html"


def test_folders_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist"):
        write_report(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"neither summary\.json nor metrics\.csv"):
        write_report(tmp_path / "empty")
    (tmp_path / "empty" / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"summary\.json is not JSON"):
        write_report(tmp_path / "empty")


def test_metrics_are_read_sparse_and_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,note\n0,1.0,a\n1,nan,\n1,2.0,\n1,3.0,\n,9,\n2,inf,\n", encoding="utf-8")
    assert read_metrics(path) == {"loss": [(0.0, 1.0), (1.0, 3.0)]}
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="no column 'step'"):
        read_metrics(path)


def test_nested_metrics_are_found(tmp_path: Path) -> None:
    nested = tmp_path / "run" / "csv" / "version_0"
    nested.mkdir(parents=True)
    (nested / "metrics.csv").write_text("step,train/loss\n0,1.0\n1,0.5\n", encoding="utf-8")
    checker, _ = check(write_report(tmp_path / "run"))
    assert "Training loss" in "".join(checker.text)


def test_stages_are_found_in_a_configuration() -> None:
    config = {
        "a": [{"b": {"stages": [{"objective": {"_target_": "x.CrossEntropy"}, "steps": 300}, {"name": "streak"}]}}]
    }
    assert find_stages(config) == [("cross-entropy", 0), ("streak", 300)]
    schedule = {"main": {"_target_": "x.Streak"}, "warmup": {"_target_": "x.Mine"}, "warmup_steps": None}
    assert find_stages({"objective": {**schedule, "warmup_share": 0.25, "max_steps": 80}}) == [
        ("Mine", 0),
        ("streak-distillation", 20),
    ]
    assert find_stages({"objective": {**schedule, "warmup": None, "max_steps": 80}}) == [("streak-distillation", 0)]
    assert find_stages({}, [(0.0, 0.0), (1.0, 0.0), (5.0, 1.0)]) == [("stage 0", 0), ("stage 1", 5)]
    assert find_stages({"stages": "no list"}) == []
    assert find_stages(None) == []


def test_report_reads_files_only() -> None:
    """metrics, plots, report and sweep never import models, decoding or transformers."""
    import subprocess
    import sys

    code = (
        "import sys, specdiff2.evaluation.report, specdiff2.evaluation.sweep, specdiff2.evaluation.metrics\n"
        "bad = [n for n in sys.modules if n.startswith(('transformers', 'lightning', 'hydra', 'specdiff2.models', "
        "'specdiff2.decoding'))]\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_points_from_few_rounds_are_hollow(tmp_path: Path) -> None:
    def hollow(folder: str, num_prompts: int) -> int:
        html = write_report(write_run(tmp_path / folder, toy_records(num_prompts))).read_text(encoding="utf-8")
        return len(re.findall(r'class="s\d hollow"', html))

    assert hollow("few", 2) > hollow("many", 40)


def test_wins_of_several_drafters_are_a_table_of_their_own(tmp_path: Path) -> None:
    several = record("drafters", rounds=[(4, 2, 3), (4, 0, 1), (4, 1, 2)], num_drafts=3, drafters=["<best>", "drawn"])
    for one, winners in zip(several.rounds, ([0], [], [0, 1]), strict=True):
        one.winners = winners
    checker, html = check(write_report(write_run(tmp_path / "several", [baseline(num_tokens=6), several])))
    start = checker.text.index("share of rounds won")
    assert "".join(checker.text[start:]).count("Several drafters") >= 2
    cells = re.findall(r"<td>([^<]*)</td>", html[html.index("accepted tokens in them") :])[:8]
    assert cells == ["Several drafters", "66.7%", "2", "3", "Several drafters", "33.3%", "1", "1"]
    assert "&lt;best&gt;" in html and "<best>" not in html
    _, plain = check(write_report(write_run(tmp_path / "one", toy_records())))
    assert "share of rounds won" not in plain
