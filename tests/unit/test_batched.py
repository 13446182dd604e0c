"""Several prompts at once: which calls are made in which order, what the rows say, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from record_builder import ToyEncoder, ToyPrompt

from specdiff2.evaluation.batched import BatchedBenchmark
from specdiff2.evaluation.batched_rows import batched_name, split_name
from specdiff2.evaluation.metrics import summarize
from specdiff2.evaluation.records import RECORDS_FILE, Record, read_records
from specdiff2.runtime.rebuild_report import BATCHES_FILE, rebuild
from specdiff2.types import ConfigError, Generation, MismatchError, RoundRecord, SamplingParams


@dataclass
class FakeDecoder:
    """Tokens from the prompt and its random numbers; seconds as told for each batch size."""

    name: str
    log: list[tuple[str, int, int]]  # (name, batch size, prompts)
    seconds: dict[int, float]
    drafts: bool = False
    wrong_at: int | None = None  # a batch size with other tokens
    stop_after: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def generate(self, prompt: Sequence[int], *, rng: Any, **options: Any) -> Generation:
        return self._many([prompt], [rng], 1, options)[0]

    def generate_batch(self, prompts: Any, *, batch_size: int, rngs: Any, **options: Any) -> list[Generation]:
        return self._many(prompts, rngs, batch_size, options)

    def _many(self, prompts: Any, rngs: Any, size: int, options: dict[str, Any]) -> list[Generation]:
        if self.stop_after is not None and len(self.log) >= self.stop_after:
            raise RuntimeError("killed")
        if options["max_new_tokens"] > 32:  # not a warm-up
            self.log.append((self.name, size, len(prompts)))
        return [self._one(prompt, rng, size) for prompt, rng in zip(prompts, rngs, strict=True)]

    def _one(self, prompt: Sequence[int], rng: Any, size: int) -> Generation:
        tokens = [prompt[0], int(rng.categorical(torch.ones(50))), 1 if self.wrong_at == size else 0]
        plain = [RoundRecord(0, 0, 1, 1, 0.0, self.seconds[size] / 3, 0.0)] * 3
        rounds = [RoundRecord(2, 2, 3, 4, 0.0, self.seconds[size], 0.0)] if self.drafts else plain
        return Generation(tokens, rounds, "length", "text", 0.5, self.seconds[size])


def prompts(num: int) -> list[ToyPrompt]:
    return [ToyPrompt(f"p{i}", [{"role": "user", "content": chr(65 + i) * (i + 1)}]) for i in range(num)]


def fakes(log: list[Any] | None = None, **options: Any) -> dict[str, FakeDecoder]:
    log = [] if log is None else log
    plain = {1: 3.0, 2: 1.5, 4: 1.0}
    fast = {1: 1.0, 2: 0.75, 4: 1.0}  # the gain shrinks: 3, 2, 1
    return {
        "autoregressive": FakeDecoder("autoregressive", log, plain),
        "fast": FakeDecoder("fast", log, fast, drafts=True, **options),
    }


def bench(decoders: Any, num: int = 8, **options: Any) -> BatchedBenchmark:
    options = {"batch_sizes": [4, 2], "num_warmup": 1, "max_new_tokens": 40, "progress": False, **options}
    return BatchedBenchmark(prompts(num), ToyEncoder(), decoders, **options)


def test_blocks_are_decoded_with_every_method_and_size_in_turn(tmp_path: Path) -> None:
    log: list[Any] = []
    path = bench(fakes(log), num=9).run(tmp_path)
    one = [("autoregressive", 1, 1)] * 4 + [("fast", 1, 1)] * 4
    assert log[:10] == [*one, ("autoregressive", 2, 4), ("fast", 2, 4)]
    assert log[10:12] == [("autoregressive", 4, 4), ("fast", 4, 4)]
    assert log[12:16] == [("fast", 2, 4), ("autoregressive", 2, 4), ("fast", 4, 4), ("autoregressive", 4, 4)]
    assert log[16:] == one[4:] + one[:4], "another size and another method come first in the next block"
    records = read_records(path)
    assert len(records) == 48 and {record.prompt_id for record in records} == {f"p{i}" for i in range(8)}
    assert {(r.batch_size, r.group, r.method) for r in records if r.prompt_id == "p5" and r.batch_size == 2} == {
        (2, 1, "autoregressive_batch-2"), (2, 1, "fast_batch-2")
    }  # fmt: skip
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt_id, set()).add(tuple(record.tokens))
    assert all(len(tokens) == 1 for tokens in by_prompt.values()), "one seed per prompt, whatever the batch"
    assert len({next(iter(tokens))[1] for tokens in by_prompt.values()}) > 1


def test_rows_compare_with_the_same_batch_size_and_with_one_by_one(tmp_path: Path) -> None:
    rows = {row["method"]: row for row in summarize(read_records(bench(fakes()).run(tmp_path)))["rows"]}
    assert list(rows) == [batched_name(name, size) for size in (1, 2, 4) for name in ("autoregressive", "fast")]
    assert [rows[batched_name("fast", size)]["speedup"] for size in (1, 2, 4)] == pytest.approx([3.0, 2.0, 1.0])
    assert [rows[batched_name("fast", size)]["gain_over_single"] for size in (1, 2, 4)] == pytest.approx([3, 4, 3])
    plain = rows["autoregressive_batch-4"]
    assert plain["speedup"] == 1.0 and plain["gain_over_single"] == pytest.approx(3.0)
    assert plain["tokens_per_s"] == pytest.approx(3.0) and plain["batch_size"] == 4
    assert rows["fast_batch-2"]["speedup_ci"] == pytest.approx([2.0, 2.0])
    assert rows["fast_batch-2"]["speedup_paper"] is None and rows["fast"]["speedup_paper"] is not None
    assert all(row["lossless_check"]["identical"] == 8 for name, row in rows.items() if name != "autoregressive")


def test_intervals_resample_blocks_not_prompts(tmp_path: Path) -> None:
    records = [record for record in read_records(bench(fakes()).run(tmp_path)) if record.group == 0]
    rows = {row["method"]: row for row in summarize(records)["rows"]}
    assert rows["fast_batch-4"]["speedup"] == pytest.approx(1.0)
    assert rows["fast_batch-4"]["speedup_ci"] is None, "one block has no interval, however many prompts"


def test_other_tokens_in_a_batch_are_found(tmp_path: Path) -> None:
    rows = {row["method"]: row for row in summarize(read_records(bench(fakes(wrong_at=2)).run(tmp_path)))["rows"]}
    assert rows["fast_batch-2"]["lossless_check"]["identical"] == 0
    assert rows["fast_batch-4"]["lossless_check"]["identical"] == 8


def test_a_killed_run_decodes_what_is_missing_in_whole_blocks(tmp_path: Path) -> None:
    whole = read_records(bench(fakes()).run(tmp_path / "whole"))
    cut, log = tmp_path / "cut", list[Any]()
    with pytest.raises(RuntimeError, match="killed"):
        bench(fakes(log, stop_after=9)).run(cut)
    lines = (cut / RECORDS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    (cut / RECORDS_FILE).write_text("".join(lines[:-1]) + lines[-1][:20], encoding="utf-8")
    num_whole_turns = (len(lines) - 1) // 4
    log.clear()
    again = read_records(bench(fakes(log)).run(cut))
    assert sorted(r.to_json() for r in again) == sorted(r.to_json() for r in whole)
    assert sum(num for _, _, num in log) == 4 * (12 - num_whole_turns)
    log.clear()
    bench(fakes(log)).run(cut)
    assert log == []
    with pytest.raises(MismatchError, match="batch"):
        bench(fakes(), batch_sizes=[8]).run(cut)


def test_report_and_csv_show_every_batch_size(tmp_path: Path) -> None:
    bench(fakes()).run(tmp_path)
    page = rebuild([tmp_path]).read_text(encoding="utf-8")
    assert "tokens_per_s by batch size" in page and "speedup by batch size" in page and "batch 4" in page
    with (tmp_path / BATCHES_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["batch_size"]) for row in rows][-1] == ("fast_batch-4", "4")
    assert float(rows[-1]["gain_over_single"]) == pytest.approx(3.0)
    json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))


def test_runs_of_one_prompt_at_a_time_say_nothing_of_batches(tmp_path: Path) -> None:
    record = Record("autoregressive", "p", "b", 0, 0.0, [1], "", "length", 0.0, 1.0, [], 0, 0)
    assert "batch_size" not in record.to_json() and "gain_over_single" not in summarize([record])["rows"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": []}, r"batch_sizes=\[\]: expected integers >= 1"),
        ({"batch_sizes": [2, 0]}, r"batch_sizes=\[2, 0\]: expected integers >= 1"),
        ({"batch_sizes": [16]}, "16 prompts at once, and the benchmark has 8"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(fakes(), **options)


def test_a_decoder_without_batches_is_refused() -> None:
    class Single:
        name, sampling = "hf", SamplingParams()

    with pytest.raises(ConfigError, match="method 'hf' decodes one prompt at a time"):
        bench({**fakes(), "hf": Single()})


def test_names() -> None:
    assert [split_name(batched_name(*pair)) for pair in (("a_b", 4), ("a", 1))] == [("a_b", 4), ("a", 1)]
    assert batched_name("a", None) == "a" and split_name("a_batch-x") == ("a_batch-x", 1)
