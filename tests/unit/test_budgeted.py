"""Thinking within a budget of seconds: cuts, answers, grading, resuming, numbers and page, with a scripted clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import PerfectDrafter, Tab, WrongDrafter, char_tokenizer, tiny_verifier

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt
from specdiff2.data.reasoning_gym_prompts import ReasoningGymPrompts
from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.hf_decoder import HFDecoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.accuracy import grade
from specdiff2.evaluation.budgeted import BudgetedBenchmark
from specdiff2.evaluation.budgeted_records import BUDGETED_FILE, BudgetRecord, read_budget_records
from specdiff2.evaluation.budgeted_settings import BudgetSection
from specdiff2.evaluation.budgeted_summary import summarize_budgeted, wilson_interval, write_budgeted_summary
from specdiff2.evaluation.budgeted_thought import Thought, think
from specdiff2.evaluation.report_budgeted import budgeted_section, budgeted_table
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime.budgeted import evaluate_budgeted, report_budgeted
from specdiff2.runtime.config_schema import validate
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams

TOKENIZER = char_tokenizer()
EOS = 2
THOUGHT, CLOSING = "1 + 2 is three.", " stop. so "
GREEDY = SamplingParams(temperature=0.0)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def law(context: tuple[int, ...]) -> torch.Tensor:
    """Thinks THOUGHT; after the closing says 3, or, where the thought had not come to "three", 9."""
    said = TOKENIZER.decode(list(context)).rpartition("assistant: ")[2]
    if CLOSING in said:
        thought, _, answer = said.partition(CLOSING)
        script = ids("3" if "three" in thought else "9")[len(answer) :] or [EOS]
    else:
        script = ids(THOUGHT)[len(said) :] or [EOS]
    return torch.nn.functional.one_hot(torch.tensor(script[0]), len(TOKENIZER)).double()


def clock() -> Callable[[], float]:
    """0 at the start of a thought, then one second a round; every thought starts a second after the last reading."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def section(**changes: Any) -> BudgetSection:
    values = {"seconds": [0.5, 3, 12, 40], "max_thought_tokens": 30, "answer_tokens": 5, "closing": CLOSING}
    return BudgetSection(**{**values, "closing_role": "assistant", **changes})


def prompts(num: int = 2) -> list[Prompt]:
    return [Prompt(f"p{i}", [{"role": "user", "content": f"task {i}"}], answer="3") for i in range(num)]


def decoders(verifier: Tab | None = None) -> dict[str, Any]:
    """One token a round, and four."""
    verifier = verifier or Tab(law, eos_ids=[EOS], sampling=GREEDY, tokenizer=TOKENIZER)
    fast = SpeculativeDecoder(verifier, PerfectDrafter(verifier, 3), rule=make_rule("greedy"))
    return {"autoregressive": AutoregressiveDecoder(verifier), "fast": fast}


def bench(given: Sequence[Prompt] | None = None, methods: dict[str, Any] | None = None, **options: Any):
    settings = options.pop("settings", section())
    options = {"benchmark_name": "toy", "progress": False, "num_warmup": 0, "clock": clock(), **options}
    given, methods = prompts() if given is None else given, methods or decoders()
    return BudgetedBenchmark(given, ChatEncoder(TOKENIZER), methods, settings, **options)


def measured(folder: Path) -> list[BudgetRecord]:
    return read_budget_records(folder / BUDGETED_FILE)


