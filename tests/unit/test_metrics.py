"""Records, curves, bootstrap, accuracy and the summary, against numbers worked out by hand (case 33)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_builder import RUN, baseline, record, toy_records, write_run

from specdiff2.evaluation.accuracy import accuracy, final_number, is_correct
from specdiff2.evaluation.agreement import first_divergence, lossless_check
from specdiff2.evaluation.bootstrap import BootstrapOptions, ratio_interval, ratio_of_ratios_interval
from specdiff2.evaluation.curves import position_curves
from specdiff2.evaluation.metrics import HEADER_KEYS, streak_difference, summarize, write_summary
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter, read_records
from specdiff2.evaluation.table import markdown_table, plain_table
from specdiff2.types import ConfigError, CorruptFileError, RoundRecord

SCHEMA = {
    "method", "benchmark", "temperature", "num_prompts", "tokens_per_s", "speedup", "speedup_ci",
    "mean_streak", "tau", "draft_ms", "verify_ms", "other_ms", "lossless_check",
}  # fmt: skip


def rounds(*triples: tuple[int, int, int]) -> list[RoundRecord]:
    return [RoundRecord(drafted, accepted, committed, 1 + drafted) for drafted, accepted, committed in triples]


def row_of(records: list[Record], method: str = "specdiff2") -> dict[str, Any]:
    return next(row for row in summarize(records)["rows"] if row["method"] == method)


# ---------------------------------------------------------------- curves
def test_curves_by_hand() -> None:
    # streaks 2, 0, 4 of 4: reached j: 3, 2, 2, 1; accepted j: 2, 2, 1, 1
    curves = position_curves(rounds((4, 2, 3), (4, 0, 1), (4, 4, 5)))
    assert curves.num_reached == [3, 2, 2, 1]
    assert curves.num_accepted == [2, 2, 1, 1]
    assert curves.accept_rate == [2 / 3, 1.0, 0.5, 1.0]
    assert curves.survival == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert sum(value or 0.0 for value in curves.survival) == pytest.approx(6 / 3)  # the mean streak


def test_cut_round_counts_only_where_it_was_judged() -> None:
    # drafted 4, accepted 2, then EOS as the second accepted token: stored as (2, 2, 2)
    curves = position_curves(rounds((4, 2, 3), (2, 2, 2)))
    assert curves.num_reached == [2, 2, 1, 0]
    assert curves.accept_rate == [1.0, 1.0, 0.0, None]
    assert curves.survival == [1.0, 1.0, 0.0, 0.0]  # a dead streak stays dead


def test_curves_without_evidence_are_null() -> None:
    curves = position_curves([], gamma=2)
    assert curves.accept_rate == [None, None]
    assert curves.survival == [None, None]
    late = position_curves(rounds((1, 1, 2)), gamma=2)  # nobody drafted position 2
    assert late.accept_rate == [1.0, None]
    assert late.survival == [1.0, None]


def test_survival_never_rises_with_mixed_windows() -> None:
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(200):
        drafted = int(generator.integers(0, 7))
        accepted = int(generator.integers(0, drafted + 1))
        drawn.append((drafted, accepted, accepted + 1))
    survival = position_curves(rounds(*drawn)).survival
    known = [value for value in survival if value is not None]
    assert known == sorted(known, reverse=True)


# ---------------------------------------------------------------- summary
def test_streak_and_tau_by_hand() -> None:
    row = row_of([record(rounds=[(4, 2, 3), (4, 0, 1), (2, 2, 2)])])
    assert row["num_rounds"] == 3
    assert row["mean_streak"] == pytest.approx(4 / 3)  # without the bonus token
    assert row["tau"] == pytest.approx(6 / 3)  # with it: the last round was cut and had none
    assert row["tau_includes_bonus"] is True
    assert row["num_tokens"] == 6


def test_speed_is_pooled_and_prefill_apart() -> None:
    # 3 tokens in 1 s and 9 tokens in 2 s: pooled 12/3, not the mean of 3 and 4.5; prefill does not matter
    records = [
        record(prompt_id="a", decode_s=1.0, prefill_s=100.0),
        record(prompt_id="b", rounds=[(4, 2, 3)] * 3, decode_s=2.0),
        baseline("a", 3, decode_s=1.5),
        baseline("b", 9, decode_s=4.5),
    ]
    row = row_of(records)
    assert row["tokens_per_s"] == pytest.approx(4.0)
    assert row["speedup"] == pytest.approx(2.0)
    assert row["num_paired"] == 2


def test_paper_protocol() -> None:
    # (new tokens - 1) / total time, prefill included, mean over samples: (2/1 + 8/4) / 2 = 2 against (1/1 + 3/1) / 2
    records = [
        record(prompt_id="a", decode_s=0.5, prefill_s=0.5),
        record(prompt_id="b", rounds=[(4, 2, 3)] * 3, decode_s=3.0, prefill_s=1.0),
        baseline("a", 2, decode_s=0.5, prefill_s=0.5),
        baseline("b", 4, decode_s=0.5, prefill_s=0.5),
    ]
    assert row_of(records)["speedup_paper"] == pytest.approx(2.0 / 2.0)


def test_speedup_over_shared_prompts_only() -> None:
    records = [
        record(prompt_id="a", decode_s=1.0),
        record(prompt_id="b", decode_s=50.0),
        baseline("a", 3, decode_s=3.0),
    ]
    row = row_of(records)
    assert row["speedup"] == pytest.approx(3.0)
    assert (row["num_prompts"], row["num_paired"]) == (2, 1)
    assert row["speedup_ci"] is None  # one pair has no spread


def test_warmup_is_left_out() -> None:
    row = row_of([record(), record(warmup=True, decode_s=1e6)])
    assert row["num_prompts"] == 1


def test_stage_times_and_overhead() -> None:
    row = row_of([record(rounds=[(4, 2, 3), (4, 1, 2)], round_s=(0.010, 0.035, 0.005))])
    assert (row["draft_ms"], row["verify_ms"], row["other_ms"]) == pytest.approx((10.0, 35.0, 5.0))
    assert row["overhead"] == pytest.approx(0.1)


def test_zero_rounds_and_zero_seconds_are_null() -> None:
    summary = summarize([record(rounds=[], decode_s=0.0), baseline(num_tokens=0, decode_s=0.0)])
    row = summary["rows"][0]
    for key in (
        "tokens_per_s",
        "speedup",
        "speedup_ci",
        "mean_streak",
        "mean_streak_ci",
        "tau",
        "draft_ms",
        "overhead",
    ):
        assert row[key] is None, key
    assert row["accept_rate"] == []
    assert "NaN" not in json.dumps(summary, allow_nan=False)
    assert "-" in plain_table(summary["rows"])


def test_temperatures_and_benchmarks_are_kept_apart() -> None:
    records = [record(), record(temperature=1.0), record(benchmark="other")]
    rows = summarize(records)["rows"]
    assert [(row["benchmark"], row["temperature"]) for row in rows] == [("toy", 0.0), ("toy", 1.0), ("other", 0.0)]


def test_stop_reasons() -> None:
    row = row_of([record(prompt_id="a", stop_reason="eos"), record(prompt_id="b")])
    assert row["stop_reasons"] == {"eos": 1, "stop": 0, "length": 1}


def test_miscounted_or_repeated_records_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="rounds committed 3 tokens, the output has 4"):
        summarize([record(tokens=[1, 2, 3, 4])])  # a token after EOS
    with pytest.raises(CorruptFileError, match="'p0' appears twice"):
        summarize([record(), record()])


# ---------------------------------------------------------------- lossless check
def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([], []) is None


def test_lossless_check_at_temperature_zero_only() -> None:
    records = [baseline("a", 3), baseline("b", 3), record(prompt_id="a"), record(prompt_id="b", tokens=[10, 99, 12])]
    check = row_of(records)["lossless_check"]
    assert (check["checked"], check["identical"], check["divergence_rate"]) == (2, 1, 0.5)
    assert check["first_divergences"] == [{"prompt_id": "b", "position": 1, "expected": 11, "got": 99}]
    sampled = [baseline("a", 3, temperature=1.0), record(prompt_id="a", temperature=1.0)]
    assert row_of(sampled)["lossless_check"] is None
    assert row_of(records, "autoregressive")["lossless_check"] is None
    assert row_of([record()])["lossless_check"] is None  # no baseline


def test_lossless_check_of_a_shorter_output() -> None:
    check = lossless_check([baseline("a", 3)], [record(prompt_id="a", rounds=[(4, 1, 2)])])
    assert check["first_divergences"] == [{"prompt_id": "a", "position": 2, "expected": 12, "got": None}]


# ---------------------------------------------------------------- bootstrap
def test_interval_is_deterministic_and_holds_the_estimate() -> None:
    generator = np.random.default_rng(1)
    tokens = generator.integers(20, 80, size=60).astype(float).tolist()
    seconds = [token * 0.03 + float(noise) for token, noise in zip(tokens, generator.normal(0, 0.05, 60), strict=True)]
    interval = ratio_interval(tokens, seconds)
    assert interval is not None
    assert interval == ratio_interval(tokens, seconds)
    assert interval != ratio_interval(tokens, seconds, BootstrapOptions(seed=1))
    assert interval[0] < sum(tokens) / sum(seconds) < interval[1]


def test_interval_covers_the_truth() -> None:
    """95 % nominal over 100 data sets of 40 prompts: fewer than 85 hits has probability below 1e-4."""
    generator = np.random.default_rng(2)
    hits = 0
    for seed in range(100):
        num_rounds = generator.integers(5, 30, size=40)
        accepted = generator.binomial(num_rounds, 0.4)
        interval = ratio_interval(
            accepted.tolist(), num_rounds.tolist(), BootstrapOptions(num_resamples=400, seed=seed)
        )
        hits += interval is not None and interval[0] <= 0.4 <= interval[1]
    assert hits >= 85


def test_pairing_narrows_the_interval() -> None:
    """Prompts differ far more than methods: a constant factor of 2 is found exactly."""
    generator = np.random.default_rng(3)
    slow = [
        (float(n), float(n * s))
        for n, s in zip(generator.integers(9, 90, 30), generator.uniform(0.1, 9, 30), strict=True)
    ]
    fast = [(tokens, seconds / 2) for tokens, seconds in slow]
    interval = ratio_of_ratios_interval(fast, slow)
    assert interval == pytest.approx((2.0, 2.0))


def test_interval_without_data_is_null() -> None:
    assert ratio_interval([], []) is None
    assert ratio_interval([1.0], [2.0]) is None
    assert ratio_interval([0.0, 0.0], [0.0, 0.0]) is None


def test_streak_difference() -> None:
    before = [record("before", f"p{i}", [(4, i % 2, i % 2 + 1)] * 3) for i in range(8)]
    after = [record("after", f"p{i}", [(4, i % 2 + 1, i % 2 + 2)] * 3) for i in range(8)]
    found = streak_difference(before, after)
    assert (found["from"], found["to"], found["num_paired"]) == ("before", "after", 8)
    assert found["mean_streak_difference"] == pytest.approx(1.0)
    assert found["ci"] == pytest.approx([1.0, 1.0])  # every prompt gains exactly one
    summary = summarize(before + after)
    assert [(one["from"], one["to"]) for one in summary["comparisons"]] == [("before", "after")]


# ---------------------------------------------------------------- accuracy
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("... so 12 + 30 = 42 apples.", 42),
        ("reason 7\n#### 1,234", 1234),
        ("#### 18\nand then 99 more", 18),
        ("#### $1,800.50", 1800.5),
        ("that is -3", -3),
        ("which is 24-7", 7),
        ("costs $1,234.", 1234),
        ("half: .5", 0.5),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, value: float | None) -> None:
    found = final_number(text)
    assert (None if found is None else float(found)) == value


def test_accuracy() -> None:
    assert is_correct("it is 18.00", "long story #### 18") is True
    assert is_correct("it is 17", "18") is False
    assert is_correct("17", "a word") is None
    for one in ("18", "$18", "1,234.5", "-3", "4 then #### $ 3"):
        assert is_correct(one, one) is True, one
    for other in (r"\frac{14}{3}", r"\left( 3, \frac{\pi}{2} \right)", "3 or 4", "x = 3", "12%", "1e5", "", "####"):
        assert is_correct("3", other) is None, other
    thought = "<think>\nis it 4? #### 4\n</think>\n\nit is 18"
    assert is_correct(thought, "18") is True and is_correct(thought, "4") is False
    assert is_correct("is it 4?\n</think>\n18", "18") is True  # the prompt opened the block
    assert is_correct("<think>\nis it 18", "18") is False  # cut off while thinking
    graded = accuracy([record(answer="42"), record(answer="41"), record(), record(answer="none")])
    assert graded == {"graded": 2, "correct": 1, "accuracy": 0.5}
    assert accuracy([record()]) is None


# ---------------------------------------------------------------- files
def test_records_round_trip(tmp_path: Path) -> None:
    original = record(text="a\u2028b \N{SNOWMAN}", answer="42", pieces=["x"], prompt_ids=[1, 2], order=3)
    with RecordWriter(tmp_path / RECORDS_FILE) as writer:
        writer.append(original)
    assert read_records(tmp_path / RECORDS_FILE) == [original]
    row = json.loads((tmp_path / RECORDS_FILE).read_text(encoding="utf-8"))
    assert row["rounds"] == [[4, 2, 3, 5, 0.01, 0.02, 0.001]]
    assert "prompt" not in row  # unset keys are left out


def test_half_line_is_dropped_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / RECORDS_FILE
    with RecordWriter(path) as writer:
        writer.append(record(prompt_id="a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"method": "spec \xe2\x80')  # cut inside a character
    assert [one.prompt_id for one in read_records(path)] == ["a"]
    with RecordWriter(path) as writer:
        writer.append(record(prompt_id="b"))
    assert [one.prompt_id for one in read_records(path)] == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-1])  # only the line break is missing: the record is whole
    assert [one.prompt_id for one in read_records(path)] == ["a", "b"]


@pytest.mark.parametrize("bad", ["{", '{"method": 1}', "[]", '{"a": NaN}'])
def test_corrupt_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / RECORDS_FILE
    path.write_text(f"{record().to_json()}\n{bad}\n{record().to_json()}\n", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"records\.jsonl line 2 .*delete the line"):
        read_records(path)


@pytest.mark.parametrize("numbers", [(4, 5, 6, 5), (4, 2, 4, 5), (4, 2, 1, 5), (4, -1, 0, 5)])
def test_contradicting_round_is_refused(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    row = json.loads(record().to_json())
    row["rounds"] = [[*numbers, 0.0, 0.0, 0.0]]
    path = tmp_path / RECORDS_FILE
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="line 1"):
        read_records(path)


def test_records_refuse_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        record(temperature=math.nan).to_json()


def test_summary_file_follows_the_schema(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", toy_records())
    text = (folder / "summary.json").read_text(encoding="utf-8")
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in summary.json"))
    assert {key: summary[key] for key in HEADER_KEYS} == {key: RUN[key] for key in HEADER_KEYS}
    assert all(set(row) >= SCHEMA for row in summary["rows"])
    assert [row["method"] for row in summary["rows"]] == ["autoregressive", "specdiff", "specdiff2"]
    assert isinstance(summary["rows"][1]["speedup_ci"], list)
    assert not list(folder.glob("*.partial"))


def test_summary_header_can_be_given(tmp_path: Path) -> None:
    folder = write_run(tmp_path, toy_records())
    (folder / "run.json").unlink()
    assert write_summary(folder)["commit"] is None
    assert write_summary(folder, {"commit": "f00"})["commit"] == "f00"


def test_summary_without_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run eval\.py first"):
        write_summary(tmp_path)


def test_tables(tmp_path: Path) -> None:
    rows = summarize(toy_records())["rows"]
    text = plain_table(rows)
    lines = text.split("\n")
    assert lines[0] == "toy, temperature 0, 4 prompts"
    assert len({len(line) for line in lines[2:3]}) == 1
    assert "SpecDiff-2" in text
    assert "bonus token excluded" in text
    assert "lossless check at T=0: 8 of 8" in text
    assert plain_table([]) == "no measured prompts"
    markdown = markdown_table(rows).split("\n")
    assert markdown[-2] == "" and markdown[-1].startswith("lossless check at T=0")
    assert len({line.count("|") for line in markdown[2:-2]}) == 1


def test_lossless_note_says_how_near_divergences_are(tmp_path: Path) -> None:
    records = [
        baseline("p0"), record("specdiff2", "p0"),
        baseline("p1"), record("specdiff2", "p1", tokens=[10, 11, 99]),
    ]  # fmt: skip
    write_run(tmp_path, records)
    path = tmp_path / "divergences.json"
    found = {"method": "specdiff2", "benchmark": "toy", "checked": 2, "diverged": 1, "max_margin_ulp": 1.5}

    def table(num_unexplained: int, diverged: int = 1) -> str:
        methods = [{**found, "num_unexplained": num_unexplained, "diverged": diverged}]
        path.write_text(json.dumps({"dtype": "bfloat16", "methods": methods, "divergences": []}), encoding="utf-8")
        return markdown_table(write_summary(tmp_path)["rows"])

    assert "1 of 2 outputs equal" in table(0) and "near-ties, all within 1.5 spacings of bfloat16" in table(0)
    assert "1 of the 1 others NOT at a near-tie" in table(1)
    assert "near-tie" not in table(0, diverged=2)  # of other records: no claim
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"divergences\.json"):
        write_summary(tmp_path)
    sampled = markdown_table(summarize([record(temperature=1.0)])["rows"])
    assert "lossless" not in sampled and sampled == sampled.strip()


# ---------------------------------------------------------------- several drafters
def won_by(*winners: list[int] | None, drafters: list[str] | None, **changes: Any) -> Record:
    """One round for each: streak 2 with winners, 0 without; None: a round without drafts."""
    triples = [(0, 0, 1) if won is None else (4, 2, 3) if won else (4, 0, 1) for won in winners]
    built = record("drafters", rounds=triples, num_drafts=3, drafters=drafters, **changes)
    for one, won in zip(built.rounds, winners, strict=True):
        one.winners = won
    return built


def test_winners_survive_the_file_and_old_records_have_none(tmp_path: Path) -> None:
    several = won_by([0], [], [0, 1], None, drafters=["a", "b"])
    with RecordWriter(tmp_path / RECORDS_FILE) as writer:
        writer.append(several)
        writer.append(record())
    assert read_records(tmp_path / RECORDS_FILE) == [several, record()]
    lines = (tmp_path / RECORDS_FILE).read_text(encoding="utf-8").splitlines()
    assert [len(one) for one in json.loads(lines[0])["rounds"]] == [8, 8, 8, 7]
    assert "drafters" not in json.loads(lines[1]) and {len(one) for one in json.loads(lines[1])["rounds"]} == {7}


@pytest.mark.parametrize(
    ("winners", "drafters", "named"),
    [
        ([2], ["a", "b"], r"rounds won by drafters \[2\]"),
        ([-1], ["a", "b"], r"rounds won by drafters \[-1\]"),
        ([0], None, r"rounds won by drafters \[0\] of None"),
        ([], ["a", "b"], "expected winners where accepted > 0"),
    ],
)
def test_winners_that_cannot_be_are_refused(winners: list[int], drafters: list[str] | None, named: str) -> None:
    row = json.loads(won_by([0], drafters=["a"]).to_json())
    row["rounds"][0][7], row["drafters"] = winners, drafters
    with pytest.raises(ValueError, match=named):
        Record.from_json(row)


def test_wins_by_hand() -> None:
    first = won_by([0], [], [0, 1], None, drafters=["a", "b"], prompt_id="p0")
    second = won_by([1], [0, 1], [], drafters=["a", "b"], prompt_id="p1")
    row = row_of([first, second], "drafters")
    assert row["drafter_rounds_won"] == {"a": 3, "b": 3}
    assert row["drafter_win_share"] == {"a": 3 / 6, "b": 3 / 6}  # the round without drafts is nobody's loss
    assert row["drafter_accepted_tokens"] == {"a": 6, "b": 6}
    assert not any(key.startswith("drafter_") for key in row_of(toy_records()))


def test_a_drafter_that_never_won_is_listed_and_no_round_is_no_share() -> None:
    row = row_of([won_by([0], [0], drafters=["a", "b"])], "drafters")
    assert row["drafter_win_share"] == {"a": 1.0, "b": 0.0} and row["drafter_accepted_tokens"] == {"a": 4, "b": 0}
    row = row_of([won_by(None, drafters=["a", "b"])], "drafters")
    assert row["drafter_win_share"] == {"a": None, "b": None}


def test_wins_are_printed_below_their_table() -> None:
    rows = summarize([baseline("p0", 5), won_by([0], [], [0, 1], drafters=["small", "large"], prompt_id="p0")])["rows"]
    note = "Several drafters, rounds won by drafter (a tie counts for each): small 67% (4 tokens), large 33% (2 tokens)"
    assert note in plain_table(rows).splitlines() and note in markdown_table(rows).splitlines()
    assert "rounds won" not in plain_table(summarize(toy_records())["rows"])
