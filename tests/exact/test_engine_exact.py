"""The shipped decoder, enumerated: its output follows the verifier's law under the settings it runs with."""

from __future__ import annotations

import pytest
import torch
from helpers import FunctionDrafter, Tab

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.selection import make_selector
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.lossless_cases import random_table
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.types import SamplingParams

PROMPT = (0,)
DRAFT_SAMPLING = SamplingParams(temperature=0.8, top_k=2)
SAMPLERS = [
    ("greedy", "self_selection", 2, 1),
    ("tree_match", None, 2, 1),
    ("leviathan", None, 1, 2),
    ("block", None, 1, 2),
    ("specinfer", None, 2, 1),
    ("traversal", None, 2, 1),
    ("traversal", None, 1, 2),
]


def drafter(gamma: int) -> FunctionDrafter:
    table = random_table(21, (gamma, 3))

    def propose(context, gamma, num_drafts, rng):
        probs = logits_to_probs(table(tuple(context)).log()[:gamma], DRAFT_SAMPLING)
        return rng.chains(probs, num_drafts), probs

    return FunctionDrafter(gamma, propose)


@pytest.mark.parametrize("eos_ids", [(), (2,)])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.3, top_k=2, top_p=0.5), SamplingParams(top_p=0.8)],
    ids=["plain", "nucleus", "top_p"],
)
@pytest.mark.parametrize(("rule", "selection", "num_drafts", "gamma"), SAMPLERS)
def test_decoder_law(rule: str, selection: str | None, num_drafts: int, gamma: int, sampling, eos_ids) -> None:
    table, num_tokens = random_table(22, (3,)), gamma + 1
    decoder = SpeculativeDecoder(
        Tab(table, eos_ids=eos_ids),
        drafter(gamma),
        rule=make_rule(rule),
        selector=make_selector(selection),
        num_drafts=num_drafts,
        verifier_sampling=sampling,
    )
    output = enumerate_outcomes(
        lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=num_tokens, rng=rng).tokens)
    )
    expected: dict[tuple[int, ...], float] = {}
    for tokens, mass in verifier_law(
        lambda prefix: logits_to_probs(table(prefix).log(), sampling), num_tokens, PROMPT
    ).items():
        ends = [index + 1 for index, token in enumerate(tokens) if token in eos_ids]
        kept = tokens[: ends[0]] if ends else tokens
        expected[kept] = expected.get(kept, 0.0) + mass
    assert total_variation(output, expected) < 1e-12


def test_enumerated_drafter_law_is_the_one_in_the_ratio() -> None:
    """The stub really draws from what it reports; otherwise the test above would prove nothing."""
    outcomes = enumerate_outcomes(
        lambda rng: int(drafter(1).start([0], SamplingParams(), 1).propose(1, 1, rng, needs_probs=True).tokens)
    )
    probs = logits_to_probs(random_table(21, (1, 3))((0,)).log(), DRAFT_SAMPLING)[0]
    assert torch.allclose(torch.tensor([outcomes.get(i, 0.0) for i in range(3)], dtype=torch.float64), probs)
