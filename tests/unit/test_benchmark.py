"""The benchmark: interleaving, seeds, warm-up, resuming, refusals; and the explanation of divergences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Script, Tab, byte_tokenizer, tiny_verifier
from record_builder import ToyEncoder, ToyPrompt

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.agreement import divergences
from specdiff2.evaluation.benchmark import Benchmark, prompt_seed, token_pieces
from specdiff2.evaluation.decoder_info import describe_decoder, model_digest
from specdiff2.evaluation.divergence import explain_divergences
from specdiff2.evaluation.metrics import summarize, write_summary
from specdiff2.evaluation.records import RECORDS_FILE, Record, read_records
from specdiff2.evaluation.report import write_report
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, CorruptFileError, Generation, MismatchError, RoundRecord, SamplingParams


@dataclass
class FakeDecoder:
    """Writes (name, prompt, a random number) to a shared log."""

    name: str
    log: list[tuple[str, tuple[int, ...], float]] = field(default_factory=list)
    fail_at: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.5))
    max_seen: int = 0

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        rng: RandomSource,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        on_tokens: Any = None,
    ) -> Generation:
        if self.fail_at is not None and len(self.log) >= self.fail_at:
            raise RuntimeError("killed")
        self.max_seen = max(self.max_seen, max_new_tokens)
        draw = float(rng.categorical(torch.ones(1000)))
        self.log.append((self.name, tuple(prompt), draw))
        return Generation([1, 2], [RoundRecord(2, 1, 2, 3, 0.1, 0.2, 0.0)], "length", "text", 0.5, 0.3)


def toy_prompts(num: int) -> list[ToyPrompt]:
    return [ToyPrompt(f"p{i}", [{"role": "user", "content": "q" * (i + 1)}], answer=str(i)) for i in range(num)]


def fakes(*names: str, **options: Any) -> dict[str, FakeDecoder]:
    log: list[tuple[str, tuple[int, ...], float]] = []
    return {name: FakeDecoder(name, log, **options) for name in names}


def bench(prompts: Sequence[ToyPrompt], decoders: Any, **options: Any) -> Benchmark:
    options = {"benchmark_name": "toy", "progress": False, "num_warmup": 0, "max_new_tokens": 4, **options}
    return Benchmark(prompts, ToyEncoder(num_ids=5), decoders, **options)


def measured(folder: Path) -> list[Record]:
    return [record for record in read_records(folder / RECORDS_FILE) if not record.warmup]


# ---------------------------------------------------------------- running
def test_methods_are_interleaved_and_rotated(tmp_path: Path) -> None:
    decoders = fakes("a", "b", "c")
    bench(toy_prompts(4), decoders).run(tmp_path)
    names = [name for name, _, _ in decoders["a"].log]
    assert names == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    records = measured(tmp_path)
    assert [record.method for record in records] == names
    assert [record.order for record in records] == [0, 1, 2] * 4
    assert [record.prompt_id for record in records[::3]] == ["p0", "p1", "p2", "p3"]


def test_one_seed_per_prompt_shared_by_all_methods(tmp_path: Path) -> None:
    decoders = fakes("a", "b")
    bench(toy_prompts(5), decoders, seed=3).run(tmp_path)
    draws: dict[tuple[int, ...], set[float]] = {}
    for _, prompt, draw in decoders["a"].log:
        draws.setdefault(prompt, set()).add(draw)
    assert all(len(values) == 1 for values in draws.values())
    assert len({next(iter(values)) for values in draws.values()}) > 1
    assert prompt_seed(3, 0) == prompt_seed(3, 0)
    assert len({prompt_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


def test_records_hold_what_happened(tmp_path: Path) -> None:
    bench(toy_prompts(1), fakes("a"), seed=5, stop_strings=["x"]).run(tmp_path)
    record = measured(tmp_path)[0]
    assert (record.benchmark, record.seed, record.temperature, record.answer) == ("toy", 5, 0.5, "0")
    assert record.prompt_ids == [ord("q") % 5]
    assert (record.tokens, record.prefill_s, record.decode_s, record.stop_reason) == ([1, 2], 0.5, 0.3, "length")
    assert record.rounds == [RoundRecord(2, 1, 2, 3, 0.1, 0.2, 0.0)]


def test_warmup_is_apart_and_short(tmp_path: Path) -> None:
    decoders = fakes("a", "b")
    bench(toy_prompts(2), decoders, num_warmup=3, max_new_tokens=100).run(tmp_path)
    records = read_records(tmp_path / RECORDS_FILE)
    assert [record.warmup for record in records] == [True] * 6 + [False] * 4
    assert {row["num_prompts"] for row in summarize(records)["rows"]} == {2}
    assert decoders["a"].max_seen == 100


def test_progress_bar_names_the_eta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(toy_prompts(2), fakes("a"), progress=True, num_warmup=1).run(tmp_path)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "<00:00" in shown


# ---------------------------------------------------------------- resuming
def test_error_propagates_and_a_second_run_continues(tmp_path: Path) -> None:
    decoders = fakes("a", "b")
    decoders["b"].fail_at = 5
    with pytest.raises(RuntimeError, match="killed"):
        bench(toy_prompts(4), decoders).run(tmp_path)
    assert len(measured(tmp_path)) == 5
    path = tmp_path / RECORDS_FILE
    path.write_bytes(path.read_bytes() + b'{"method": "b", "prompt')  # killed while writing

    again = fakes("a", "b")
    bench(toy_prompts(4), again).run(tmp_path)
    assert len(again["a"].log) == 3
    pairs = [(record.method, record.prompt_id) for record in measured(tmp_path)]
    assert len(pairs) == len(set(pairs)) == 8

    fresh = tmp_path / "fresh"
    bench(toy_prompts(4), fakes("a", "b")).run(fresh)
    assert sorted(pairs) == sorted((record.method, record.prompt_id) for record in measured(fresh))


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    bench(toy_prompts(2), fakes("a")).run(tmp_path)
    before = (tmp_path / RECORDS_FILE).read_bytes()
    again = fakes("a")
    bench(toy_prompts(2), again, num_warmup=2).run(tmp_path)
    assert again["a"].log == []
    assert (tmp_path / RECORDS_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed=0, now seed=1"),
        ({"max_new_tokens": 5}, r"max_new_tokens=4, now max_new_tokens=5"),
        ({"stop_strings": ["x"]}, r"stop_strings=\[\], now"),
        ({"stop_ids": [3]}, r"stop_ids=\[\], now stop_ids=\[3\]"),
        ({"benchmark_name": "other"}, r"benchmark='toy', now benchmark='other'"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    bench(toy_prompts(2), fakes("a")).run(tmp_path)
    with pytest.raises(MismatchError, match=message + r".*use another folder"):
        bench(toy_prompts(2), fakes("a"), **change).run(tmp_path)


def test_other_prompts_decoders_or_temperature_are_refused(tmp_path: Path) -> None:
    bench(toy_prompts(2), fakes("a")).run(tmp_path)
    with pytest.raises(MismatchError, match="num_prompts=2, now num_prompts=3"):
        bench(toy_prompts(3), fakes("a")).run(tmp_path)
    with pytest.raises(MismatchError, match=r"decoders\.b"):
        bench(toy_prompts(2), fakes("a", "b")).run(tmp_path)
    with pytest.raises(MismatchError, match=r"decoders\.a\.temperature=0\.5, now decoders\.a\.temperature=0\.7"):
        bench(toy_prompts(2), fakes("a", sampling=SamplingParams(temperature=0.7))).run(tmp_path)


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    bench(toy_prompts(2), fakes("a")).run(tmp_path)
    (tmp_path / "benchmark.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"benchmark\.json is not JSON.*use another folder"):
        bench(toy_prompts(2), fakes("a")).run(tmp_path)


def test_what_decides_the_seconds_is_part_of_the_fingerprint() -> None:
    verifier = tiny_verifier(dtype=torch.bfloat16)
    found = bench(toy_prompts(1), {"a": AutoregressiveDecoder(verifier)}).fingerprint()
    assert found["threads"] == torch.get_num_threads()
    assert (found["decoders"]["a"]["verifier_dtype"], found["decoders"]["a"]["verifier_device"]) == ("bfloat16", "cpu")


def test_stop_ids_reach_every_decoder(tmp_path: Path) -> None:
    prompts = [ToyPrompt("z", [{"role": "user", "content": chr(55)}])]  # encodes to [0]
    bench(prompts, engine_decoders(), max_new_tokens=10, stop_ids=[2]).run(tmp_path)
    assert {(tuple(one.tokens), one.stop_reason) for one in measured(tmp_path)} == {((1, 2), "stop")}


# ---------------------------------------------------------------- refusals before any work
def test_bad_settings_are_refused() -> None:
    good = toy_prompts(1)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        bench(good, fakes("a"), max_new_tokens=0)
    with pytest.raises(ConfigError, match="num_warmup=-1"):
        bench(good, fakes("a"), num_warmup=-1)
    with pytest.raises(ConfigError, match="no prompts"):
        bench([], fakes("a"))
    with pytest.raises(ConfigError, match="no decoders"):
        bench(good, {})
    with pytest.raises(ConfigError, match="'p0' occurs twice"):
        bench(good + good, fakes("a"))
    with pytest.raises(ConfigError, match="'e' encodes to no tokens"):
        bench([ToyPrompt("e", [{"role": "user", "content": ""}])], fakes("a"))
    verifier = Tab([0.5, 0.5], max_length=5, sampling=SamplingParams(temperature=0.0))
    with pytest.raises(ConfigError, match=r"'p1' has 2 tokens.*context of 5"):
        bench(toy_prompts(2), {"a": AutoregressiveDecoder(verifier)})


def test_a_decoder_must_tell_its_temperature() -> None:
    with pytest.raises(ConfigError, match="decoder 'a' does not tell its temperature"):
        bench(toy_prompts(1), fakes("a", sampling=None))


# ---------------------------------------------------------------- with the real engine
def counting_law(context: tuple[int, ...]) -> list[float]:
    """After token t comes t + 1 (mod 5); token 4 is EOS."""
    return [float(token == (context[-1] + 1) % 5) for token in range(5)]


def engine_decoders(temperature: float = 0.0) -> dict[str, Any]:
    verifier = Tab(counting_law, eos_ids=[4], sampling=SamplingParams(temperature=temperature))
    return {
        "autoregressive": AutoregressiveDecoder(verifier),
        "right": SpeculativeDecoder(verifier, Script([1, 2, 3, 4], 5), rule=make_rule("greedy")),
        "tree": SpeculativeDecoder(
            verifier, Script([[1, 0, 0, 0], [1, 2, 0, 0]], 5), rule=make_rule("tree_match"), num_drafts=2
        ),
    }


def test_engine_end_to_end(tmp_path: Path) -> None:
    prompts = [ToyPrompt(f"z{i}", [{"role": "user", "content": chr(55)}]) for i in range(3)]  # encodes to [0]
    decoders = engine_decoders()
    bench(prompts, decoders, max_new_tokens=10).run(tmp_path)
    summary = write_summary(tmp_path)
    rows = {row["method"]: row for row in summary["rows"]}
    assert all(record.tokens == [1, 2, 3, 4] for record in measured(tmp_path))
    # one round: all four drafted tokens accepted, the last is EOS, so no bonus token
    assert (rows["right"]["mean_streak"], rows["right"]["tau"]) == (4.0, 4.0)
    assert rows["right"]["accept_rate"] == [1.0] * 4
    assert rows["right"]["lossless_check"]["identical"] == 3
    assert rows["right"]["stop_reasons"]["eos"] == 3
    # round one accepts [1, 2] and adds 3; in round two no chain starts with 4
    assert (rows["tree"]["mean_streak"], rows["tree"]["tau"]) == (1.0, 2.0)
    assert rows["tree"]["num_drafts"] == 2
    assert (rows["autoregressive"]["mean_streak"], rows["autoregressive"]["tau"]) == (0.0, 1.0)
    assert write_report(tmp_path).exists()


def test_description_of_real_decoders() -> None:
    described = describe_decoder(engine_decoders(0.7)["tree"])
    assert described["temperature"] == 0.7
    assert (described["gamma"], described["num_drafts"], described["rule"]) == (4, 2, "tree_match")
    assert described["verifier"] == "tab"
    json.dumps(described, allow_nan=False)
    module = torch.nn.Linear(3, 3)
    digest = model_digest(module)
    with torch.no_grad():
        module.weight[0, 0] += 1.0
    assert digest is not None and model_digest(module) != digest
    assert model_digest(object()) is None


def test_pieces_join_to_the_text_across_cut_characters() -> None:
    tokenizer = byte_tokenizer()
    text = "12 + 30 = 42 \N{SNOWMAN}\N{GRINNING FACE} é.\n<b>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = token_pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text
    assert token_pieces(tokenizer, [*tokens[:-1], tokenizer.eos_token_id])[-1] == "</s>"


def test_samples_hold_pieces(tmp_path: Path) -> None:
    class Encoder(ToyEncoder):
        tokenizer = byte_tokenizer()

    Benchmark(toy_prompts(3), Encoder(), fakes("a"), num_samples=1, progress=False, num_warmup=0).run(tmp_path)
    records = measured(tmp_path)
    assert [record.pieces is not None for record in records] == [True, False, False]
    assert records[0].prompt == "q"


# ---------------------------------------------------------------- divergences
def test_divergences_are_explained_by_the_verifier(tmp_path: Path) -> None:
    verifier = tiny_verifier()
    prompt, tokens = [5, 6, 7], [1, 2, 3]
    logits = verifier.model(torch.tensor([[*prompt, 1]])).logits[0, -1, : verifier.vocab_size]
    best, second = (int(index) for index in logits.topk(2).indices)
    common = {"benchmark": "toy", "seed": 0, "temperature": 0.0, "text": "", "stop_reason": "length", "prefill_s": 0.0,
              "decode_s": 1.0, "rounds": [], "gamma": 0, "num_drafts": 0, "prompt_ids": prompt}  # fmt: skip
    records = [
        Record(method="autoregressive", prompt_id="a", tokens=[1, best, 3], **common),
        Record(method="fast", prompt_id="a", tokens=[1, second, 9], **common),
        Record(method="autoregressive", prompt_id="b", tokens=tokens, **common),
        Record(method="fast", prompt_id="b", tokens=tokens, **common),
        Record(method="autoregressive", prompt_id="c", tokens=tokens, **common),
        Record(method="fast", prompt_id="c", tokens=tokens[:2], **common),
        Record(method="fast", prompt_id="a", tokens=[9], **{**common, "temperature": 1.0}),
    ]
    found = explain_divergences(verifier, records, tmp_path)
    assert found == json.loads((tmp_path / "divergences.json").read_text(encoding="utf-8"))
    assert found["dtype"] == "float32"
    summary = found["methods"][0]
    assert (summary["method"], summary["checked"], summary["diverged"]) == ("fast", 3, 2)
    assert summary["num_unexplained"] == 2  # one far from a tie, one that ended early
    first, ended = found["divergences"]
    assert (first["position"], first["expected"], first["got"], first["top2"]) == (1, best, second, [best, second])
    gap = float(logits[best].detach() - logits[second].detach())
    assert first["margin"] == pytest.approx(gap, rel=1e-4)
    assert first["top2_margin"] == pytest.approx(gap, rel=1e-4)
    exponent = torch.floor(torch.log2(logits[best].detach().abs()))
    assert first["margin_ulp"] == pytest.approx(gap / (2.0**-23 * 2.0 ** float(exponent)), rel=1e-3)
    assert (ended["got"], ended["margin"], ended["margin_ulp"]) == (None, None, None)


def test_only_shared_prompts_are_compared() -> None:
    common: dict[str, Any] = {
        "benchmark": "toy", "seed": 0, "temperature": 0.0, "text": "", "stop_reason": "length", "prefill_s": 0.0,
        "decode_s": 1.0, "rounds": [], "gamma": 0, "num_drafts": 0,
    }  # fmt: skip
    left = [Record(method="x", prompt_id="a", tokens=[1], **common)]
    right = [Record(method="y", prompt_id="b", tokens=[2], **common)]
    assert divergences(left, right) == (0, [])
