"""`sps` against transformers' assisted generation, the verifier alone, and, draft by draft, against plain forwards.

Whatever the drafter does, T=0 tokens are the verifier's; so a drafter that reads a wrong text shows only in its drafts.
Those are compared with full forwards without a cache, and the check must refuse planted faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import reference_greedy, reference_logits, tiny_llama, tiny_verifier
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specdiff2.decoding.acceptance import GreedyRule, LeviathanRule
from specdiff2.decoding.hf_decoder import HFDecoder, HFOptions
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.ar_drafter import ARDrafter
from specdiff2.models.ar_drafter_session import ARDrafterSession, ReaderSession
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import RandomSource
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Draft, Generation, SamplingParams

PROMPT = [5, 9, 33, 7, 21]
NUM_NEW, GAMMA = 30, 5
T0 = SamplingParams(0.0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def small_model(kind: str, dtype: torch.dtype) -> Any:
    """``right``: the verifier itself; ``close``: with noise; ``unrelated``; ``adversarial``: never right."""
    if kind == "unrelated":
        return tiny_llama(64, dtype, seed=7, num_hidden_layers=1)
    model = tiny_llama(64, dtype, seed=3)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters() if kind == "close" else ():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.02)
    if kind == "adversarial":
        model.lm_head.weight.neg_()
    return model


def small_verifier(kind: str, dtype: torch.dtype = torch.float32) -> HFVerifier:
    return HFVerifier(small_model(kind, dtype), None, name=kind)


def sps(drafter: Any, sampling: SamplingParams = T0, gamma: int = GAMMA, **options: Any) -> SpeculativeDecoder:
    options = {"rule": LeviathanRule(), "draft_sampling": sampling, **options}
    return SpeculativeDecoder(drafter.verifier, drafter, gamma=gamma, verifier_sampling=sampling, **options)


def streaks(generation: Generation) -> list[int]:
    return [record.num_accepted for record in generation.rounds]


def hf_assisted(
    verifier: HFVerifier, assistant: HFVerifier, patch: pytest.MonkeyPatch, gamma: int = GAMMA
) -> tuple[list[int], list[int]]:
    """(tokens, accepted draft tokens of each round)."""
    accepted: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def noted(self: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        accepted.append(int(num_matches))
        update(self, input_ids, scores, num_matches)

    patch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", noted)
    options = HFOptions("assisted", num_assistant_tokens=gamma, assistant_confidence_threshold=0.0)
    tokens = HFDecoder(verifier, options, assistant=assistant).generate(PROMPT, max_new_tokens=NUM_NEW).tokens
    return tokens, accepted


# ---------------------------------------------------------------- T=0
@DTYPES
@pytest.mark.parametrize("kind", ["right", "close", "unrelated", "adversarial"])
def test_tokens_and_streaks_are_those_of_assisted_generation(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = tiny_verifier(dtype=dtype, seed=3)
    expected = reference_greedy(verifier.model, PROMPT, NUM_NEW)
    tokens, accepted = hf_assisted(verifier, small_verifier(kind, dtype), monkeypatch)
    generation = sps(ARDrafter(small_verifier(kind, dtype), verifier)).generate(PROMPT, max_new_tokens=NUM_NEW)
    assert generation.tokens == tokens == expected
    assert streaks(generation) == accepted
    mean = sum(accepted) / len(accepted)
    assert {"right": mean >= 4, "close": 0 < mean < 4, "unrelated": mean < 1, "adversarial": mean == 0}[kind], mean


@pytest.mark.parametrize("max_new_tokens", [1, 2, GAMMA, GAMMA + 1])
@pytest.mark.parametrize("prompt", [PROMPT, [5]])
@pytest.mark.parametrize("rule", [LeviathanRule(), GreedyRule()])
def test_short_texts_and_either_rule(rule: Any, prompt: list[int], max_new_tokens: int) -> None:
    verifier = tiny_verifier(seed=3)
    decoder = sps(ARDrafter(small_verifier("right"), verifier), rule=rule)
    generation = decoder.generate(prompt, max_new_tokens=max_new_tokens)
    assert generation.tokens == reference_greedy(verifier.model, prompt, max_new_tokens)
    assert streaks(generation) == [max_new_tokens - 1]


def test_ends_at_an_eos_that_was_drafted() -> None:
    tokens = reference_greedy(tiny_verifier(seed=3).model, PROMPT, NUM_NEW)
    for slot in range(GAMMA + 1):
        verifier = tiny_verifier(seed=3, eos_ids=[tokens[slot]])
        generation = sps(ARDrafter(small_verifier("right"), verifier)).generate(PROMPT, max_new_tokens=NUM_NEW)
        assert generation.tokens == tokens[: tokens.index(tokens[slot]) + 1] and generation.stop_reason == "eos"


# ---------------------------------------------------------------- drafts
class Recorded:
    """Keeps (committed tokens, draft) of every round."""

    gamma = GAMMA

    def __init__(self, drafter: ARDrafter) -> None:
        self.inner, self.verifier, self.rounds = drafter, drafter.verifier, list[tuple[list[int], Draft]]()

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> Recorded:
        self.tokens, self.session = list(prompt), self.inner.start(prompt, sampling, max_new_tokens)
        return self

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        draft = self.session.propose(gamma, num_drafts, rng, needs_probs=needs_probs)
        self.rounds.append((list(self.tokens), draft))
        return draft

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self.tokens.extend(tokens)
        self.session.observe(tokens, features)


def check_drafts(kind: str, sampling: SamplingParams, dtype: torch.dtype = torch.float32) -> set[int]:
    """Every row of every ``draft_probs`` is the law after the text and the draft tokens before it; returns streaks."""
    recorded = Recorded(ARDrafter(small_verifier(kind, dtype), tiny_verifier(dtype=dtype, seed=3)))
    generation = sps(recorded, sampling).generate(PROMPT, max_new_tokens=NUM_NEW, rng=TorchRandomSource(2))
    plain = small_model(kind, dtype)
    for committed, draft in recorded.rounds:
        tokens = draft.tokens[0].tolist()
        logits = reference_logits(plain, [*committed, *tokens])[len(committed) - 1 : -1]
        torch.testing.assert_close(draft.draft_probs, logits_to_probs(logits, sampling), rtol=0, atol=1e-5)
        assert all(draft.draft_probs[j, token] > 0 for j, token in enumerate(tokens))
    return set(streaks(generation))


@DTYPES
@pytest.mark.parametrize("sampling", [T0, SamplingParams(1.0), SamplingParams(0.7, top_k=8, top_p=0.9)], ids=str)
def test_drafts_equal_plain_forwards(sampling: SamplingParams, dtype: torch.dtype) -> None:
    assert len(check_drafts("close", sampling, dtype)) > 2  # rejections at several places
    assert GAMMA in check_drafts("right", sampling, dtype)  # the whole draft: two tokens are read at once


def not_rolled_back(self: ReaderSession, num_kept: int, following: Sequence[int]) -> list[int]:
    return list(following)


def one_too_few(self: ReaderSession, num_kept: int, following: Sequence[int]) -> list[int]:
    del self._tokens[num_kept:]
    self._tokens.append(following[0]) if following else None
    self.cache.filled(max(self.cache.length, len(self._tokens) - 1))  # as if the last draft token had been read
    return list(following[1:])


@pytest.mark.parametrize(("fault", "kind"), [(not_rolled_back, "close"), (one_too_few, "right")])
def test_the_check_refuses_a_stale_cache(fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReaderSession, "rewrite", fault)
    with pytest.raises(AssertionError):
        check_drafts(kind, T0)


def test_the_check_refuses_a_law_that_tokens_were_not_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = ARDrafterSession.propose

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Draft:
        draft = propose(self, *args, **kwargs)
        return Draft(draft.tokens, draft.draft_probs.roll(1, dims=0))

    monkeypatch.setattr(ARDrafterSession, "propose", shifted)
    with pytest.raises(AssertionError):
        check_drafts("close", SamplingParams(1.0))


def test_a_round_of_gamma_tokens_is_gamma_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    for kind, most in (("right", 2), ("close", 2), ("adversarial", 1)):
        small = small_verifier(kind)
        forward = small.forward

        def counted(ids: Tensor, forward: Any = forward, **options: Any) -> Any:
            read.append(ids.shape[1])
            return forward(ids, **options)

        monkeypatch.setattr(small, "forward", counted)
        read.clear()
        verifier = tiny_verifier(seed=3)
        generation = sps(ARDrafter(small, verifier)).generate(PROMPT, max_new_tokens=NUM_NEW)
        assert read[0] == len(PROMPT) - 1  # the prompt, but its last token
        assert len(read) - 1 == sum(record.num_drafted for record in generation.rounds)
        assert max(read[1:]) == most  # the last draft token and the bonus token, or what replaced a rejected one
        # every committed token is read once, and every rejected one but those at the end of a draft
        assert sum(read) <= len(PROMPT) + sum(record.num_drafted + 1 for record in generation.rounds)


def test_a_draft_may_be_asked_for_twice() -> None:
    session = ARDrafter(small_verifier("close"), tiny_verifier(seed=3)).start(PROMPT, T0, NUM_NEW)
    first, second = (session.propose(GAMMA, 1, TorchRandomSource(0), needs_probs=True) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()
    torch.testing.assert_close(first.draft_probs, second.draft_probs)
    for token in first.tokens[0, :2].tolist():  # token by token, as an ensemble may hand them on
        session.observe([token])
    third = session.propose(3, 1, TorchRandomSource(0), needs_probs=True)
    assert third.tokens[0].tolist() == first.tokens[0, 2:].tolist()


# ---------------------------------------------------------------- compiled
def test_compiled_passes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ARDrafter, "compile", lambda self: self.model.compile(backend="eager")
    )  # captured, not inductor
    for kind in ("right", "close"):
        expected = sps(ARDrafter(small_verifier(kind), tiny_verifier(seed=3))).generate(PROMPT, max_new_tokens=12)
        verifier = tiny_verifier(seed=3)
        drafter = ARDrafter(small_verifier(kind), verifier)
        drafter.warm(100)
        assert drafter.model.passes is None  # the verifier is eager, so is the drafter
        verifier.compile(backend="eager")
        drafter.warm(len(PROMPT) + 12 + 128)
        assert drafter.model.passes is not None and drafter.model.passes.num_graphs == 2  # one token, and two
        generation = sps(drafter).generate(PROMPT, max_new_tokens=12)
        assert (generation.tokens, streaks(generation)) == (expected.tokens, streaks(expected))
        assert drafter.model.passes.num_graphs == 2  # no shape was met for the first time
