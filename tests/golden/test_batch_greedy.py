"""Batches of prompts of different lengths: every row equals decoding it alone, and Hugging Face's generate at T=0.

Float64 and float32, shared passes of verifier and drafter, rows that end early, places that are used again. Equal
rounds (drafted, accepted, committed, nodes) say that every row's drafter saw the right prefix as well.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import PerfectDrafter, RandomDrafter, WrongDrafter, char_tokenizer, random_tokens, tiny_verifier

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.batch import _say_row_by_row
from specdiff2.decoding.samplers import make_decoder
from specdiff2.functional.ragged_masks import ragged_decode_mask
from specdiff2.functional.window_masks import decode_mask
from specdiff2.models import drafter_batch
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.layer_stack import run_stack
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.verifier_session import HFVerifierSession
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, Generation, SamplingParams

NUM_NEW, GAMMA = 14, 4
PROMPTS = [random_tokens(length, seed=length) for length in (5, 1, 17, 9, 2)]
DRAFTERS = {"right": PerfectDrafter, "wrong": WrongDrafter, "random": lambda v, g: RandomDrafter(v.vocab_size, g)}
T1 = SamplingParams()
KINDS = {
    "conditioned": {"conditioning": "verifier_kv", "shifted": True},
    "conditioned_markov": {"conditioning": "verifier_kv", "shifted": True, "markov_rank": 4},
    "conditioned_steps": {"conditioning": "verifier_kv", "shifted": True, "denoising_steps": 2},
    "prefix": {},
    "prefix_shifted_steps": {"shifted": True, "denoising_steps": 3},
}


@cache
def verifier_of(dtype: torch.dtype = torch.float64, family: str = "llama") -> HFVerifier:
    return tiny_verifier(dtype=dtype, family=family, seed=3, output_features=True)


@cache
def hf_generate(dtype: torch.dtype, family: str) -> list[list[int]]:
    model = verifier_of(dtype, family).model
    outputs = [model.generate(torch.tensor([p]), max_new_tokens=NUM_NEW, do_sample=False)[0] for p in PROMPTS]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


@cache
def drafter_of(kind: str) -> BlockDrafter:
    """Nearly the verifier's own layers, so that some drafts are accepted and some are not."""
    drafter = BlockDrafter.from_verifier(
        verifier_of(), num_layers=2, gamma=GAMMA, dtype=torch.float64, mask_token_id=63, **KINDS[kind]
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    return drafter


def facts(generation: Generation) -> tuple:
    rounds = [replace(record, draft_s=0.0, verify_s=0.0, other_s=0.0) for record in generation.rounds]
    return generation.tokens, generation.text, generation.stop_reason, rounds


def assert_as_alone(decoder, *, prompts=PROMPTS, batch_sizes=(None, 2), **options) -> list[Generation]:
    options = {"max_new_tokens": NUM_NEW} | options
    alone = [decoder.generate(p, rng=TorchRandomSource(seed), **options) for seed, p in enumerate(prompts)]
    for batch_size in batch_sizes:
        rngs = [TorchRandomSource(seed) for seed in range(len(prompts))]
        together = decoder.generate_batch(prompts, batch_size=batch_size, rngs=rngs, **options)
        assert [facts(g) for g in together] == [facts(g) for g in alone], batch_size
    return alone


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_row_equals_hf_generate(kind: str, dtype: torch.dtype, family: str) -> None:
    verifier = verifier_of(dtype, family)
    decoder = make_decoder(verifier, DRAFTERS[kind](verifier, GAMMA), sampler="tree_match", num_drafts=3)
    for decode in (decoder, AutoregressiveDecoder(verifier)):
        done = decode.generate_batch(PROMPTS, max_new_tokens=NUM_NEW)
        assert [g.tokens for g in done] == hf_generate(dtype, family)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["conditioned", "prefix"])
def test_every_batch_size(kind: str, batch_size: int) -> None:
    decoder = make_decoder(verifier_of(), drafter_of(kind), sampler="specdiff2", num_drafts=2)
    alone = assert_as_alone(decoder, batch_sizes=(batch_size,))
    assert [g.tokens for g in alone] == hf_generate(torch.float64, "llama")
    rounds = [record for generation in alone for record in generation.rounds]
    assert 0 < sum(record.num_accepted for record in rounds) < sum(record.num_drafted for record in rounds)


