"""Claims judged on arms whose truth is known: confirmed, contradicted where turned round, not confirmed where equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from record_builder import baseline, record, write_manifest, write_run

from specdiff2.evaluation import claims
from specdiff2.evaluation.arms import Arm
from specdiff2.evaluation.claim_list import CLAIMS, Claim
from specdiff2.evaluation.claims import claims_table, judge, judge_spec, verdict_of, write_claims
from specdiff2.evaluation.compare import Comparison
from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

HARDNESS = (0, 1, 2, 3, 4)  # easy and hard prompts: far wider apart than the methods
GAMMA = 4


def records(method: str, strength: int) -> list[Record]:
    """Of ten rounds a prompt, strength + hardness accept everything, the others nothing."""
    found = []
    for index, hardness in enumerate(HARDNESS):
        passed = strength + hardness
        rounds = [(GAMMA, GAMMA, GAMMA + 1)] * passed + [(GAMMA, 0, 1)] * (10 - passed)
        found.append(record(method, f"p{index}", rounds))
    return found


def arm(label: str, strength: int) -> Arm:
    held = {("toy", one.prompt_id): one for one in records(label, strength)}
    return Arm(label, held, {key: baseline(key[1], 10) for key in held}, {"toy": {}})


# strengths by kind of test, in the order of the arms: as the claim says, turned round, and all alike
STRENGTHS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "order": ((5, 3, 1), (1, 3, 5)),
    "lead": ((5, 1, 3), (1, 5, 3)),
    "positions": ((4, 2), (2, 4)),
    "add_up": ((5, 3, 2, 0), (1, 3, 2, 0)),
    "interaction": ((5, 1, 2, 1), (2, 1, 5, 1)),
    "interior": ((1, 5, 3, 2), (5, 1, 3, 2)),
}


def arms_of(claim: Claim, strengths: Sequence[int]) -> dict[str, Arm]:
    roles = claim.roles or ("1", "2", "4", "8")
    return {role: arm(role, strength) for role, strength in zip(roles, strengths, strict=False)}


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_of_the_paper_follows_the_truth(name: str) -> None:
    claim = CLAIMS[name]
    says, turned = STRENGTHS[claim.kind]
    verdicts = [judge(claim, arms_of(claim, strengths))["verdict"] for strengths in (says, turned, (2, 2, 2, 2))]
    assert verdicts == [claims.CONFIRMED, claims.CONTRADICTED, claims.NOT_CONFIRMED]
    assert claim.sentence.endswith(".") and claim.source.startswith(("Figure", "Table"))


def check_verdicts(verdict: Callable[[Comparison], str]) -> None:
    made = Comparison("m", ("a", "b"), (1, -1), (2.0, 1.0), 1.0, (0.2, 1.8), 0.95, 0.0, 5)
    cases = {
        (0.2, 1.8): "confirmed", (-0.1, 1.8): "not confirmed", (-1.8, -0.2): "contradicted",
        (0.0, 1.0): "not confirmed", None: "not confirmed",
    }  # fmt: skip
    for ci, expected in cases.items():
        assert verdict(replace(made, ci=ci)) == expected
    # the neutral value of a ratio is 1
    assert verdict(replace(made, ci=(0.2, 0.9), neutral=1.0)) == "contradicted"
    assert verdict(replace(made, ci=(0.9, 1.2), neutral=1.0)) == "not confirmed"


def test_verdicts_are_those_of_the_interval() -> None:
    check_verdicts(verdict_of)


@pytest.mark.parametrize(
    "planted",
    [
        lambda one: "confirmed" if (one.value or 0) > one.neutral else "contradicted",  # no interval
        lambda one: verdict_of(replace(one, ci=one.ci and (-one.ci[1], -one.ci[0]))),  # swapped sign
        lambda one: verdict_of(replace(one, neutral=0.0)),  # ratios against 0
    ],
)
def test_planted_verdicts_fail_the_same_check(planted: Callable[[Comparison], str]) -> None:
    with pytest.raises(AssertionError):
        check_verdicts(planted)


def test_numbers_behind_a_verdict() -> None:
    found = judge(CLAIMS["streak_order"], arms_of(CLAIMS["streak_order"], (5, 3, 1)))
    assert [check["check"] for check in found["checks"]] == ["streak - distillspec", "distillspec - base"]
    assert found["checks"][0]["value"] == pytest.approx(2 * GAMMA / 10)  # two more of ten rounds accept all
    assert found["checks"][0]["ci"] == pytest.approx((0.8, 0.8)) and found["checks"][0]["num_paired"] == 5
    added = judge(CLAIMS["alignments_add_up"], arms_of(CLAIMS["alignments_add_up"], (5, 3, 2, 0)))
    assert len(added["checks"]) == 2 and added["also"][0]["value"] == pytest.approx(0.0)
    # one of two comparisons on the wrong side is enough
    mixed = judge(CLAIMS["streak_order"], arms_of(CLAIMS["streak_order"], (5, 1, 3)))
    assert [check["verdict"] for check in mixed["checks"]] == ["confirmed", "contradicted"]
    assert mixed["verdict"] == "contradicted"


def test_positions_start_where_asked() -> None:
    claim = CLAIMS["later_positions"]
    found = judge(claim, arms_of(claim, (4, 2)))
    assert [check["check"] for check in found["checks"]] == ["@3", "@4"]
    early = judge(replace(claim, positions=(1,)), arms_of(claim, (4, 2)))
    assert [check["metric"] for check in early["checks"]] == ["survival@1"]


@pytest.mark.parametrize(
    ("changes", "roles"),
    [({}, ("streak", "base")), ({}, ("streak", "distillspec", "typo")), ({"kind": "typo"}, ("streak", "base")),
     ({"kind": "interior", "roles": None}, ("1", "2")), ({"kind": "add_up", "roles": None}, tuple("12345"))],
)  # fmt: skip
def test_wrong_arms_are_refused(changes: dict[str, Any], roles: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="claim 'streak_order'"):
        judge(replace(CLAIMS["streak_order"], **changes), {role: arm(role, 1) for role in roles})


# ---------------------------------------------------------------- specs
def write_runs(folder: Path) -> None:
    for name, methods in (("one", {"streak": 4, "distillspec": 3}), ("two", {"base": 1, "streak": 4})):
        made = [one for method, strength in methods.items() for one in records(method, strength)]
        write_run(folder / name, made + [baseline(f"p{i}", 10) for i in range(len(HARDNESS))])
        write_manifest(folder / name, ["autoregressive", *methods])


def write_spec(folder: Path, *entries: Mapping[str, Any], **spec: Any) -> Path:
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": list(entries), **spec}, sort_keys=False), encoding="utf-8")
    return path


def order(**changes: Any) -> dict[str, Any]:
    base = {"run": "two", "method": "base"}
    return {"id": "streak_order", "arms": {"streak": "streak", "distillspec": "distillspec", "base": base}, **changes}


def test_a_spec_is_judged_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # folders in a spec are meant as on a command line
    write_runs(tmp_path)
    own = {"id": "own", "sentence": "A|B.", "source": "here", "kind": "lead", "metric": "tau", "run": "two",
           "arms": {1: "streak", 2: "base"}, "benchmark": "toy"}  # fmt: skip
    path = write_spec(tmp_path, order(case="T=0", note="too few steps"), order(metric="speedup"), own, run="one")
    found = judge_spec(path)
    assert [one["verdict"] for one in found] == ["confirmed"] * 3
    assert [one["metric"] for one in found] == ["mean_streak", "speedup", "tau"]
    assert found[0]["arms"] == {"streak": "one:streak", "distillspec": "one:distillspec", "base": "two:base"}
    table = claims_table(found).splitlines()
    assert table[2].endswith("streak - distillspec +0.40 [0.40, 0.40]; distillspec - base +0.80 [0.80, 0.80]. "
                             "too few steps |")  # fmt: skip
    assert "| T=0 | **confirmed** |" in table[2] and "streak / distillspec 1." in table[3] and r"A\|B." in table[4]
    stored = json.loads(write_claims(found, tmp_path).read_text(encoding="utf-8"))
    assert stored["claims"] == json.loads(json.dumps(found, allow_nan=False)) and stored["bootstrap"]["paired"] is True


@pytest.mark.parametrize(
    ("entry", "error", "named"),
    [
        (order(typo=1), ConfigError, "typo"),
        ({"id": "own", "arms": {}}, ConfigError, "kind"),
        ({"id": "streak_order"}, ConfigError, "arms"),
        (order(arms={"streak": "typo", "distillspec": "distillspec", "base": "streak"}), ConfigError, "'typo'"),
        (order(arms={"streak": {"method": "streak", "job": 1}, "distillspec": "x", "base": "y"}), ConfigError, "arm"),
        (order(run="gone"), ConfigError, "gone"),
        (order(benchmark="other"), ConfigError, "'other'"),
    ],
)
def test_wrong_specs_are_refused(
    entry: dict[str, Any], error: type[Exception], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path)
    with pytest.raises(error, match=named):
        judge_spec(write_spec(tmp_path, entry, run="one"))


def test_damaged_specs_and_foreign_runs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path)
    write_manifest(tmp_path / "two", ["autoregressive", "base", "streak"], max_new_tokens=9)
    with pytest.raises(MismatchError, match="max_new_tokens"):
        judge_spec(write_spec(tmp_path, order(), run="one"))
    with pytest.raises(ConfigError, match="nothing else"):
        judge_spec(write_spec(tmp_path, order(), runs="one"))
    (tmp_path / "claims.yaml").write_text("claims: [", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="YAML"):
        judge_spec(tmp_path / "claims.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        judge_spec(tmp_path / "gone.yaml")
