"""The cost model: its arithmetic, recorded runs of this repository, and published speeds of other programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdiff2.evaluation.cost_model import Pass, RoundCost, Speed, pass_seconds, standard_streaks
from specdiff2.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SPEED = ROOT / "experiments" / "006-speed"
TOLERANCE = 0.10
SECONDS = st.floats(1e-4, 1.0)
TAUS = st.floats(1.0, 17.0)


# ---------------------------------------------------------------- arithmetic
@given(TAUS, SECONDS)
def test_free_drafting_gains_tau(tau: float, pass_s: float) -> None:
    assert RoundCost(pass_s, 0.0, pass_s, 0.0).speedup(tau) == pytest.approx(tau)


@given(TAUS, SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from(["draft_s", "verify_s", "other_s"]))
def test_every_cost_lowers_the_speed_up(
    tau: float, base: float, draft: float, verify: float, other: float, name: str
) -> None:
    cost = RoundCost(base, draft, verify, other)
    dearer = dataclasses.replace(cost, **{name: getattr(cost, name) * 2})
    assert dearer.speedup(tau) < cost.speedup(tau)
    assert dearer.break_even_streak > cost.break_even_streak


@given(SECONDS, SECONDS, SECONDS)
def test_break_even_is_where_nothing_is_gained(base: float, draft: float, other: float) -> None:
    cost = RoundCost(base, draft, base, other)
    assert cost.speedup(cost.break_even_streak + 1.0) == pytest.approx(1.0)


def test_by_hand() -> None:
    cost = RoundCost(baseline_s=0.040, draft_s=0.010, verify_s=0.060, other_s=0.010)
    assert cost.round_s == pytest.approx(0.080)
    assert cost.speedup(4.0) == pytest.approx(2.0)
    assert cost.break_even_streak == pytest.approx(1.0)


@pytest.mark.parametrize("tau", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_round_commits_at_least_one_token(tau: float) -> None:
    with pytest.raises(ConfigError, match="tau="):
        RoundCost(1.0, 1.0, 1.0).speedup(tau)


def test_a_round_takes_time() -> None:
    with pytest.raises(ConfigError, match=r"0\.0 seconds"):
        RoundCost(1.0, 0.0, 0.0).speedup(2.0)


def test_standard_streaks_span_the_window() -> None:
    assert standard_streaks(16) == [0.0, 4.0, 8.0, 12.0, 16.0]
    assert standard_streaks(1) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_pass_takes_its_longest_part() -> None:
    speed = Speed(bandwidth=100.0, flops=1000.0, layer_overhead_s=0.5, all_reduce_s=0.01)
    assert pass_seconds(Pass(read_bytes=1000.0, flops=10.0, num_layers=2), speed) == pytest.approx(10.0)  # reading
    assert pass_seconds(Pass(10.0, 50_000.0, 2), speed) == pytest.approx(50.0)  # computing
    assert pass_seconds(Pass(10.0, 10.0, 2), speed) == pytest.approx(1.0)  # launching
    assert pass_seconds(Pass(1000.0, 10.0, 2, num_shards=4), speed) == pytest.approx(2.5 + 2 * 2 * 0.01)


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e6), st.integers(1, 8))
def test_more_devices_never_read_slower(read: float, flops: float, shards: int) -> None:
    speed = Speed(1e3, 1e4)
    alone = pass_seconds(Pass(read, flops, 4), speed)
    assert pass_seconds(Pass(read, flops, 4, shards), speed) == pytest.approx(alone / shards)


# ---------------------------------------------------------------- recorded runs
def recorded(name: str) -> list[dict[str, Any]]:
    return json.loads((SPEED / name).read_text(encoding="utf-8"))["rows"]


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row of the verifier alone, row of a method whose rounds were timed) per benchmark."""
    alone = {row["benchmark"]: row for row in rows if row["method"] == "autoregressive"}
    return [(alone[row["benchmark"]], row) for row in rows if row["verify_ms"] and row["method"] != "autoregressive"]


def cost_of(alone: dict[str, Any], row: dict[str, Any]) -> RoundCost:
    return RoundCost(*(ms / 1e3 for ms in (alone["verify_ms"], row["draft_ms"], row["verify_ms"], row["other_ms"])))


RECORDED = pairs(recorded("results.json")) + pairs(recorded("results_compiled.json"))


def test_there_are_recorded_runs() -> None:
    assert len(RECORDED) >= 7 and {row["benchmark"] for _, row in RECORDED} >= {"gsm_symbolic", "humaneval"}


@pytest.mark.parametrize(("alone", "row"), RECORDED, ids=[f"{row['method']}-{row['benchmark']}" for _, row in RECORDED])
def test_predicts_recorded_speed_ups(alone: dict[str, Any], row: dict[str, Any]) -> None:
    assert cost_of(alone, row).speedup(row["tau"]) == pytest.approx(row["speedup"], rel=TOLERANCE)


def test_wrong_formulas_miss_the_recorded_speed_ups() -> None:
    """The tolerance tells the formula from near misses: no bonus token, free drafts, a tree verified like one token."""

    def worst(predict: Any) -> float:
        return max(abs(predict(alone, row) / row["speedup"] - 1.0) for alone, row in RECORDED)

    def without(alone: dict[str, Any], row: dict[str, Any], **parts: float) -> float:
        return dataclasses.replace(cost_of(alone, row), **parts).speedup(row["tau"])

    assert worst(without) < TOLERANCE
    assert worst(lambda a, r: cost_of(a, r).speedup(max(r["tau"] - 1.0, 1.0))) > 2 * TOLERANCE
    assert worst(lambda a, r: without(a, r, draft_s=0.0)) > TOLERANCE
    assert worst(lambda a, r: without(a, r, verify_s=a["verify_ms"] / 1e3)) > TOLERANCE


def test_costs_of_one_benchmark_predict_another_from_its_streak_alone() -> None:
    """What preflight does: costs from one place, the mean streak from another."""
    rows = {(row["method"], row["benchmark"]): (alone, row) for alone, row in pairs(recorded("results.json"))}
    cost = cost_of(*rows["tree_lookup", "gsm_symbolic"])
    for benchmark in ("humaneval", "gsm8k_test"):
        _, row = rows["tree_lookup", benchmark]
        assert cost.speedup(row["tau"]) == pytest.approx(row["speedup"], rel=TOLERANCE)