# ---------------------------------------------------------------- thinking and cutting
def test_each_budget_cuts_at_its_last_round(tmp_path: Path) -> None:
    bench(prompts(1)).run(tmp_path)
    rows = [
        (r.method, r.budget_s, r.num_thought_tokens, r.num_rounds, r.thought_s, r.ended, r.answer, r.correct)
        for r in measured(tmp_path)
    ]
    assert rows == [
        ("autoregressive", 0.5, 0, 0, 0.0, None, "9", False),  # less than one round
        ("autoregressive", 3.0, 3, 3, 3.0, None, "9", False),  # a round that ends at the very budget is in
        ("autoregressive", 12.0, 12, 12, 12.0, None, "9", False),
        ("autoregressive", 40.0, 16, 16, 16.0, "eos", "3", True),  # ended before the budget: kept whole
        ("fast", 0.5, 0, 0, 0.0, None, "9", False),
        ("fast", 3.0, 12, 3, 3.0, None, "9", False),
        ("fast", 12.0, 16, 4, 4.0, "eos", "3", True),
        ("fast", 40.0, 16, 4, 4.0, "eos", "3", True),
    ]
    assert [r.thought for r in measured(tmp_path) if r.thought] == [[*ids(THOUGHT), EOS]] * 2


def test_prefill_counts_and_warmup_does_not(tmp_path: Path) -> None:
    """Two seconds of prefill and one for each pass."""

    class Slow(Tab):
        now = 0.0

        def start(self, prompt: Sequence[int], max_new_tokens: int) -> Any:
            self.now += 2.0
            session = super().start(prompt, max_new_tokens)
            score = session.score

            def slow_score(tree: Any) -> Any:
                self.now += 1.0
                return score(tree)

            session.score = slow_score  # type: ignore[method-assign]
            return session

    verifier = Slow(law, eos_ids=[EOS], sampling=GREEDY, tokenizer=TOKENIZER)
    methods = {"autoregressive": AutoregressiveDecoder(verifier)}
    settings = section(seconds=[2.5, 3, 5.9])
    bench(prompts(1), methods, settings=settings, num_warmup=2, clock=lambda: verifier.now).run(tmp_path)
    assert [(r.num_thought_tokens, r.thought_s) for r in measured(tmp_path)] == [(0, 0.0), (1, 3.0), (3, 5.0)]


def test_one_thought_serves_all_budgets(tmp_path: Path) -> None:
    """What a budget sees does not depend on the other budgets."""
    bench().run(tmp_path / "all")
    together = {(r.method, r.prompt_id, r.budget_s): r for r in measured(tmp_path / "all")}
    for budget_s in section().seconds:
        bench(settings=section(seconds=[budget_s])).run(tmp_path / str(budget_s))
        for alone in measured(tmp_path / str(budget_s)):
            other = together[alone.method, alone.prompt_id, alone.budget_s]
            for name in ("num_thought_tokens", "num_rounds", "thought_s", "ended", "answer", "correct"):
                assert getattr(alone, name) == getattr(other, name), (budget_s, name)


def test_thinking_stops_at_the_largest_budget_and_equal_parts_are_answered_once(tmp_path: Path) -> None:
    verifier = Tab(law, eos_ids=[EOS], sampling=GREEDY, tokenizer=TOKENIZER)
    methods = {"autoregressive": AutoregressiveDecoder(verifier)}
    bench(prompts(1), methods, settings=section(seconds=[1, 2])).run(tmp_path / "cut")
    assert verifier.num_forwards == 3 + 2 * 2  # the third round came too late; two answers of a digit and EOS
    verifier.num_forwards = 0
    bench(prompts(1), methods, settings=section(seconds=[30, 35, 40])).run(tmp_path / "whole")
    assert verifier.num_forwards == 16 + 2


def test_a_thought_that_reaches_the_cap_is_told_apart(tmp_path: Path) -> None:
    bench(prompts(1), settings=section(max_thought_tokens=5)).run(tmp_path)
    assert [(r.num_thought_tokens, r.ended) for r in measured(tmp_path)][:4] == [
        (0, None), (3, None), (5, "length"), (5, "length")
    ]  # fmt: skip
    row = summarize_budgeted(measured(tmp_path))[-1]
    assert (row["share_finished"], row["share_capped"]) == (0.0, 1.0)


