"""Another number of denoising passes than the drafter was trained with, as a sampler's choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import RandomDrafter, random_tokens, reference_greedy, tiny_verifier

from specdiff2.decoding.samplers import make_decoder
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.block_drafter_session import BlockDrafterSession
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.types import ConfigError, SamplingParams

PROMPT = random_tokens(6, seed=1)


def make(verifier: Any, steps: int, **changes: Any) -> BlockDrafter:
    return BlockDrafter.from_verifier(verifier, num_layers=2, gamma=4, denoising_steps=steps, **changes).eval()


@pytest.mark.parametrize("layout", [{}, {"shifted": True, "conditioning": "verifier_kv"}])
@pytest.mark.parametrize(("trained", "asked"), [(1, 2), (1, 4), (3, 1), (2, None), (2, 9)])
def test_the_law_is_that_of_a_drafter_with_so_many_passes(layout: dict, trained: int, asked: int | None) -> None:
    verifier = tiny_verifier(64, seed=3)
    laws = []
    for steps, told in ((trained, asked), (asked or trained, None)):
        drafter = make(verifier, steps, **layout)
        given = {"verifier_session": verifier.start(PROMPT, 8)} if drafter.needs_verifier_session else {}
        session = drafter.start(PROMPT, SamplingParams(), 8, **given)
        session.denoising_steps = told
        laws.append(session.law(4).position_log_probs())
    assert torch.equal(laws[0], laws[1])


def test_samplers_pass_it_on_and_the_output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, passes = tiny_verifier(64, seed=3), list[int]()
    drafter, original = make(verifier, 1), BlockDrafterSession.window_states
    monkeypatch.setattr(
        BlockDrafterSession, "window_states", lambda self, g, f=None: (passes.append(g), original(self, g, f))[1]
    )
    from_yaml = SamplerSettings(name="s", rule="tree_match", drafter="x", K=3, denoising_steps=3).make
    for make_one, per_round in (
        (partial(make_decoder, sampler="tree_match", num_drafts=3, denoising_steps=3), 3),
        (from_yaml, 3),
        (partial(make_decoder, sampler="tree", denoising_steps=2), 2),
        (partial(make_decoder, sampler="specdiff"), 1),
    ):
        decoder = make_one(verifier, drafter)
        passes.clear()
        generation = decoder.generate(PROMPT, max_new_tokens=12)
        assert generation.tokens == reference_greedy(verifier.model, PROMPT, 12)
        drafted = [
            min(4, 11 - sum(r.num_committed for r in generation.rounds[:i])) for i in range(len(generation.rounds))
        ]
        assert len(passes) == sum(min(per_round, gamma) for gamma in drafted)
        assert decoder.describe().get("denoising_steps") == (per_round if per_round > 1 else None)


def test_refusals() -> None:
    verifier = tiny_verifier(64)
    with pytest.raises(ConfigError, match="denoising_steps=2 with drafter FunctionDrafter"):
        make_decoder(verifier, RandomDrafter(64), denoising_steps=2).generate(PROMPT, max_new_tokens=4)
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match=f"denoising_steps={wrong}"):
            make_decoder(verifier, RandomDrafter(64), denoising_steps=wrong)
        with pytest.raises(ConfigError, match=f"denoising_steps={wrong}"):
            SamplerSettings(name="s", rule="greedy", drafter="x", denoising_steps=wrong)
