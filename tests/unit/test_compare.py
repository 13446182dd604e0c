"""Paired comparisons against numbers worked out by hand; planted wrong versions must fail the same checks.

With two prompts a resample holds one of them twice or both once (1/4, 1/4, 1/2), so the 95 % interval reaches exactly
from the value of the one prompt to that of the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_builder import baseline, record, write_manifest, write_run

from specdiff2.evaluation.arms import Arm, read_run
from specdiff2.evaluation.bootstrap import BootstrapOptions, bootstrap_interval
from specdiff2.evaluation.compare import Comparison, contrast, interaction, lead, parse_metric, trend
from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

Contrast = Callable[[Sequence[Arm], Sequence[float], str], Comparison]


def streaks(method: str, accepted: Sequence[Sequence[int]], gamma: int = 8, **changes: Any) -> list[Record]:
    """One prompt per entry: a round per streak."""
    return [
        record(method, f"p{i}", [(gamma, a, a + 1) for a in one], prompt_ids=[i, 7], **changes)
        for i, one in enumerate(accepted)
    ]


def arm(label: str, accepted: Sequence[Sequence[int]], gamma: int = 8, **changes: Any) -> Arm:
    records = {("toy", one.prompt_id): one for one in streaks(label, accepted, gamma, **changes)}
    base = {key: baseline(key[1], 10, prompt_ids=one.prompt_ids) for key, one in records.items()}
    return Arm(label, records, base, {"toy": {"verifier": "v1"}})


# ---------------------------------------------------------------- the contrast itself
# easy and hard prompts, and exactly one accepted token a round between the two methods on every prompt
HARDNESS = [0, 0, 1, 1, 2, 3, 4, 5, 6, 6]
WORSE, BETTER = ([[h + gain] * 2 for h in HARDNESS] for gain in (0, 1))


def check_paired(compare: Contrast) -> None:
    found = compare([arm("better", BETTER), arm("worse", WORSE)], [1, -1], "mean_streak")
    assert found.value == pytest.approx(1.0)
    assert found.ci == pytest.approx((1.0, 1.0))  # prompts differ by up to 6, yet the difference never varies


def wrongly_paired(arms: Sequence[Arm], weights: Sequence[float], metric: str) -> Comparison:
    first, second = arms
    keys = list(second.records)
    turned = dict(zip(keys, [second.records[key] for key in keys[1:] + keys[:1]], strict=True))
    parsed = parse_metric(metric)
    columns = np.concatenate(
        [parsed.columns(first, keys), parsed.columns(replace(second, records=turned), keys)], axis=1
    )
    ci = bootstrap_interval(columns, lambda sums: parsed.value(sums[:, :2]) - parsed.value(sums[:, 2:]))
    return replace(contrast(arms, weights, metric), ci=ci)


def unpaired(arms: Sequence[Arm], weights: Sequence[float], metric: str) -> Comparison:
    parsed, generator = parse_metric(metric), np.random.default_rng(0)
    drawn = []
    for one in arms:
        columns = parsed.columns(one, list(one.records))
        picks = generator.integers(len(columns), size=(2000, len(columns)))
        drawn.append(parsed.value(columns[picks].sum(axis=1)))
    low, high = np.quantile(np.asarray(weights) @ np.stack(drawn), [0.025, 0.975])
    return replace(contrast(arms, weights, metric), ci=(float(low), float(high)))


def swapped(arms: Sequence[Arm], weights: Sequence[float], metric: str) -> Comparison:
    return contrast(arms, [-weight for weight in weights], metric)


def test_prompts_are_resampled_as_pairs() -> None:
    check_paired(contrast)


@pytest.mark.parametrize("planted", [wrongly_paired, unpaired, swapped])
def test_planted_errors_fail_the_same_check(planted: Contrast) -> None:
    with pytest.raises(AssertionError):
        check_paired(planted)


def test_pairs_are_found_by_id_not_by_order() -> None:
    worse = arm("worse", WORSE)
    turned = replace(worse, records=dict(reversed(worse.records.items())))
    check_paired(lambda arms, weights, metric: contrast([arms[0], turned], weights, metric))


def test_difference_by_hand() -> None:
    # first: (2 + 4) / 3 rounds, second: (1 + 0) / 2 rounds; prompt 0 alone 1 - 1, prompt 1 alone 4 - 0
    found = lead(arm("a", [[2, 0], [4]]), arm("b", [[1], [0]]), "mean_streak")
    assert found.values == (2.0, 0.5) and found.value == 1.5
    assert found.ci == (0.0, 4.0) and found.num_paired == 2 and found.neutral == 0.0
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["labels"] == ["a", "b"]
    assert lead(arm("a", [[2, 0], [4]]), arm("b", [[1], [0]]), "tau").value == 1.5


def test_interaction_by_hand() -> None:
    arms = [arm(name, [[x], [y]]) for name, x, y in (("both", 7, 5), ("first", 3, 3), ("second", 2, 1), ("no", 1, 1))]
    found = interaction(*arms, "mean_streak")
    assert found.value == (6 - 3) - (1.5 - 1)  # prompt 0 alone (7-3)-(2-1), prompt 1 alone (5-3)-(1-1)
    assert found.ci == (2.0, 3.0)
    swapped_sign = contrast(arms, [1, -1, 1, -1], "mean_streak")
    assert swapped_sign.value != found.value


def test_positions_by_hand() -> None:
    # a: streaks 0, 2, 3 of 3. reached 3, 2, 2; accepted 2, 2, 1
    a, b = arm("a", [[0, 2], [3]], gamma=3), arm("b", [[1, 1], [0]], gamma=3)
    rates = [lead(a, b, f"accept_rate@{j}").values for j in (1, 2, 3)]
    assert rates == [(2 / 3, 2 / 3), (1.0, 0.0), (0.5, None)]
    survival = [lead(a, b, f"survival@{j}") for j in (1, 2, 3)]
    assert [one.values for one in survival] == [(2 / 3, 2 / 3), (2 / 3, 0.0), (pytest.approx(1 / 3), 0.0)]
    # with prompt 0 alone b survives 1 with certainty and a with 1/2; with prompt 1 alone 0 and 1
    assert survival[0].value == 0.0 and survival[0].ci == (-0.5, 1.0)
    assert lead(a, b, "accept_rate@3").value is None and lead(a, b, "accept_rate@3").ci is None
    assert lead(a, b, "survival@4").values == (None, 0.0)  # nobody drafted a fourth one


def test_expected_accepted_corrects_for_cut_rounds() -> None:
    # drafted 4, accepted 2; and one round cut after its first token: reached 2, 1, 1, 0, accepted 2, 1, 0, 0
    cut = record("a", "p0", [(4, 2, 3), (1, 1, 1)])
    one = Arm("a", {("toy", "p0"): cut}, {}, {"toy": {}})
    assert contrast([one], [1], "expected_accepted").value == 2.0
    assert contrast([one], [1], "mean_streak").value == 1.5
    assert contrast([one], [1], "mean_streak").ci is None  # one prompt tells no spread
    full = arm("full", [[0, 2], [4]], gamma=4)
    assert contrast([full], [1], "expected_accepted").value == pytest.approx(2.0)  # without cuts: the mean streak
    told_nothing = arm("hf", [[], []])
    assert contrast([told_nothing], [1], "expected_accepted").value is None
    assert contrast([told_nothing], [1], "mean_streak").value is None


def test_speeds_are_ratios_against_the_own_baseline() -> None:
    fast = arm("fast", [[3, 3], [1, 1]], round_s=(0.0, 0.01, 0.0))
    slow_machine = replace(fast, label="slow", **{
        side: {key: replace(one, decode_s=2 * one.decode_s) for key, one in getattr(fast, side).items()}
        for side in ("records", "baseline")
    })  # fmt: skip
    found = lead(fast, slow_machine, "tokens_per_s")
    assert found.value == pytest.approx(2.0) and found.ci == pytest.approx((2.0, 2.0)) and found.neutral == 1.0
    assert lead(fast, slow_machine, "speedup").value == pytest.approx(1.0)
    # 12 tokens in 0.04 s against 20 in 0.62 s; prompt 0 alone 8 in 0.02, prompt 1 alone 4 in 0.02
    speed = contrast([fast], [1], "speedup")
    assert speed.value == pytest.approx((12 / 0.04) / (20 / 0.62))
    assert speed.ci == pytest.approx(tuple((n / 0.02) / (10 / 0.31) for n in (4, 8)))
    with pytest.raises(ConfigError, match="baseline"):
        lead(replace(fast, baseline={}), fast, "speedup")


def test_trend_names_the_best_and_widens_for_the_choice() -> None:
    arms = {str(k): arm(str(k), [[s], [s + 1], [s]]) for k, s in ((1, 1), (2, 4), (4, 3), (8, 0))}
    found = trend(arms, "mean_streak")
    assert found.best == "2" and list(found.leads) == ["1", "4", "8"]
    assert found.leads["4"].value == pytest.approx(1.0) and found.values["8"] == pytest.approx(1 / 3)
    assert found.leads["4"].confidence == pytest.approx(1 - 0.05 / 4)
    inner = trend(arms, "mean_streak", candidates=["2", "4"])
    assert list(inner.leads) == ["1", "8"] and inner.leads["8"].confidence == pytest.approx(1 - 0.05 / 2)
    with pytest.raises(ConfigError, match="none of"):
        trend({"hf": arm("hf", [[], []])}, "mean_streak")


def test_interval_follows_the_options() -> None:
    arms = [arm("a", [[h] for h in range(8)]), arm("b", [[h * h % 5] for h in range(8)])]
    wide, narrow = (contrast(arms, [1, -1], "mean_streak", BootstrapOptions(confidence=c)).ci for c in (0.99, 0.5))
    assert wide and narrow and wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize("name", ["streak", "survival", "survival@0", "survival@x", "mean_streak@2", ""])
def test_unknown_quantities_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="metric"):
        parse_metric(name)


# ---------------------------------------------------------------- what may be paired
def run(folder: Path, accepted: Sequence[Sequence[int]] = ((2, 1), (3, 0)), **changes: Any) -> Path:
    records = [
        *streaks("specdiff", accepted),
        *(baseline(f"p{i}", 6, prompt_ids=[i, 7]) for i in range(len(accepted))),
        record("specdiff", "p0", [(8, 8, 9)], warmup=True),
    ]
    machine = changes.pop("machine", "one")
    write_run(folder, records, machine=machine)
    write_manifest(folder, ["autoregressive", "specdiff"], **changes)
    return folder


def test_a_run_folder_becomes_arms(tmp_path: Path) -> None:
    found = read_run(run(tmp_path / "a"))
    one = found.arm("specdiff", "toy")
    assert one.label == "a:specdiff" and list(one.records) == [("toy", "p0"), ("toy", "p1")]
    assert contrast([one], [1], "mean_streak").value == 1.5  # without the warm-up
    assert contrast([found.arm("autoregressive")], [1], "speedup").value == pytest.approx(1.0)
    for method, benchmark in (("typo", None), ("specdiff", "other")):
        with pytest.raises(ConfigError, match="specdiff"):
            found.arm(method, benchmark)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"law": {"verifier": "v2"}}, "verifier"),
        ({"law": {"verifier_dtype": "bfloat16"}}, "verifier_dtype"),
        ({"law": {"temperature": 1.0}}, "temperature"),
        ({"max_new_tokens": 32}, "max_new_tokens"),
        ({"stop_strings": ["."]}, "stop_strings"),
        ({"seed": 1}, "seed"),
        ({"accepted": [(2, 1)]}, "1 are not in both"),
    ],
)
def test_what_differs_is_not_paired(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    first, second = read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", **changes))
    with pytest.raises(MismatchError, match=named):
        lead(first.arm("specdiff"), second.arm("specdiff"), "mean_streak")


def test_other_prompt_text_under_the_same_id_is_not_paired() -> None:
    first, second = arm("a", [[1], [2]]), arm("b", [[1], [2]])
    second.records["toy", "p1"].prompt_ids = [1, 8]
    with pytest.raises(MismatchError, match="text of prompt"):
        lead(first, second, "mean_streak")


@pytest.mark.parametrize("changes", [{"machine": "two"}, {"threads": 2}, {"law": {"verifier_runtime_mode": "packed"}}])
def test_only_speeds_need_the_same_machine(changes: dict[str, Any], tmp_path: Path) -> None:
    first, second = (read_run(run(tmp_path / name, **own)).arm("specdiff") for name, own in (("a", {}), ("b", changes)))
    assert lead(first, second, "mean_streak").value == 0.0
    for metric in ("speedup", "tokens_per_s"):
        with pytest.raises(MismatchError, match="cannot be paired"):
            lead(first, second, metric)


def test_damaged_runs_are_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    (folder / "records.jsonl").open("a").write(streaks("specdiff", [[1]])[0].to_json() + "\n")
    with pytest.raises(CorruptFileError, match="twice"):
        read_run(folder)
    write_manifest(folder, ["autoregressive"])
    with pytest.raises(CorruptFileError, match="settings"):
        read_run(folder)
    (folder / "benchmark.json").unlink()
    with pytest.raises(ConfigError, match=r"benchmark\.json"):
        read_run(folder)


def test_a_suite_keeps_the_settings_of_each_benchmark(tmp_path: Path) -> None:
    records = [*streaks("specdiff", [[1], [2]]), *streaks("specdiff", [[3], [4]], benchmark="other")]
    write_run(tmp_path, records)
    for name in ("toy", "other"):
        (tmp_path / "benchmarks" / name).mkdir(parents=True)
        write_manifest(tmp_path / "benchmarks" / name, ["specdiff"], benchmark=name)
    found = read_run(tmp_path)
    assert contrast([found.arm("specdiff", "other")], [1], "mean_streak").value == 3.5
    pooled = contrast([found.arm("specdiff")], [1], "mean_streak")
    assert pooled.value == 2.5 and pooled.num_paired == 4