def test_stop_rules_end_a_thought(tmp_path: Path) -> None:
    bench(prompts(1), stop_strings=["is"]).run(tmp_path)
    assert [r.ended for r in measured(tmp_path)][3] == "stop"
    assert [r.num_thought_tokens for r in measured(tmp_path)][3] == len("1 + 2 is")


def test_any_decoder_that_streams_can_be_stopped() -> None:
    verifier = tiny_verifier(len(TOKENIZER), tokenizer=TOKENIZER, eos_ids=[])
    for decoder in (HFDecoder(verifier), AutoregressiveDecoder(verifier)):
        thought = think(
            decoder, [5, 6, 7], budget_s=4.0, max_tokens=20, rng=TorchRandomSource(0), stop_ids=(), stop_strings=(),
            clock=clock(),
        )  # fmt: skip
        whole = decoder.generate([5, 6, 7], max_new_tokens=20, rng=TorchRandomSource(0)).tokens
        assert (thought.tokens, thought.stop_reason, thought.num_tokens) == (whole[:4], None, [1, 2, 3, 4])
    assert Thought().within(3.0) == Thought()


# ---------------------------------------------------------------- closing
@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("assistant", f"<s>user: task 0</s><s>assistant: {THOUGHT}{CLOSING}"),  # without the EOS that ended it
        ("user", f"<s>user: task 0</s><s>assistant: {THOUGHT}</s><s>user: {CLOSING}</s><s>assistant: "),
    ],
)
def test_the_closing_goes_through_the_chat_format(role: str, expected: str) -> None:
    runner = bench(prompts(1), settings=section(closing_role=role))
    closed = runner._closed(prompts(1)[0], [*ids(THOUGHT), EOS])
    assert TOKENIZER.decode(closed) == expected
    cut = TOKENIZER.decode(runner._closed(prompts(1)[0], ids("1 +")))  # nothing of a cut thought is left out
    assert cut == expected.replace(THOUGHT, "1 +")


def test_answers_are_greedy_where_thoughts_are_not() -> None:
    uniform = Tab([0.0] * 5 + [0.6, 0.4], eos_ids=[], tokenizer=TOKENIZER)
    method = AutoregressiveDecoder(uniform, sampling=SamplingParams(temperature=1.0))
    runner = bench(prompts(1), {"a": method})
    assert {tuple(runner._answer(prompts(1)[0], method, [5, 6]).tokens) for _ in range(5)} == {(5,) * 5}
    assert method.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": []}, "budget.seconds"),
        ({"seconds": [2, 1]}, "ascending"),
        ({"seconds": [1, 1]}, "none twice"),
        ({"seconds": [0, 1]}, "> 0"),
        ({"seconds": [float("nan")]}, "> 0"),
        ({"answer_tokens": 0}, "budget.answer_tokens=0"),
        ({"closing": " "}, "budget.closing"),
        ({"closing_role": "system"}, "budget.closing_role='system'"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**changes)


def test_prompts_that_cannot_be_graded_or_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be graded"):
        bench([Prompt("p", [{"role": "user", "content": "x"}])])
    small = Tab(law, eos_ids=[EOS], sampling=GREEDY, tokenizer=TOKENIZER, max_length=40)
    with pytest.raises(ConfigError, match="beyond the verifier's context of 40"):
        bench(methods={"autoregressive": AutoregressiveDecoder(small)})


# ---------------------------------------------------------------- order and resuming
def test_methods_take_turns_and_rotate(tmp_path: Path) -> None:
    bench(prompts(3)).run(tmp_path)
    turns = [(r.prompt_id, r.method, r.order) for r in measured(tmp_path)][::4]
    assert turns == [
        ("p0", "autoregressive", 0), ("p0", "fast", 1), ("p1", "fast", 0), ("p1", "autoregressive", 1),
        ("p2", "autoregressive", 0), ("p2", "fast", 1),
    ]  # fmt: skip


def without_seconds(records: Sequence[BudgetRecord]) -> list[dict[str, Any]]:
    rows = [json.loads(record.to_json()) for record in records]
    return sorted(
        ({**row, "answer_s": 0.0} for row in rows), key=lambda r: (r["method"], r["prompt_id"], r["budget_s"])
    )


