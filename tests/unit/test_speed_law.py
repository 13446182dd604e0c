"""The speed law: recovered from records whose costs are known, exact where it can be enumerated, wrong when it is
planted wrong, and never fitted across machines."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from specdiff2.evaluation import speed_law_cases, speed_law_check
from specdiff2.evaluation.curves import position_curves
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter
from specdiff2.evaluation.report_speed_law import speed_law_page
from specdiff2.evaluation.speed_law import fit_costs, nonnegative_fit
from specdiff2.evaluation.speed_law_check import check_runs
from specdiff2.evaluation.speed_law_rounds import MeasuredRun, PoolKey, Way
from specdiff2.evaluation.speed_law_streaks import StreakLaw, judged_rounds, round_starts, rounds_by_window
from specdiff2.runtime.build import load_config
from specdiff2.runtime.speed_law import DEFAULTS, main, read_hardware_file
from specdiff2.runtime.speed_law_extrapolation import extrapolate
from specdiff2.runtime.speed_law_runs import find_runs, read_run
from specdiff2.runtime.speed_law_settings import SpeedLawSection
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, RoundRecord

CONF = Path(__file__).resolve().parents[2] / "conf"
KEY = PoolKey("a machine", "cpu", "a verifier", "bfloat16", 2, "packed")
ALONE = Way("none", "one token", BASELINE)
CHAIN = Way("small drafter", "greedy", "small drafter, greedy")
LIMIT, PROMPT = 64, 100


# ---------------------------------------------------------------- records with known costs
def verify_s(nodes: int, context: float) -> float:
    """A jump at 16 nodes, and 20 microseconds a cached token."""
    return 0.040 + 0.0005 * nodes + 0.010 * (nodes > 16) + 2e-5 * (context - PROMPT)


def draft_s(window: int, num_drafts: int, passes: int = 1) -> float:
    return 0.006 * min(passes, window) + 0.0002 * num_drafts * window


def other_s(nodes: int) -> float:
    return 0.0006 + 0.00005 * nodes


class Machine:
    """Writes down what a decoder with given chances of acceptance would have cost."""

    def __init__(self, seed: int, level: float = 1.0, noise: float = 0.05) -> None:
        self.random, self.level, self.noise = random.Random(seed), level, noise

    def seconds(self, exact: float) -> float:
        return exact * self.level * max(1.0 + self.random.gauss(0.0, self.noise), 0.5)

    def decode(
        self, method: str, prompt: int, gamma: int, rates: Sequence[float], length: int = LIMIT, num_drafts: int = 1,
        passes: int = 1, benchmark: str = "toy",
    ) -> Record:  # fmt: skip
        rounds, done = [], 0
        while done < length:
            window = min(gamma, LIMIT - done - 1)
            streak = next((j for j in range(window) if self.random.random() >= rates[j]), window)
            kept = min(streak + 1, length - done)
            accepted, nodes = min(streak, kept), 1 + num_drafts * window
            seconds = (draft_s(window, num_drafts, passes), verify_s(nodes, PROMPT + done), other_s(nodes))
            drafted = accepted if kept <= streak else window
            rounds.append(RoundRecord(drafted, accepted, kept, nodes, *(self.seconds(s) for s in seconds)))
            done += kept
        return Record(
            method=method, prompt_id=f"p{prompt}", benchmark=benchmark, seed=0, temperature=0.0,
            tokens=list(range(length)), text="", stop_reason="length" if length == LIMIT else "eos", prefill_s=0.5,
            decode_s=sum(r.draft_s + r.verify_s + r.other_s for r in rounds), rounds=rounds, gamma=gamma,
            num_drafts=num_drafts if gamma else 0, prompt_ids=[1] * PROMPT,
        )  # fmt: skip


def rates_of(prompt: int) -> list[float]:
    """Hard and easy prompts, later positions harder."""
    return [(0.85 if prompt % 4 < 2 else 0.55) * 0.97**j for j in range(8)]


def measured(
    name: str, seed: int, gammas: Sequence[int] = (8,), level: float = 1.0, num_prompts: int = 40, key: PoolKey = KEY,
    noise: float = 0.05, benchmarks: Sequence[str] = ("toy",), rates: Callable[[int], list[float]] = rates_of,
) -> MeasuredRun:  # fmt: skip
    """Baseline and one chain method for each gamma."""
    machine = Machine(seed, level, noise)
    records, ways = [], {BASELINE: ALONE}
    for benchmark, prompt in itertools.product(benchmarks, range(num_prompts)):
        length = LIMIT if prompt % 3 else 40
        records.append(machine.decode(BASELINE, prompt, 0, [], length, benchmark=benchmark))
        for gamma in gammas:
            ways[f"chain{gamma}"] = CHAIN
            records.append(machine.decode(f"chain{gamma}", prompt, gamma, rates(prompt), length, benchmark=benchmark))
    return MeasuredRun(name, key, ways, LIMIT, records)


def rows_of(result: dict[str, Any], split: str) -> list[dict[str, Any]]:
    return [row for pool in result["pools"] for row in pool["rows"] if row["split"] == split]


# ---------------------------------------------------------------- costs
def test_known_costs_are_recovered_and_levels_cancel() -> None:
    runs = [measured("a", 1, (2, 8)), measured("b", 2, (4,), level=1.3), measured("c", 3, (8,), level=0.8)]
    law = fit_costs(runs)
    scale = law.levels["a"]  # seconds are told at the mean level
    assert law.levels["b"] / scale == pytest.approx(1.3, rel=0.01)
    assert law.levels["c"] / scale == pytest.approx(0.8, rel=0.01)
    for nodes in (1, 3, 5, 9):
        found = float(law.verify(np.array([float(nodes)]), law.mean_context)[0])
        assert found * scale == pytest.approx(verify_s(nodes, law.mean_context), rel=0.01)
    assert law.draft_seconds(CHAIN, 8, 1) * scale == pytest.approx(draft_s(8, 1), rel=0.02)
    assert law.draft_seconds(CHAIN, 2, 1) * scale == pytest.approx(draft_s(2, 1), rel=0.03)
    assert law.draft_seconds(CHAIN, 0, 1) == 0.0
    assert float(law.other_seconds(CHAIN, np.array([9.0]))[0]) * scale == pytest.approx(other_s(9), rel=0.02)
    assert law.context_s == pytest.approx(2e-5, rel=0.25)


def test_the_curve_keeps_a_jump_that_no_line_has() -> None:
    machine = Machine(5)
    records = [machine.decode(BASELINE, p, 0, []) for p in range(20)]
    for drafts, gamma in ((2, 7), (2, 8), (4, 8)):
        records += [machine.decode(f"k{drafts}", p, gamma, rates_of(p), num_drafts=drafts) for p in range(20)]
    law = fit_costs([MeasuredRun("a", KEY, {BASELINE: ALONE, "k2": CHAIN, "k4": CHAIN}, LIMIT, records)])
    at = law.verify(np.array([15.0, 17.0, 33.0, 40.0]), law.mean_context)
    for index, nodes in enumerate((15, 17, 33)):
        assert at[index] == pytest.approx(verify_s(nodes, law.mean_context), rel=0.01)
    assert at[3] > at[2]  # beyond what was measured it goes on rising


def test_passes_and_drafts_have_coefficients_of_their_own() -> None:
    machine, ways = Machine(6, noise=0.02), {BASELINE: ALONE}
    records = [machine.decode(BASELINE, p, 0, []) for p in range(10)]
    for passes, drafts in ((1, 1), (4, 1), (1, 4)):
        ways[f"{passes},{drafts}"] = replace(CHAIN, passes=passes)
        records += [
            machine.decode(f"{passes},{drafts}", p, 8, rates_of(p), num_drafts=drafts, passes=passes)
            for p in range(10)
        ]  # fmt: skip
    law = fit_costs([MeasuredRun("a", KEY, ways, LIMIT, records)])
    assert law.draft["small drafter"] == pytest.approx((0.006, 0.0002), rel=0.03)
    assert law.draft_seconds(replace(CHAIN, passes=2), 8, 2) == pytest.approx(draft_s(8, 2, 2), rel=0.03)


def test_coefficients_are_never_negative() -> None:
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative_fit(features, np.array([3.0, 2.0, 1.0])) == pytest.approx((2.0, 0.0))
    assert nonnegative_fit(features, np.array([1.0, 2.0, 3.0])) == pytest.approx((0.0, 1.0))
    assert nonnegative_fit(features, -np.ones(3)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("machine", "another"), ("verifier", "another"), ("dtype", "float32"), ("threads", 1), ("runtime", "eager"),
     ("device", "cuda")],
)  # fmt: skip
def test_other_machines_are_refused_or_fitted_apart(name: str, value: Any) -> None:
    first = measured("a", 1, num_prompts=4)
    second = measured("b", 2, num_prompts=4, key=replace(KEY, **{name: value}))
    with pytest.raises(MismatchError, match=rf"a and b differ in {name} .*cannot be pooled"):
        fit_costs([first, second])
    result = check_runs([first, second])
    assert [pool["runs"] for pool in result["pools"]] == [["a"], ["b"]]
    assert not rows_of(result, "other_runs")
    assert all("the only run" in row["reason"] for row in result["not_predicted"])


def test_runs_without_a_baseline_are_named() -> None:
    run = measured("a", 1, num_prompts=2)
    drafted = replace(run, records=[r for r in run.records if r.method != BASELINE])
    with pytest.raises(ConfigError, match="run a has no rounds of the verifier alone"):
        fit_costs([drafted])
    assert check_runs([drafted])["not_predicted"][0]["run"] == "a"
    with pytest.raises(ConfigError, match=r"speed_law\.runs is empty"):
        check_runs([])


# ---------------------------------------------------------------- acceptance, exactly
def outcomes(rates: Sequence[float], gamma: int, limit: int, length: int, done: int = 0) -> Iterator[Any]:
    """Every way an output can go: (probability, [(window, streak, committed)])."""
    if done >= length:
        yield 1.0, []
        return
    window = min(gamma, limit - done - 1)
    for streak in range(window + 1):
        chance = float(np.prod(rates[:streak])) * (1.0 - rates[streak] if streak < window else 1.0)
        kept = min(streak + 1, length - done)
        for rest, rounds in outcomes(rates, gamma, limit, length, done + kept):
            yield chance * rest, [(window, streak, kept), *rounds]


RATES = (0.9, 0.5, 0.7, 0.2)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize(("limit", "length"), [(7, 7), (7, 5), (20, 6), (1, 1)])
def test_shorter_windows_from_the_longest_one_equal_enumeration(gamma: int, limit: int, length: int) -> None:
    expected: dict[int, float] = {}
    for chance, rounds in outcomes(RATES, gamma, limit, length):
        for window, _, _ in rounds:
            expected[window] = expected.get(window, 0.0) + chance
    longest = StreakLaw.from_survival(np.cumprod(RATES))
    found = rounds_by_window(longest.shorter(gamma), limit, [length])
    assert found == pytest.approx(expected, abs=1e-12)
    twice = rounds_by_window(longest.shorter(gamma), limit, [length, length])
    assert twice == pytest.approx({window: 2 * count for window, count in expected.items()}, abs=1e-12)


@pytest.mark.parametrize(("limit", "length"), [(6, 6), (20, 5)])
def test_ends_of_outputs_do_not_bias_the_streak_law(limit: int, length: int) -> None:
    """Half a chance at each position: every outcome has weight 2^-n, n <= 10, so a list of repetitions is the law."""
    halves, gamma = (0.5, 0.5, 0.5), 3
    records = []
    for chance, rounds in outcomes(halves, gamma, limit, length):
        built = [
            RoundRecord(min(s, k) if k <= s else w, min(s, k), k, 1 + w) for w, s, k in rounds
        ]  # as decoding.engine writes them
        one = replace(Machine(0).decode("chain", 0, 0, [], 1), rounds=built, gamma=gamma, tokens=[0] * length)
        assert (chance * 2**10).is_integer()
        records += [one] * int(chance * 2**10)
    law = StreakLaw.of(records, limit)
    assert law.probs == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-12)
    assert law.mean == pytest.approx(0.875)
    rounds = [one for record in records for one in record.rounds]
    # the same as the report's curve for chains, and not what the raw shares of rounds would say
    assert position_curves(rounds, gamma).survival == pytest.approx([0.5, 0.25, 0.125])
    assert sum(r.num_accepted >= 3 for r in rounds) / len(rounds) < 0.1


def test_a_tree_that_ends_early_ends_the_streak() -> None:
    record = Machine(0).decode("tree", 0, 0, [], 1)
    rounds = [RoundRecord(2, 2, 3, 4), RoundRecord(2, 1, 2, 4), RoundRecord(4, 1, 1, 9)]
    judged = judged_rounds(replace(record, gamma=4, rounds=rounds, tokens=[0] * 6), 50)
    assert [one.num_drafted for one in judged] == [4, 4, 1]  # only the last was cut by the end of the output
    assert StreakLaw.of([replace(record, gamma=4, rounds=rounds[:2])], 50).mean == pytest.approx(1.5)


def test_long_outputs_take_one_round_for_every_streak_and_bonus_token() -> None:
    law = StreakLaw.from_survival([0.8, 0.5, 0.1])
    assert round_starts(law, 10_000, 3000)[-1] == pytest.approx(1.0 / (1.0 + law.mean))
    with pytest.raises(ConfigError, match="gamma=4"):
        law.shorter(4)
    with pytest.raises(ConfigError, match="output of 9 tokens"):
        rounds_by_window(law, 8, [9])
    with pytest.raises(ConfigError, match="without a drafted position"):
        StreakLaw.of([Machine(0).decode(BASELINE, 0, 0, [], 3)], 8)


# ---------------------------------------------------------------- predictions
def test_other_runs_predict_a_run_within_a_few_percent() -> None:
    result = check_runs([measured("a", 1, (2, 8)), measured("b", 2, (8,), level=1.4), measured("c", 3, (4,))])
    rows = rows_of(result, "other_runs")
    assert [(row["run"], row["method"]) for row in rows] == [
        ("a", "chain2"), ("a", "chain8"), ("b", "chain8"), ("c", "chain4"),
    ]  # fmt: skip
    for row in rows:
        assert abs(row["error"]) < 0.03, row
        assert row["predicted_tau"] == pytest.approx(row["measured_tau"], rel=0.02)
        assert row["reasons"] == []
    counts = result["pools"][0]["counts"]["other_runs"]
    assert (counts["num"], counts["within"]) == (4, 4)


def test_half_of_the_prompts_predict_the_other_half() -> None:
    rows = rows_of(check_runs([measured("a", 4, num_prompts=120)]), "other_prompts")
    assert len(rows) == 1 and rows[0]["num_prompts"] == 60
    assert abs(rows[0]["error"]) < 0.05
    low, high = rows[0]["predicted_ci"]
    assert low < rows[0]["predicted"] < high


def test_shorter_windows_are_predicted_without_decoding_them() -> None:
    runs = [measured("a", 7, (2, 4, 8), rates=lambda _: [0.8] * 8), measured("b", 8, (8,))]
    rows = rows_of(check_runs(runs), "shorter_windows")
    assert [row["gamma"] for row in rows] == [2, 4]
    assert all(abs(row["error"]) < 0.04 for row in rows), rows
    changed = replace(CHAIN, acceptance="another drafter")  # another one's acceptance says nothing
    runs[0] = replace(runs[0], ways={**runs[0].ways, "chain2": changed})
    assert [row["gamma"] for row in rows_of(check_runs(runs), "shorter_windows")] == [4]


def test_a_way_that_only_one_run_has_comes_from_its_other_benchmarks_or_is_named() -> None:
    alone = measured("b", 2, num_prompts=8, benchmarks=("toy", "more"))
    other = Way("another drafter", "greedy", "another")
    alone = replace(alone, ways={**alone.ways, "chain8": other})
    result = check_runs([measured("a", 1, num_prompts=8), alone])
    rows = [row for row in rows_of(result, "other_runs") if row["run"] == "b"]
    assert [row["costs_from"] for row in rows] == ["other benchmarks of the run"] * 2
    alone = replace(alone, records=[r for r in alone.records if r.benchmark == "toy"])
    result = check_runs([measured("a", 1, num_prompts=8), alone])
    told = [row["reason"] for row in result["not_predicted"] if row["run"] == "b"]
    assert told == ["no other run measured draft of: another drafter"]


def test_decoders_that_tell_no_rounds_are_named() -> None:
    run = measured("a", 1, num_prompts=3)
    silent = [replace(r, method="hf_generate", rounds=[]) for r in run.records if r.method == BASELINE]
    told = check_runs([replace(run, records=[*run.records, *silent])])["not_predicted"]
    assert {"run": "a", "method": "hf_generate", "reason": "it does not tell its rounds"} in told


# ---------------------------------------------------------------- planted mistakes
def uneven(prompt: int) -> list[float]:
    return [0.97 if prompt % 4 < 2 else 0.25] * 8


def error_of(runs: Sequence[MeasuredRun]) -> float:
    row = next(row for row in rows_of(check_runs(runs), "other_runs") if row["run"] == "a")
    assert row["within"] or row["reasons"]
    return float(row["error"])


@pytest.fixture(scope="module")
def two_runs() -> list[MeasuredRun]:
    return [measured("a", 11, rates=uneven, num_prompts=60), measured("b", 12, rates=uneven, num_prompts=60)]


def test_the_law_holds_for_uneven_prompts(two_runs: list[MeasuredRun]) -> None:
    assert abs(error_of(two_runs)) < 0.05


def test_a_forgotten_bonus_token_shows(two_runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(*args: Any) -> Mapping[int, float]:
        rounds = rounds_by_window(*args)
        tokens = sum(args[2])
        scale = tokens / (tokens - sum(rounds.values()))  # tau one smaller
        return {window: count * scale for window, count in rounds.items()}

    monkeypatch.setattr(speed_law_cases, "rounds_by_window", forgotten)
    assert abs(error_of(two_runs)) > 0.10


def test_means_of_prompts_multiplied_over_positions_show(
    two_runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiplied(records: Sequence[Record], limit: int) -> StreakLaw:
        each = [position_curves(judged_rounds(record, limit), 8).accept_rate for record in records]
        known = [[rates[j] for rates in each if rates[j] is not None] for j in range(8)]
        return StreakLaw.from_survival(np.cumprod([np.mean(rates) if rates else 0.0 for rates in known]))

    class Wrong(StreakLaw):
        of = staticmethod(multiplied)

    monkeypatch.setattr(speed_law_check, "StreakLaw", Wrong)
    assert abs(error_of(two_runs)) > 0.10


def test_a_counted_prefill_shows(two_runs: list[MeasuredRun]) -> None:
    counted = [replace(record, decode_s=record.decode_s + record.prefill_s) for record in two_runs[0].records]
    assert abs(error_of([replace(two_runs[0], records=counted), two_runs[1]])) > 0.10


def test_an_error_is_traced_to_its_stage(two_runs: list[MeasuredRun]) -> None:
    slow = [
        replace(
            record,
            rounds=[replace(r, draft_s=5 * r.draft_s) for r in record.rounds],
            decode_s=record.decode_s + 4 * sum(r.draft_s for r in record.rounds),
        )
        for record in two_runs[0].records
    ]
    result = check_runs([replace(two_runs[0], records=slow), two_runs[1]])
    row = next(row for row in rows_of(result, "other_runs") if row["run"] == "a")
    assert not row["within"] and row["error"] > 0.10
    assert re.match(r"draft: \d+\.\d\d ms predicted, \d+\.\d\d measured \(\+\d+% of the speed-up\)", row["reasons"][0])


# ---------------------------------------------------------------- files
SAMPLER = {"_target_": "x", "name": "chain8", "rule": "greedy", "K": 1, "gamma": 8, "temperature": None, "drafter": ""}
RUN = {"machine": "m", "device": "cpu", "dtype": "bfloat16", "threads": 2, "runtime": "torch packed"}


def write_folder(folder: Path, run: MeasuredRun, methods: Mapping[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"verifier": {"source": "v", "temperature": 0.0}, "methods": methods, "model_name": "m"}
    (folder / "run.json").write_text(json.dumps({**RUN, "config": config, **changes}))
    decoders = {name: {"verifier": "abc", "drafter": "weights"} for name in methods}
    (folder / "benchmark.json").write_text(json.dumps({"max_new_tokens": LIMIT, "decoders": decoders}))
    with RecordWriter(folder / RECORDS_FILE) as writer:
        for record in run.records:
            writer.append(record)
        writer.append(replace(run.records[0], warmup=True))
    return folder


def drafter_folder(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True)
    drafter = {"gamma": 8, "num_layers": 3, "draft_vocab_ids": [1, 2, 3], "denoising_steps": 1, **changes}
    (folder / "config.json").write_text(json.dumps({"format": "block", "drafter": drafter, "training": {"step": 1}}))
    return str(folder)


def test_what_may_share_costs_is_read_from_the_run(tmp_path: Path) -> None:
    small = drafter_folder(tmp_path / "small")
    methods = {
        "chain8": {**SAMPLER, "drafter": small},
        "short": {**SAMPLER, "gamma": 2, "drafter": drafter_folder(tmp_path / "again", gamma=4)},
        "deep": {**SAMPLER, "drafter": drafter_folder(tmp_path / "deep", num_layers=6)},
        "vocab": {**SAMPLER, "drafter": drafter_folder(tmp_path / "vocab", draft_vocab_ids=[1])},
        "drawn": {**SAMPLER, "temperature": 1.0, "drafter": small},
        "block": {**SAMPLER, "rule": "block", "drafter": small},
        "steps": {**SAMPLER, "denoising_steps": 4, "drafter": small},
        "grown": {"rule": "tree_match", "num_nodes": 16, "drafter": small},
        "wide": {"rule": "tree_match", "num_nodes": 64, "drafter": small},
        "gone": {**SAMPLER, "drafter": str(tmp_path / "nowhere")},
        "copies": {"rule": "tree_match", "lookup_tokens": 8},
    }
    run = read_run(write_folder(tmp_path / "run", measured("a", 1, num_prompts=2), methods))
    ways = run.ways
    assert run.max_new_tokens == LIMIT and not any(record.warmup for record in run.records)
    assert ways["chain8"].draft == ways["short"].draft == ways["block"].draft == ways["steps"].draft
    drafts = [ways[name].draft for name in ("chain8", "deep", "vocab", "drawn", "grown", "gone", "copies")]
    assert len(set(drafts)) == 7
    assert ways["chain8"].other == ways["deep"].other == ways["drawn"].other
    assert len({ways[name].other for name in ("chain8", "block", "grown", "copies")}) == 4
    assert ways["grown"].other == ways["wide"].other and ways["grown"].draft == ways["wide"].draft
    assert [ways[name].passes for name in ("chain8", "steps")] == [1, 4]
    assert ways["chain8"].acceptance != ways["short"].acceptance  # other weights
    shorter = read_run(
        write_folder(tmp_path / "other", measured("a", 1, num_prompts=2), {"s": {**methods["chain8"], "gamma": 2}})
    )
    assert shorter.ways["s"].acceptance == ways["chain8"].acceptance


def test_damaged_and_missing_runs_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", measured("a", 1, num_prompts=2), {"chain8": SAMPLER})
    assert find_runs([f"{tmp_path}/*", str(folder)]) == [folder]
    with pytest.raises(ConfigError, match=r"no folder with records\.jsonl"):
        find_runs([f"{tmp_path}/none*"])
    (folder / "run.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(CorruptFileError, match=r"lacks 'sampler'"):
        read_run(folder)
    (folder / "benchmark.json").unlink()
    with pytest.raises(ConfigError, match=r"benchmark\.json does not exist"):
        read_run(folder)


def test_the_command_writes_strict_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = drafter_folder(tmp_path / "drafter")
    for name, seed in (("one", 1), ("two <b>", 2)):
        write_folder(tmp_path / "runs" / name, measured(name, seed), {"chain8": {**SAMPLER, "drafter": drafter}})
    hardware = str(CONF / "hardware" / "h100_80gb.yaml")
    out = tmp_path / "out"
    assert main([f"{tmp_path}/runs/*", "--out", str(out), "--hardware", hardware]) == 0

    def refuse(text: str) -> None:
        raise ValueError(text)

    result = json.loads((out / "speed_law.json").read_text(), parse_constant=refuse)
    assert result["pools"][0]["counts"]["other_runs"]["within"] == 2
    page = (out / "report.html").read_text()
    assert page == speed_law_page(result)
    assert page.count("<circle") >= 4 and "two &lt;b&gt;" in page and "two <b>" not in page
    printed = capsys.readouterr().out
    assert "2 of 2 within 10%" in printed and "EXTRAPOLATED" in printed
    assert main([f"{tmp_path}/none", "--out", str(out)]) == 1


# ---------------------------------------------------------------- extrapolation
@pytest.fixture(scope="module")
def extrapolated() -> dict[str, Any]:
    hardware = {name: read_hardware_file(CONF / "hardware" / f"{name}.yaml") for name in ("a100_80gb", "h100_80gb")}
    return extrapolate(SpeedLawSection(**{**DEFAULTS, "runs": [], "hardware": hardware}))


def test_every_extrapolated_number_says_so(extrapolated: dict[str, Any]) -> None:
    assert extrapolated["label"] == "extrapolated" and extrapolated["assumptions"]
    for row in extrapolated["rows"]:
        assert row["label"] == "extrapolated"
        assert {one["label"] for one in row["speedups"]} == {"extrapolated"}
        assert [one["streak"] for one in row["speedups"]] == list(range(2, 13))
    page = speed_law_page({"pools": [], "not_predicted": [], "tolerance": 0.1, "extrapolation": extrapolated})
    assert page.count("Extrapolated.") == 4


def test_a_step_reads_the_published_weights_once(extrapolated: dict[str, Any]) -> None:
    """Qwen2.5-72B-Instruct's index: 145412407296 bytes, of which the input embedding is not read."""
    read = 145412407296 - 152064 * 8192 * 2
    row = next(r for r in extrapolated["rows"] if (r["hardware"], r["num_devices"]) == ("a100_80gb", 4))
    expected = read / (4 * 0.69 * 2039e9) + 2 * 80 * 0.024e-3
    assert row["step_ms"] == pytest.approx(1e3 * expected, rel=0.01)


