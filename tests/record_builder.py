"""Hand-made evaluation records and run folders for the tests of metrics, reports and sweeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE, Record, RecordWriter
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