def test_a_killed_run_goes_on_with_whole_thoughts(tmp_path: Path) -> None:
    bench(prompts(3)).run(tmp_path / "whole")
    bench(prompts(3)).run(tmp_path / "killed")
    path = tmp_path / "killed" / BUDGETED_FILE
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:10]) + b"\n" + lines[10][:30])  # two and a half thoughts
    verifier = Tab(law, eos_ids=[EOS], sampling=GREEDY, tokenizer=TOKENIZER)
    bench(prompts(3), decoders(verifier)).run(tmp_path / "killed")
    assert without_seconds(measured(tmp_path / "killed")) == without_seconds(measured(tmp_path / "whole"))
    assert path.read_bytes().split(b"\n")[:8] == lines[:8]  # what was whole is kept as it was
    before, verifier.num_forwards = path.read_bytes(), 0
    bench(prompts(3), decoders(verifier), num_warmup=1).run(tmp_path / "killed")
    assert (path.read_bytes(), verifier.num_forwards) == (before, 0)


@pytest.mark.parametrize("change", [{"seed": 1}, {"settings": section(seconds=[1])}, {"stop_strings": ["x"]}])
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    bench(prompts(1)).run(tmp_path)
    with pytest.raises(MismatchError, match=r"was measured with (seed|budget|stop_strings)=.*use another folder"):
        bench(prompts(1), **change).run(tmp_path)


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = bench(prompts(1)).run(tmp_path)
    path.write_text(path.read_text() + '{"method": "x"}\n')
    with pytest.raises(CorruptFileError, match=r"budgeted\.jsonl:9: not a record of task=budgeted"):
        bench(prompts(1)).run(tmp_path)


# ---------------------------------------------------------------- grading
@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        (" 18.\n\nTime is 20", "18", True),  # what follows the first line is chat
        ("18 apples", "#### 18", True),
        ("$1,234", "1234", True),
        ("19", "18", False),
        ("", "18", False),
        ("Answer:\n18", "18", True),
        ("<think>18", "18", False),  # a thinking block that was cut off leaves no answer
        ("<think>7</think> 18", "18", True),
        ("(3,4)", "(3, 4)", True),
        ("(4,3)", "(3, 4)", False),
        (r"$\frac{28}{6}$", r"\frac{14}{3}", True),
        ("14/3", r"\frac{14}{3}", True),
        (r"\frac{", r"\frac{14}{3}", False),
        ("2x + x^2", "x^2+2x", True),
        ("(B) because", "B", True),
        ("The answer is B because", "B", True),
        ("Answer: **C**", "C", True),
        ("A train", "A", False),
        ("B", "A", False),
    ],
)
def test_short_answers(text: str, answer: str, correct: bool) -> None:
    verdict = grade(text, answer)
    assert (verdict.correct, verdict.error) == (correct, None)


def test_the_scorer_of_the_data_set_decides() -> None:
    seen: list[str] = []
    partly = lambda text: seen.append(text) or 0.5  # noqa: E731
    assert (grade("60 + 93 = 153.", "153", partly).correct, seen) == (False, ["153"])
    assert grade("The final answer is **nus**.", "nus", lambda text: float(text == "nus")).correct
    assert grade("x", None, lambda text: 1.0).correct
    broken = grade("x", "y", lambda text: float(text))
    assert (broken.correct, broken.score) == (False, 0.0)
    assert broken.error is not None and broken.error.startswith("ValueError: could not convert")
    assert grade("x", "y", lambda text: float("nan")).error == "the scorer gave nan"