@pytest.mark.parametrize(("sampler", "options"), [
    ("specdiff2", {"num_drafts": 3}), ("block", {}), ("traversal", {"num_drafts": 2}), ("tree", {"num_nodes": 9}),
    ("tree_lookup", {"num_nodes": 9}), ("specdiff", {"min_confidence": 0.05}),
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_samplers_equal_batch_one(kind: str, sampler: str, options: dict) -> None:
    decoder = make_decoder(verifier_of(), drafter_of(kind), sampler=sampler, verifier_sampling=T1, **options)
    assert_as_alone(decoder)


def test_stop_ids_strings_and_eos_end_rows_at_different_rounds() -> None:
    tokenizer = char_tokenizer()
    verifier = tiny_verifier(dtype=torch.float64, seed=3, tokenizer=tokenizer, output_features=True)
    prompts = [[token % verifier.vocab_size for token in prompt] for prompt in PROMPTS]
    decoder = make_decoder(verifier, RandomDrafter(verifier.vocab_size, GAMMA), sampler="tree_match", num_drafts=2,
                           verifier_sampling=T1)  # fmt: skip
    done = assert_as_alone(
        decoder, prompts=prompts, stop_ids=[7, 8, 9], stop_strings=["a", "be", "3"], batch_sizes=(1, 2, 5),
        max_new_tokens=40,
    )  # fmt: skip
    assert {g.stop_reason for g in done} >= {"stop"} and len({len(g.rounds) for g in done}) > 2


def test_one_round_takes_one_pass_of_each_model(monkeypatch) -> None:
    passes, drafted, forward = [], [], HFVerifier.forward

    def counted(self, ids, **others):
        passes.append(tuple(ids.shape))
        return forward(self, ids, **others)

    def drafting(stack, inputs, *others):
        drafted.append(inputs.shape[0])
        return run_stack(stack, inputs, *others)

    monkeypatch.setattr(HFVerifier, "forward", counted)
    monkeypatch.setattr(drafter_batch, "run_stack", drafting)
    decoder = make_decoder(verifier_of(), drafter_of("conditioned"), sampler="specdiff")
    done = decoder.generate_batch(PROMPTS, max_new_tokens=5)
    prefills = [len(prompt) - 1 for prompt in PROMPTS if len(prompt) > 1]
    assert [shape[1] for shape in passes[: len(prefills)]] == prefills
    assert len(passes) - len(prefills) == max(len(g.rounds) for g in done)
    assert passes[len(prefills)] == (len(PROMPTS), GAMMA + 1)
    assert drafted[0] == len(PROMPTS) and len(drafted) <= max(len(g.rounds) for g in done)


def test_seconds_add_up_to_the_wall_time() -> None:
    decoder = make_decoder(verifier_of(), drafter_of("conditioned"), sampler="specdiff")
    start = time.perf_counter()
    done = decoder.generate_batch(PROMPTS, batch_size=2, max_new_tokens=NUM_NEW)
    wall_s = time.perf_counter() - start
    charged_s = sum(g.decode_s + g.prefill_s for g in done)
    assert 0.5 * wall_s < charged_s <= wall_s


# ---------------------------------------------------------------- rows know nothing of each other
def batch_of(verifier: HFVerifier, prompts=PROMPTS):
    batch = verifier.start_batch(len(prompts), prompts, 20)
    return batch, [batch.start(place, prompt, 20) for place, prompt in enumerate(prompts)]


def trees_of(prompts=PROMPTS) -> list[TokenTree]:
    return [
        TokenTree.from_chains(prompt[-1], [[row, row + 1, row + 2][: 1 + row % 3], [row, 7]])
        for row, prompt in enumerate(prompts)
    ]


def test_contents_of_other_rows_and_of_the_gap_change_nothing() -> None:
    verifier = verifier_of()
    batch, sessions = batch_of(verifier)
    wanted = batch.score(trees_of())
    counts = [tree.num_nodes for tree in trees_of()]
    row = 3
    with torch.inference_mode():
        for other, session in enumerate(sessions):
            begin = 0 if other != row else session.num_committed - 1  # all of the others, the gap of this one
            for layer in range(2):
                for part in batch.cache.rows[other].slots([layer]):
                    part[0][:, :, begin:] = -3.0
    found = batch.score(trees_of())
    own = slice(sum(counts[:row]), sum(counts[: row + 1]))
    assert torch.equal(found[own], wanted[own])
    assert not torch.equal(found[: counts[0]], wanted[: counts[0]])


def test_one_pass_equals_each_row_alone() -> None:
    verifier = verifier_of()
    batch, sessions = batch_of(verifier)
    found = batch.score(trees_of())
    for tree, prompt, rows in zip(
        trees_of(), PROMPTS, found.split([tree.num_nodes for tree in trees_of()]), strict=True
    ):
        assert (rows - verifier.start(prompt, 20).score(tree)).abs().max() < 1e-12
    assert len(sessions) == len(PROMPTS)


def test_cache_grows_while_rows_decode() -> None:
    """A tree larger than the room that was kept, in a drafter that reads the verifier's memory."""
    verifier = verifier_of()
    decoder = make_decoder(verifier, drafter_of("conditioned"), sampler="tree", num_nodes=200)
    assert_as_alone(decoder, max_new_tokens=6, batch_sizes=(3,))


def test_drafter_in_another_dtype_than_the_verifier() -> None:
    verifier = verifier_of(torch.float32)
    drafter = BlockDrafter.from_verifier(
        verifier, num_layers=2, gamma=GAMMA, dtype=torch.float64, mask_token_id=63, **KINDS["conditioned"]
    )
    assert_as_alone(make_decoder(verifier, drafter, sampler="specdiff"))


def test_hidden_states_of_another_row_are_noticed(monkeypatch) -> None:
    """The planted mistake: every conditioned window starts from the first row's hidden states."""

    def wrong(self, tree, hidden, row, slot, right=HFVerifierSession.scored):
        right(self, tree, hidden, 0, slot)

    monkeypatch.setattr(HFVerifierSession, "scored", wrong)
    decoder = make_decoder(verifier_of(), drafter_of("conditioned"), sampler="specdiff")
    with pytest.raises(AssertionError):
        assert_as_alone(decoder, batch_sizes=(None,))


def test_ragged_mask_of_one_row_is_the_plain_one() -> None:
    counts = [torch.tensor([n]) for n in (5, 3, 2)]
    ragged = ragged_decode_mask(*counts, 5, 3, 2, torch.float64)
    assert torch.equal(ragged == 0, decode_mask(5, 3, 2))


# ---------------------------------------------------------------- packed weights, other drafters, refusals
def test_packed_weights_score_batches() -> None:
    plain = tiny_verifier(dtype=torch.bfloat16, seed=3)
    packed = HFVerifier(tiny_verifier(dtype=torch.bfloat16, seed=3).model, None, name="packed", pack_weights=True)
    if packed.num_packed == 0:
        pytest.skip("this machine packs no bfloat16 weights")
    logits = [batch_of(verifier)[0].score(trees_of()) for verifier in (plain, packed)]
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].abs().max()


def test_drafters_without_batches_are_served_row_by_row_and_said_once(caplog) -> None:
    verifier = verifier_of()
    _say_row_by_row.cache_clear()
    decoder = make_decoder(verifier, RandomDrafter(64, GAMMA), sampler="block", verifier_sampling=T1)
    for _ in range(2):
        assert_as_alone(decoder, batch_sizes=(3,))
    assert [record.getMessage() for record in caplog.records] == [
        "FunctionDrafter runs row by row in a batch: exact, but its passes are not shared"
    ]


def test_a_compiled_verifier_serves_batches_eagerly_and_says_so(caplog, monkeypatch) -> None:
    verifier = verifier_of()
    monkeypatch.setattr(verifier, "passes", object())  # anything but None; a batch must not use it
    done = AutoregressiveDecoder(verifier).generate_batch(PROMPTS, max_new_tokens=NUM_NEW)
    assert [g.tokens for g in done] == hf_generate(torch.float64, "llama")
    assert "compiled for single prompts" in caplog.text


def test_refusals() -> None:
    decoder = AutoregressiveDecoder(verifier_of())
    assert decoder.generate_batch([]) == []
    for wrong in ({"batch_size": 0}, {"rngs": [TorchRandomSource(0)]}, {"stop_ids": [64]}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            decoder.generate_batch(PROMPTS, **wrong)
    with pytest.raises(ConfigError, match="beyond the context"):  # before anything is decoded
        decoder.generate_batch([*PROMPTS, [1] * 300], batch_size=1, max_new_tokens=4)
