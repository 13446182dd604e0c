"""Cost tables: what they say between measurements, and that only the right file is believed."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RandomDrafter, Tab, tiny_verifier
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff2.decoding import cost_measure
from specdiff2.decoding.cost_measure import cost_key, measure_costs
from specdiff2.decoding.cost_table import CostKey, CostTable, differences, isotonic, load_or_measure
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.types import ConfigError, CorruptFileError, SamplingParams

KEY = CostKey("a machine", "verifier" * 4, "drafter" * 4, "bfloat16", 2, "eager")
TABLE = CostTable.from_medians(KEY, draft_s=0.01, other_s=0.002, verify_s={1: 0.04, 2: 0.042, 8: 0.05, 32: 0.062})


# ---------------------------------------------------------------- the numbers
def test_piecewise_linear_between_and_beyond() -> None:
    assert [TABLE.verify_seconds(n) for n in (1, 2, 8, 32)] == pytest.approx([0.04, 0.042, 0.05, 0.062])
    assert TABLE.verify_seconds(5) == pytest.approx(0.046)
    assert TABLE.verify_seconds(20) == pytest.approx(0.056)
    assert TABLE.verify_seconds(56) == pytest.approx(0.074)  # the last slope goes on


def test_a_round_scores_the_root_too() -> None:
    seconds = TABLE.round_s(7)
    assert seconds.dtype == torch.float64 and len(seconds) == 8
    assert seconds.tolist() == pytest.approx([0.012 + TABLE.verify_seconds(1 + n) for n in range(8)])


def test_isotonic_by_hand() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert isotonic([]) == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8))
def test_isotonic_is_the_nearest_rising_sequence(values: list[float]) -> None:
    fitted = isotonic(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fitted))
    distance = sum((a - b) ** 2 for a, b in zip(fitted, values, strict=True))
    for level in {*values, *fitted}:  # a nearest sequence cannot be improved by any step towards another rising one
        for start in range(len(values)):
            raised = [a if i < start else max(a, level) for i, a in enumerate(fitted)]
            lowered = [min(a, level) if i < start else a for i, a in enumerate(fitted)]
            for other in (raised, lowered):
                assert distance <= sum((a - b) ** 2 for a, b in zip(other, values, strict=True)) + 1e-9


def test_timings_that_fall_are_levelled() -> None:
    table = CostTable.from_medians(KEY, draft_s=0.0, other_s=0.0, verify_s={4: 0.05, 1: 0.03, 2: 0.06})
    assert table.node_counts == (1, 2, 4) and table.verify_s == pytest.approx((0.03, 0.055, 0.055))


# ---------------------------------------------------------------- the file
def measured_anew() -> CostTable:
    return replace(TABLE, draft_s=0.5)


def never() -> CostTable:
    raise AssertionError("measured although the file was good")


def test_saved_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "deep" / "costs"
    assert load_or_measure(folder, KEY, lambda: TABLE) == TABLE
    assert load_or_measure(folder, KEY, never) == TABLE
    assert [path.name for path in folder.iterdir()] == [KEY.file_name]
    assert not caplog.records


def test_without_a_folder_nothing_is_kept() -> None:
    assert load_or_measure(None, KEY, lambda: TABLE) == TABLE


OTHER: dict[str, Any] = {
    "machine": "another machine", "verifier": "v2", "drafter": "d2", "dtype": "float32", "threads": 8,
    "runtime": "compiled",
}  # fmt: skip


@pytest.mark.parametrize("changed", [field.name for field in fields(CostKey)])
def test_a_table_of_anything_else_is_rebuilt_aloud(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = replace(TABLE, key=replace(KEY, **{changed: OTHER[changed]}))
    foreign.save(tmp_path / KEY.file_name)
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tmp_path, KEY, measured_anew) == measured_anew()
    (record,) = caplog.records
    message = record.getMessage()
    assert f"{changed} (saved {OTHER[changed]!r}, here {getattr(KEY, changed)!r})" in message
    assert not any(f"{field.name} (saved" in message for field in fields(CostKey) if field.name != changed)
    assert load_or_measure(tmp_path, KEY, never) == measured_anew()


def test_differences_names_all_of_them() -> None:
    assert differences(KEY, KEY) == []
    assert len(differences(KEY, CostKey(**OTHER))) == len(fields(CostKey))


def damaged(**changes: Any) -> str:
    return json.dumps({"format": 1, **asdict(TABLE), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        damaged()[:-20],
        damaged(format=2),
        damaged(verify_s=[0.04, 0.042, 0.05]),
        damaged(verify_s=[0.04, 0.03, 0.05, 0.06]),
        damaged(verify_s=[0.04, 0.042, 0.05, math.nan]),
        damaged(verify_s=[0.0, 0.042, 0.05, 0.06]),
        damaged(node_counts=[1, 2, 2, 32]),
        damaged(node_counts=[2, 4, 8, 32]),
        damaged(draft_s=-1.0),
        damaged(draft_s="soon"),
        damaged(key={"machine": "a machine"}),
        damaged(key={**asdict(KEY), "threads": "2"}),
    ],
)
def test_a_damaged_file_is_rebuilt_aloud(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / KEY.file_name
    path.write_text(text)
    with pytest.raises(CorruptFileError, match=r"costs|json"):
        CostTable.load(path)
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tmp_path, KEY, measured_anew) == measured_anew()
    assert "no cost table" in caplog.text and str(path) in caplog.text
    assert load_or_measure(tmp_path, KEY, never) == measured_anew()


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / KEY.file_name
    TABLE.save(path)

    def refuse(source: Any, target: Any) -> None:
        raise OSError("disk says no")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk says no"):
        measured_anew().save(path)
    assert CostTable.load(path) == TABLE and [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "costs").write_text("a file, not a folder")
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(tmp_path / "costs", KEY, lambda: TABLE) == TABLE
    assert "cannot keep the cost table" in caplog.text


# ---------------------------------------------------------------- measuring
GREEDY = SamplingParams(temperature=0.0)


def test_measured_medians_of_scripted_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that charges what a node costs: the table must give those numbers back, warm-up left out."""
    charged: list[str] = []

    class Clock:
        def __init__(self, device: Any) -> None:
            self.laps = 0

        def lap(self) -> float:
            stage = ("start", "draft", "tree", "verify", "rest")[self.laps % 5]
            self.laps += 1
            charged.append(stage)
            seconds = {"start": 99.0, "draft": 0.1, "tree": 0.01, "rest": 0.02, "verify": 0.2}[stage]
            if stage == "verify":
                seconds += verifier.num_nodes / 100
            return seconds + (10.0 if len(charged) <= 15 else 0.0)  # the three rounds of the warm-up are slow

    class Counting(Tab):
        num_nodes = 0

        def start(self, prompt: Any, max_new_tokens: int) -> Any:
            session = super().start(prompt, max_new_tokens)
            score = session.score

            def counted(tree: Any) -> Any:
                self.num_nodes = tree.num_nodes
                return score(tree)

            session.score = counted
            return session

    verifier = Counting([1 / 8] * 8)
    monkeypatch.setattr(cost_measure, "Stopwatch", Clock)
    table = measure_costs(
        verifier, RandomDrafter(8, 3), 3, sampling=GREEDY, node_counts=(1, 4, 16), num_warmup=1, num_repeats=3
    )
    assert table.draft_s == pytest.approx(0.1) and table.other_s == pytest.approx(0.03)
    assert table.verify_s == pytest.approx((0.21, 0.24, 0.36))
    assert len(charged) == 4 * 3 * 5


