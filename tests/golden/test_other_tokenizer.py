"""T=0 with a drafter whose tokenizer is not the verifier's equals the verifier alone, whatever the drafter proposes.

The verifier is a tiny Llama that has learnt one text by heart, so that a drafter can know what it will say: streaks
show that drafts are re-tokenised as the verifier tokenises them.
"""

# ruff: noqa: RUF001
from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import byte_tokenizer, reference_greedy, tiny_llama
from other_tokenizers import ScriptedDrafter, byte_bpe, spm_bpe, spm_unigram
from torch import Tensor

from specdiff2.decoding.samplers import make_decoder
from specdiff2.models.retokenized_session import RetokenizedSession
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Draft, Generation

TOKENIZERS = {"byte": cache(byte_tokenizer), "spm": spm_bpe, "chatml": byte_bpe, "unigram": spm_unigram}
PAIRS = [("spm", "byte"), ("chatml", "spm"), ("unigram", "chatml")]  # (drafter, verifier)
ASKED = "the question:\r\n"
SAID = "the answer is 42, costs €5 (今天，好) 😀 e\u0301.\r\n  so it is"
GAMMA, NUM_NEW = 6, 60
SAMPLERS = [("specdiff", 1), ("specdiff2", 4), ("tree_match", 4)]


@cache
def learnt(name: str) -> tuple[HFVerifier, list[int]]:
    """A verifier that continues ``ASKED`` with ``SAID`` and EOS, and the prompt's ids."""
    tokenizer = TOKENIZERS[name]()
    prompt = tokenizer(ASKED)["input_ids"]
    ids = tokenizer(ASKED + SAID)["input_ids"] + [tokenizer.eos_token_id]
    assert ids[: len(prompt)] == prompt and len(ids) - len(prompt) < NUM_NEW
    model = tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor([ids])
    for _ in range(60):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return HFVerifier(model.requires_grad_(False), tokenizer, name=f"learnt-{name}"), prompt


@cache
def verifier_of(name: str, dtype: torch.dtype) -> tuple[HFVerifier, list[int], list[int]]:
    """Verifier, prompt, and what it says alone (plain forwards without a cache)."""
    base, prompt = learnt(name)
    model = tiny_llama(base.vocab_size, eos_token_id=base.tokenizer.eos_token_id)
    model.load_state_dict(base.model.state_dict())
    verifier = HFVerifier(model.to(dtype), base.tokenizer, name=base.name)
    alone = reference_greedy(verifier.model, prompt, NUM_NEW, vocab_size=verifier.vocab_size, eos_ids=verifier.eos_ids)
    return verifier, prompt, alone


def text_of(bridge: TokenizerBridge, view: list[int]) -> str:
    return b"".join(bridge.drafter.piece(token) or b"" for token in view).decode().removeprefix(" ")


def padded(rows: list[list[int]]) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([row + [-1] * (length - len(row)) for row in rows], dtype=torch.long).reshape(len(rows), length)


def truth(bridge: TokenizerBridge, view: list[int], gamma: int, skip: int = 0) -> list[int]:
    """The drafter's ids of what the verifier says next, EOS at its end."""
    rest = (ASKED + SAID)[len(text_of(bridge, view)) + skip :]
    return [*bridge.drafter.encode(rest, prefix=False), bridge.drafter_eos][:gamma]


def noise(bridge: TokenizerBridge, gamma: int, rng: TorchRandomSource) -> list[int]:
    """Any ids: special tokens, ids that no token has, bytes that are no UTF-8."""
    return (rng.chains(torch.ones(gamma, bridge.drafter.num_ids + 4), 1)[0] - 2).tolist()


def script_of(kind: str, bridge: TokenizerBridge):
    byte = next(i for i in range(bridge.drafter.num_ids) if bridge.drafter.piece(i) == b"\xe2")
    rows = {
        "truth": lambda view, gamma, rng: truth(bridge, view, gamma),
        "one_character_off": lambda view, gamma, rng: truth(bridge, view, gamma, skip=1),
        "noise": lambda view, gamma, rng: noise(bridge, gamma, rng),
        "broken_bytes": lambda view, gamma, rng: [*truth(bridge, view, 2), byte, byte][:gamma],
        "eos_at_once": lambda view, gamma, rng: [bridge.drafter_eos] * gamma,
        "nothing": lambda view, gamma, rng: [],
        "same_ids": lambda view, gamma, rng: view[-gamma:],
    }

    def script(view: list[int], gamma: int, num_drafts: int, rng: TorchRandomSource) -> Tensor:
        kinds = list(rows) if kind == "mixed" else [kind]
        return padded([rows[kinds[(len(view) + k) % len(kinds)]](view, gamma, rng) for k in range(num_drafts)])

    return script


