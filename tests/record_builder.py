"""Hand-made evaluation records and run folders for the tests of metrics, reports and sweeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter
from specdiff2.runtime.grid import grid_methods
from specdiff2.types import RoundRecord

RUN = {
    "command": "python eval.py sampler.K=8",
    "commit": "abc123",
    "machine": "Test CPU, 2 cores",
    "dtype": "float32",
    "threads": 1,
    "runtime": "torch eager",
    "seed": 7,
    "versions": {"torch": "2"},
    "config": {"sampler": {"K": 8}},
}
GRID_CONFIG: dict[str, Any] = {
    "sampler": {"name": "specdiff2", "K": 1, "gamma": 8},
    "grid": {"K": [1, 4], "gamma": [2, 4]},
    "methods": None,
}


@dataclass
class ToyPrompt:
    prompt_id: str
    messages: list[dict[str, Any]]
    answer: str | None = None


@dataclass
class ToyEncoder:
    """ids = character codes of the last message, modulo ``num_ids``."""

    num_ids: int = 0x110000
    tokenizer: ClassVar[Any] = None

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return [ord(character) % self.num_ids for character in messages[-1]["content"]]


def record(
    method: str = "specdiff2",
    prompt_id: str = "p0",
    rounds: Sequence[tuple[int, int, int]] = ((4, 2, 3),),
    *,
    round_s: tuple[float, float, float] = (0.01, 0.02, 0.001),
    **changes: Any,
) -> Record:
    """``rounds``: (drafted, accepted, committed); tokens, decode seconds and gamma follow from them."""
    built = [RoundRecord(d, a, c, 1 + d, *round_s) for d, a, c in rounds]
    drafts = max((d for d, _, _ in rounds), default=0)
    values: dict[str, Any] = {
        "benchmark": "toy",
        "seed": 0,
        "temperature": 0.0,
        "tokens": list(range(10, 10 + sum(c for _, _, c in rounds))),
        "text": "the total is 42",
        "stop_reason": "length",
        "prefill_s": 0.05,
        "decode_s": sum(round_s) * len(rounds),
        "gamma": drafts,
        "num_drafts": 1 if drafts else 0,
    }
    return Record(method=method, prompt_id=prompt_id, rounds=built, **{**values, **changes})


def baseline(prompt_id: str = "p0", num_tokens: int = 3, **changes: Any) -> Record:
    """One token a round."""
    options: dict[str, Any] = {"round_s": (0.0, 0.03, 0.001), **changes}
    return record("autoregressive", prompt_id, [(0, 0, 1)] * num_tokens, **options)


def write_run(folder: Path, records: Sequence[Record], **run: Any) -> Path:
    """A finished evaluation folder: run.json, records.jsonl, summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**RUN, **run}), encoding="utf-8")
    with RecordWriter(folder / RECORDS_FILE) as writer:
        for one in records:
            writer.append(one)
    write_summary(folder)
    return folder


def toy_records(num_prompts: int = 4) -> list[Record]:
    """Baseline, a drafter before, the same after; prompt 0 has token texts."""
    rows = []
    for index in range(num_prompts):
        prompt_id = f"p{index}"
        extra: dict[str, Any] = {"prompt_index": index, "answer": "42"}
        if index == 0:
            pieces = ["<b>12", " +", " 30", " &", "\n", "42"]
            extra |= {"pieces": pieces, "prompt": "How many <i>apples</i>?"}
        rows.append(baseline(prompt_id, 6, **extra))
        rows.append(record("specdiff", prompt_id, [(4, 1, 2), (4, 0, 1), (4, 1, 2), (0, 0, 1)], **extra))
        rows.append(record("specdiff2", prompt_id, [(4, 2, 3), (4, 1, 2), (0, 0, 1)], num_drafts=8, **extra))
    return rows


def training_run(folder: Path) -> Path:
    """A finished training folder of two stages: run.json, metrics.csv."""
    folder.mkdir()
    curves = "val/accept_rate@1,val/accept_rate@2,val/survival@1,val/survival@2"
    lines = [f"step,train/loss,train/streak,val/streak,{curves},train/lr"]
    for step in range(0, 100):
        loss = 5.0 - step / 50 if step < 50 else -0.5 - step / 200
        lines.append(f"{step},{loss},{step / 100},,,,,,0.001")
        if step % 25 == 0 or step == 99:
            lines.append(f"{step},,,{step / 100},{0.2 + step / 200},0.1,{0.2 + step / 200},0.02,")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    stages = [{"name": "ce", "steps": 50}, {"name": "streak <2>", "steps": None}]
    run = {"command": "python train.py", "config": {"objective": {"schedule": {"stages": stages}}}}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def write_manifest(folder: Path, methods: Sequence[str], *, law: dict[str, Any] | None = None, **changes: Any) -> None:
    """``benchmark.json`` of a run with these methods; ``law`` changes what each method tells of the verifier."""
    told = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "verifier": "v1", "verifier_dtype": "float32",
            "verifier_device": "cpu", "verifier_runtime_mode": "eager", **(law or {})}  # fmt: skip
    content = {"benchmark": "toy", "max_new_tokens": 64, "seed": 0, "stop_ids": [], "stop_strings": [], "threads": 1,
               **changes, "decoders": {name: told for name in methods}}  # fmt: skip
    (folder / "benchmark.json").write_text(json.dumps(content), encoding="utf-8")


def grid_run(folder: Path) -> Path:
    """Streaks of gamma - 1 in every round; K says how many rounds there are."""
    records = []
    for index in range(3):
        records += [baseline(f"p{index}", 8), record("other", f"p{index}")]
        for name, (_, settings) in grid_methods(GRID_CONFIG["sampler"], GRID_CONFIG["grid"]).items():
            gamma = settings["gamma"]
            records.append(record(name, f"p{index}", [(gamma, gamma - 1, gamma)] * settings["K"]))
    return write_run(folder, records, config=GRID_CONFIG)