# ---------------------------------------------------------------- reasoning-gym
def test_reasoning_gym_prompts_grade_themselves() -> None:
    source = ReasoningGymPrompts(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, num_prompts=30, seed=1,
        examples=[{"question": "1 + 1?", "answer": "2"}], template="{prompt} Think.",
    )  # fmt: skip
    found = source.load()
    assert len({p.prompt_id for p in found}) == len({p.messages[-1]["content"] for p in found}) == 30
    for prompt in found:
        assert [m["role"] for m in prompt.messages] == ["user", "assistant", "user"]
        question = prompt.messages[-1]["content"]
        assert question.endswith(" Think.")
        value = eval(question.split(":")[1].split("=")[0])  # arithmetic of our own making
        assert prompt.answer == str(value)
        scorer = prompt.meta["score_answer"]
        assert grade(f" {value}.", prompt.answer, scorer).correct
        assert not grade(f" {value + 1}.", prompt.answer, scorer).correct
    assert [p.messages for p in source.load()] == [p.messages for p in found]
    other = {p.messages[-1]["content"] for p in ReasoningGymPrompts(**{**vars(source), "seed": 2}).load()}
    assert len(other & {p.messages[-1]["content"] for p in found}) < 20  # 200 questions exist
    json.dumps(source.describe())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chain_sums"}, r"no such task.*near: chain_sum"),
        ({"dataset": "chain_sum", "config": {"min_terms": 0}}, "refuses config"),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "refuses config"),
        ({"dataset": "chain_sum", "config": {"seed": 2}}, "use num_prompts and seed"),
        ({"dataset": "chain_sum", "examples": [{"question": "?"}]}, "question and answer"),
        ({"dataset": "coin_flip", "config": {"min_trials": 3, "max_trials": 3}, "num_prompts": 50}, "ask for fewer"),
    ],
)
def test_bad_reasoning_gym_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReasoningGymPrompts(**arguments).load()