KINDS = ["truth", "one_character_off", "noise", "broken_bytes", "eos_at_once", "nothing", "same_ids", "mixed"]


def decode(verifier, bridge, prompt, sampler, num_drafts, script, session=RetokenizedSession) -> Generation:
    drafter = ScriptedDrafter(bridge, GAMMA, script, session)
    decoder = make_decoder(verifier, drafter, sampler=sampler, num_drafts=num_drafts)
    return decoder.generate(prompt, max_new_tokens=NUM_NEW, rng=TorchRandomSource(1))


def mean_streak(generation: Generation) -> float:
    return sum(record.num_accepted for record in generation.rounds) / len(generation.rounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_equals_the_verifier_alone(kind: str, drafter: str, verifier: str, dtype: torch.dtype) -> None:
    model, prompt, alone = verifier_of(verifier, dtype)
    assert model.tokenizer.decode(alone, skip_special_tokens=True).strip(" ") == SAID  # there is something to draft
    bridge = TokenizerBridge(TOKENIZERS[drafter](), model.tokenizer)
    for sampler, num_drafts in SAMPLERS:
        generation = decode(model, bridge, prompt, sampler, num_drafts, script_of(kind, bridge))
        assert generation.tokens == alone, sampler
        assert generation.stop_reason == "eos"
        assert sum(record.num_committed for record in generation.rounds) == len(alone)
        assert all(record.num_accepted <= record.num_drafted <= GAMMA for record in generation.rounds)


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
@pytest.mark.parametrize(("sampler", "num_drafts"), SAMPLERS)
def test_a_drafter_that_knows_the_text_is_accepted(drafter: str, verifier: str, sampler: str, num_drafts: int) -> None:
    model, prompt, _ = verifier_of(verifier, torch.float32)
    bridge = TokenizerBridge(TOKENIZERS[drafter](), model.tokenizer)
    right = decode(model, bridge, prompt, sampler, num_drafts, script_of("truth", bridge))
    wrong = decode(model, bridge, prompt, sampler, num_drafts, script_of("one_character_off", bridge))
    assert mean_streak(right) > 3.0 > 1.0 > mean_streak(wrong)
    # all of a draft is accepted, but for a last token that the longer text merges with what follows
    assert all(record.num_drafted - record.num_accepted <= 1 for record in right.rounds)


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
def test_the_truth_among_noise_is_found(drafter: str, verifier: str) -> None:
    model, prompt, _ = verifier_of(verifier, torch.float32)
    bridge = TokenizerBridge(TOKENIZERS[drafter](), model.tokenizer)

    def script(view: list[int], gamma: int, num_drafts: int, rng: TorchRandomSource) -> Tensor:
        return padded([noise(bridge, gamma, rng) for _ in range(num_drafts - 1)] + [truth(bridge, view, gamma)])

    assert mean_streak(decode(model, bridge, prompt, "specdiff2", 4, script)) > 2.0
    assert mean_streak(decode(model, bridge, prompt, "tree_match", 4, script)) > 2.0


class DrafterIdsSession(RetokenizedSession):
    """Planted: hands the drafter's ids on as if they were the verifier's."""

    def propose(self, gamma, num_drafts, rng, *, needs_probs=False) -> Draft:
        self._inner.rewrite(self._text.drafter_ids)
        return self._inner.propose(gamma, num_drafts, rng)


class FirstViewSession(RetokenizedSession):
    """Planted: never shows the drafter what was committed after the prompt."""

    def observe(self, tokens, features=None) -> None:
        pass


@pytest.mark.parametrize("session", [DrafterIdsSession, FirstViewSession])
def test_sessions_that_do_not_translate_cost_streaks_and_not_one_token(session) -> None:
    """The check above sees them; the output stays the verifier's, since it never trusts a draft."""
    model, prompt, alone = verifier_of("byte", torch.float32)
    bridge = TokenizerBridge(spm_bpe(), model.tokenizer)

    def small(view: list[int], gamma: int, num_drafts: int, rng: TorchRandomSource) -> Tensor:
        return padded([truth(bridge, view, gamma)] * num_drafts).clamp(max=model.vocab_size - 1)

    script = small if session is DrafterIdsSession else script_of("truth", bridge)
    generation = decode(model, bridge, prompt, "specdiff", 1, script, session)
    assert generation.tokens == alone
    assert mean_streak(generation) < 1.0