def test_measured_on_real_sessions(tmp_path: Path) -> None:
    verifier = tiny_verifier(max_position_embeddings=64)  # a context shorter than the usual prompt
    table = measure_costs(
        verifier, RandomDrafter(64, 4), 4, sampling=GREEDY, node_counts=(1, 4, 40), num_warmup=1, num_repeats=1
    )
    assert min(table.verify_s) > 0 and table.draft_s >= 0 and table.other_s > 0
    table.save(tmp_path / "t.json")
    assert CostTable.load(tmp_path / "t.json") == table


def test_a_context_too_short_to_measure_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 12 tokens"):
        measure_costs(Tab([0.5, 0.5], max_length=12), RandomDrafter(2, 3), 3, sampling=GREEDY)


def test_the_key_says_what_the_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_verifier()
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4)
    key = cost_key(verifier, drafter, 4)
    assert key.verifier == verifier.fingerprint and key.dtype == "float32" and key.runtime == "eager"
    assert key.threads == torch.get_num_threads() and key.machine
    assert cost_key(verifier, drafter, 3).drafter != key.drafter
    assert cost_key(verifier, BlockDrafter.from_verifier(verifier, num_layers=2, gamma=4), 4).drafter != key.drafter
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)  # further training changes no cost
    assert cost_key(verifier, drafter, 4) == key
    monkeypatch.setattr(verifier, "num_packed", 3)
    assert cost_key(verifier, drafter, 4).runtime == "packed"