# ---------------------------------------------------------------- numbers
def record(method: str, prompt: int, correct: bool, **changes: Any) -> BudgetRecord:
    values = dict(
        method=method, benchmark="toy", prompt_id=f"p{prompt}", prompt_index=prompt, order=0, seed=0, temperature=0.0,
        gamma=3, num_drafts=1, runtime="eager", budget_s=1.0, num_thought_tokens=10, num_rounds=5, thought_s=1.0,
        ended=None, answer="", num_answer_tokens=1, answer_s=0.1, correct=correct, score=float(correct),
    )  # fmt: skip
    return BudgetRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_wilson_interval() -> None:
    assert wilson_interval(0, 0) is None
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29
    for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                         (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert wilson_interval(successes, trials) == pytest.approx([low, high], abs=5e-5)
    assert wilson_interval(7, 7)[1] == 1.0  # type: ignore[index]


def test_rows_by_hand() -> None:
    base = [record("autoregressive", i, i == 0, thought=[1, 2, 3]) for i in range(4)]
    fast = [record("fast", i, i < 3, num_thought_tokens=30, thought=[1, 2, 3, 4], thought_s=0.75, ended="eos")
            for i in range(3)]  # fmt: skip
    fast.append(record("fast", 3, False, num_thought_tokens=30, thought=[1, 9], scorer_error="x", thought_s=0.75))
    slow, quick = summarize_budgeted([*base, *fast])
    assert (slow["method"], slow["accuracy"]) == ("autoregressive", {"graded": 4, "correct": 1, "accuracy": 0.25})
    assert (slow["speedup"], slow["accuracy_difference"], slow["lossless_check"]) == (1.0, None, None)
    assert (quick["accuracy_difference"], quick["num_paired"], quick["num_scorer_errors"]) == (0.5, 4, 1)
    assert quick["accuracy_difference_ci"][0] >= 0.0 and quick["accuracy_difference_ci"][1] == 1.0
    assert (quick["tokens_thought"], quick["tau"], quick["tokens_per_s"], quick["speedup"]) == (30, 6, 40, 4)
    assert (quick["share_finished"], quick["share_capped"]) == (0.75, 0.0)
    # thoughts of different length agree as far as both go: three do, the last one leaves at its second token
    check = quick["lossless_check"]
    assert (check["checked"], check["identical"]) == (4, 3)
    assert check["first_divergences"] == [{"prompt_id": "p3", "position": 1, "expected": 2, "got": 9}]


def test_no_baseline_and_no_tokens_give_null() -> None:
    (row,) = summarize_budgeted([record("fast", 0, True, num_thought_tokens=0, num_rounds=0, thought_s=0.0)])
    empty = ("tokens_per_s", "tau", "speedup", "speedup_ci", "accuracy_difference", "accuracy_difference_ci")
    assert [row[key] for key in empty] == [None] * len(empty)
    json.dumps(row, allow_nan=False)


# ---------------------------------------------------------------- page and whole run
def test_page_and_table_show_every_method_and_budget(tmp_path: Path) -> None:
    bench().run(tmp_path)
    summary = write_budgeted_summary(tmp_path)
    page, text = budgeted_section(summary["rows"]), budgeted_table(summary["rows"])
    assert page.count("<svg") == 2 and page.count("<tr>") == 1 + 8
    assert 'aria-label="accuracy over budget"' in page
    assert page.count("100.0% [") == text.count("100.0% [") == 3
    assert "+100.0 points [100.0, 100.0]" in text
    assert "2 of 2 outputs equal" in text
    assert "No thought was measured" in budgeted_section([])


def test_whole_run_with_tiny_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tiny_verifier(len(TOKENIZER), tokenizer=TOKENIZER, eos_ids=[EOS])
    rule = make_rule("greedy")
    methods = {
        "autoregressive": AutoregressiveDecoder(verifier),
        "perfect": SpeculativeDecoder(verifier, PerfectDrafter(verifier, 3), rule=rule),
        "wrong": SpeculativeDecoder(verifier, WrongDrafter(verifier, 3), rule=rule),
    }
    budget = {"seconds": [1e-6, 60.0], "max_thought_tokens": 12, "answer_tokens": 4, "closing": CLOSING}
    config = {"budget": {**budget, "closing_role": "user"}, "seed": 0, "num_warmup": 1, "stop_ids": [], "stop": []}
    sources = {"first": prompts(2), "second": prompts(3)}
    report = evaluate_budgeted(config, verifier, methods, sources, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["rows"]) == 2 * 3 * 2
    whole = [row for row in summary["rows"] if row["budget_s"] == 60.0]
    assert all(row["tokens_thought"] > 0 and row["share_finished"] + row["share_capped"] == 1.0 for row in whole)
    assert all(row["tokens_thought"] == 0 for row in summary["rows"] if row["budget_s"] < 1)
    checks = [row["lossless_check"] for row in whole if row["method"] != "autoregressive"]
    assert [(c["checked"], c["identical"]) for c in checks] == [(2, 2), (2, 2), (3, 3), (3, 3)]
    answers = {(r.benchmark, r.prompt_id, r.budget_s): set() for r in measured(tmp_path)}
    for one in measured(tmp_path):
        answers[one.benchmark, one.prompt_id, one.budget_s].add(one.answer)
    assert all(len(texts) == 1 for texts in answers.values())  # equal thoughts, equal answers
    before = report.read_text()
    assert report_budgeted(tmp_path).read_text() == before
    assert "minus the verifier alone" in capsys.readouterr().out


@dataclass
class _Holder:
    node: Mapping[str, Any]


def test_the_configuration_files_are_valid() -> None:
    conf = Path(__file__).resolve().parents[2] / "conf"
    budget = yaml.safe_load((conf / "budget" / "default.yaml").read_text())
    validate(budget, BudgetSection)
    assert BudgetSection(**budget).closing.startswith("\n")
    benchmark = yaml.safe_load((conf / "benchmark" / "reasoning_gym.yaml").read_text())
    validate({"node": {**benchmark, "dataset": "gcd"}}, _Holder)
    with pytest.raises(ConfigError, match="unknown setting 'second'"):
        validate({**budget, "second": [1]}, BudgetSection)