def test_needed_streaks_reach_the_stated_gains_and_no_more(extrapolated: dict[str, Any]) -> None:
    for row in extrapolated["rows"]:
        for name, gain in extrapolated["stated_gains"].items():
            needed = row["streak_needed"][name]
            reached = {one["streak"]: one["speedup"] for one in row["speedups"]}
            if needed is None:
                assert max(reached.values()) < gain
            else:
                assert all((speedup >= gain) == (streak >= needed) for streak, speedup in reached.items())
    exact = [r for r in extrapolated["rows"] if r["attention"] == "causal_prefix" and r["streak_needed"]["paper, mean"]]
    published = [r for r in extrapolated["rows"] if r["attention"] == "bidirectional"]
    for cached in exact:  # reading the text again costs gains, so a longer streak is needed
        same = [r for r in published if all(r[k] == cached[k] for k in ("hardware", "num_devices", "num_drafts"))]
        assert same[0]["streak_needed"]["paper, mean"] > cached["streak_needed"]["paper, mean"]


def test_what_does_not_fit_in_memory_says_so(extrapolated: dict[str, Any]) -> None:
    fits = {row["num_devices"]: row["fits"] for row in extrapolated["rows"]}
    assert fits == {1: False, 2: False, 4: True, 8: True}  # 145 GB of weights, and 15 GB of drafter on each


def test_unknown_attention_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speed_law\.attention holds 'sideways'"):
        extrapolate(SpeedLawSection(**{**DEFAULTS, "runs": [], "hardware": {}, "attention": ["sideways"]}))
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        read_hardware_file(tmp_path / "none.yaml")


def test_the_config_file_says_what_the_command_does(tmp_path: Path) -> None:
    said = yaml.safe_load((CONF / "speed_law" / "default.yaml").read_text())
    assert {key: value for key, value in said.items() if key not in ("defaults", "runs")} == DEFAULTS
    taken = [] if "speed_law" in (CONF / "eval.yaml").read_text() else ["+speed_law=default"]
    section = load_config(CONF, "eval", taken, tmp_path).speed_law
    for name in ("a100_80gb", "h100_80gb"):
        assert dict(section.hardware[name]) == read_hardware_file(CONF / "hardware" / f"{name}.yaml")
