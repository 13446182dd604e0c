"""T=0 through the whole decoder equals Hugging Face's own greedy decoding, whatever the drafter proposes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import (
    PerfectDrafter,
    RandomDrafter,
    Script,
    WrongDrafter,
    reference_greedy,
    tiny_verifier,
)

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.samplers import SAMPLERS, make_decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Generation

NUM_NEW, GAMMA = 24, 4
PROMPT = [5, 9, 33, 7, 21]
MULTI = ("specdiff2", "tree_match", "specinfer", "traversal")
DRAFTERS = {"right": PerfectDrafter, "wrong": WrongDrafter, "random": lambda v, g: RandomDrafter(v.vocab_size, g)}


@cache
def verifier_of(dtype: torch.dtype, attn: str):
    return tiny_verifier(dtype=dtype, attn=attn, seed=3)


@cache
def hf_generate(dtype: torch.dtype, attn: str) -> list[int]:
    model = verifier_of(dtype, attn).model
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def assert_counts_add_up(generation: Generation) -> None:
    assert sum(record.num_committed for record in generation.rounds) == generation.num_tokens
    for record in generation.rounds:
        assert 0 <= record.num_accepted <= record.num_drafted
        assert record.num_committed in (record.num_accepted, record.num_accepted + 1)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_sampler_equals_hf_generate(kind: str, dtype: torch.dtype, attn: str) -> None:
    verifier = verifier_of(dtype, attn)
    drafter = DRAFTERS[kind](verifier, GAMMA)
    for sampler in SAMPLERS:
        for num_drafts in (1, 4) if sampler in MULTI else (1,):
            decoder = make_decoder(verifier, drafter, sampler=sampler, num_drafts=num_drafts)
            generation = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, rng=TorchRandomSource(1))
            assert generation.tokens == hf_generate(dtype, attn), (sampler, num_drafts)
            assert generation.stop_reason == "length"
            assert_counts_add_up(generation)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autoregressive_equals_hf_generate(dtype: torch.dtype, attn: str) -> None:
    generation = AutoregressiveDecoder(verifier_of(dtype, attn)).generate(PROMPT, max_new_tokens=NUM_NEW)
    assert generation.tokens == hf_generate(dtype, attn)
    assert len(generation.rounds) == NUM_NEW
    assert {(r.num_drafted, r.num_accepted, r.num_committed, r.num_nodes) for r in generation.rounds} == {(0, 0, 1, 1)}


def test_perfect_drafter_commits_gamma_plus_one_a_round() -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    decoder = make_decoder(verifier, PerfectDrafter(verifier, GAMMA), sampler="specdiff")
    rounds = decoder.generate(PROMPT, max_new_tokens=10).rounds
    assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in rounds] == [(4, 4, 5), (4, 4, 5)]


def test_wrong_drafter_commits_one_a_round() -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    decoder = make_decoder(verifier, WrongDrafter(verifier, GAMMA), sampler="specdiff")
    rounds = decoder.generate(PROMPT, max_new_tokens=6).rounds
    # the window shrinks to what max_new_tokens leaves room for; the last token needs no draft
    assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in rounds] == [
        (4, 0, 1), (4, 0, 1), (3, 0, 1), (2, 0, 1), (1, 0, 1), (0, 0, 1),
    ]  # fmt: skip


def test_case_7_gamma_one() -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    right = make_decoder(verifier, PerfectDrafter(verifier, 1), sampler="specdiff").generate(PROMPT, max_new_tokens=4)
    wrong = make_decoder(verifier, WrongDrafter(verifier, 1), sampler="specdiff").generate(PROMPT, max_new_tokens=4)
    assert right.rounds[0].num_accepted == 1 and right.rounds[0].num_committed == 2
    assert wrong.rounds[0].num_accepted == 0 and wrong.rounds[0].num_committed == 1
    assert right.tokens == wrong.tokens


def test_case_8_fifty_prompts_equal_the_plain_loop() -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    generator = torch.Generator().manual_seed(8)
    decoder = make_decoder(verifier, RandomDrafter(verifier.vocab_size, 3), sampler="tree_match", num_drafts=12)
    for _ in range(50):
        length = int(torch.randint(1, 12, (), generator=generator))
        prompt = torch.randint(0, 64, (length,), generator=generator).tolist()
        assert decoder.generate(prompt, max_new_tokens=8).tokens == reference_greedy(verifier.model, prompt, 8)


def test_case_14_accepting_the_last_branch_keeps_the_right_cache() -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    expected = reference_greedy(verifier.model, PROMPT, 16)
    right = expected[:3]
    chains = [[(t + k) % 64 for t in right] for k in (1, 2, 3)] + [[right[0], (right[1] + 1) % 64, 0], right]
    first_round_only = Script(chains)
    decoder = make_decoder(verifier, first_round_only, sampler="tree_match", num_drafts=len(chains))
    generation = decoder.generate(PROMPT, max_new_tokens=16)
    assert generation.rounds[0].num_accepted == 3
    assert generation.tokens == expected


@pytest.mark.parametrize("num_new", [1, 2, GAMMA, GAMMA + 1])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_case_11_exactly_max_new_tokens(sampler: str, num_new: int) -> None:
    verifier = verifier_of(torch.float32, "sdpa")
    decoder = make_decoder(verifier, PerfectDrafter(verifier, GAMMA), sampler=sampler)
    generation = decoder.generate(PROMPT, max_new_tokens=num_new)
    assert generation.tokens == hf_generate(torch.float32, "sdpa")[:num_new]
    assert len(generation.rounds) == 1 and generation.rounds[0].num_drafted == num_new - 1


@pytest.mark.parametrize("slot", range(GAMMA + 1))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_case_9_eos_at_every_slot(sampler: str, slot: int) -> None:
    """The token at ``slot`` of the agreed window (or the bonus token) is made the EOS id."""
    plain = verifier_of(torch.float32, "sdpa")
    reference = hf_generate(torch.float32, "sdpa")
    eos = reference[slot]
    expected = reference[: reference.index(eos) + 1]
    for eos_ids in ([eos], [eos, 63]):
        verifier = tiny_verifier(seed=3, eos_ids=eos_ids)
        assert torch.equal(verifier.model.lm_head.weight, plain.model.lm_head.weight)
        streamed: list[int] = []
        generation = make_decoder(verifier, PerfectDrafter(verifier, GAMMA), sampler=sampler).generate(
            PROMPT, max_new_tokens=20, on_tokens=lambda tokens, text, to=streamed: to.extend(tokens)
        )
        assert generation.tokens == streamed == expected
        assert generation.stop_reason == "eos"
        assert_counts_add_up(generation)
        last = generation.rounds[-1]
        if len(expected) <= GAMMA:  # cut inside the draft: no later position was reached
            assert last.num_drafted == last.num_accepted == last.num_committed == len(expected)
        else:
            assert (last.num_drafted, last.num_accepted, last.num_committed) == (GAMMA, GAMMA, GAMMA + 1)
