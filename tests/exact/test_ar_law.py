"""`sps` at T > 0: the law of completions and of streaks, by enumerating every random branch of real (tiny) models.

A real verifier, an ``ARDrafter`` with its cache, and the decoder, against plain forwards; float32, so within rounding.
The same check refuses planted faults. transformers' assisted generation draws its own random numbers, so its streaks
are sampled: with 120 rounds and 3 outcomes a total variation of 0.23 raises chi-square by 4 * 120 * 0.23^2 = 25 above
its mean of 2 (critical value at p = 1e-4: 18.4), i.e. is found with power above 0.8.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import tiny_llama, tiny_verifier
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specdiff2.decoding.acceptance import LeviathanRule, make_rule
from specdiff2.decoding.hf_decoder import HFDecoder, HFOptions
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.ar_drafter import ARDrafter
from specdiff2.models.ar_drafter_session import ARDrafterSession
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Draft, SamplingParams

Tokens = tuple[int, ...]
PROMPT, GAMMA, NUM_TOKENS, EOS = [0, 2], 2, 3, 1
EXACT, CLEARLY_WRONG = 1e-5, 1e-2
LAWS = [SamplingParams(), SamplingParams(0.5), SamplingParams(1.5, top_p=0.9), SamplingParams(0.8, top_k=2)]


def pair(eos_ids: tuple[int, ...] = (EOS,)) -> tuple[HFVerifier, HFVerifier]:
    verifier = tiny_verifier(3, seed=5, eos_ids=eos_ids, initializer_range=0.1)
    return verifier, HFVerifier(tiny_llama(3, seed=9, num_hidden_layers=1, initializer_range=0.1), None, name="small")


def decoder(law: SamplingParams, draft_law: SamplingParams | None = None, rule: str = "leviathan") -> Any:
    verifier, small = pair()
    return SpeculativeDecoder(
        verifier, ARDrafter(small, verifier), rule=make_rule(rule), gamma=GAMMA, verifier_sampling=law,
        draft_sampling=draft_law or law,
    )  # fmt: skip


def completions(decoder: Any) -> dict[Tokens, float]:
    return enumerate_outcomes(lambda rng: tuple(decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, rng=rng).tokens))


def expected(law: SamplingParams) -> dict[Tokens, float]:
    """The verifier's law of completions, cut at EOS."""
    model = pair()[0].model

    def table(prefix: Tokens) -> Tensor:
        return logits_to_probs(model(torch.tensor([prefix]), use_cache=False).logits[0, -1], law)

    ended: dict[Tokens, float] = {}
    for tokens, mass in verifier_law(table, NUM_TOKENS, tuple(PROMPT)).items():
        kept = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        ended[kept] = ended.get(kept, 0.0) + mass
    return ended


@pytest.mark.parametrize(
    ("rule", "law"), [*(("leviathan", law) for law in LAWS), ("greedy", LAWS[3]), ("block", LAWS[1])], ids=str
)
def test_the_law_of_completions_is_the_verifiers(rule: str, law: SamplingParams) -> None:
    assert total_variation(completions(decoder(law, rule=rule)), expected(law)) < EXACT


def test_a_draft_law_of_its_own_is_as_lossless() -> None:
    law = SamplingParams(0.8, top_k=2)
    assert total_variation(completions(decoder(law, SamplingParams(1.7))), expected(law)) < EXACT


def untempered(self: Any, gamma: int, num_drafts: int, rng: Any, *, needs_probs: bool) -> Draft:
    """Planted: states the law that its tempered draws would have at temperature 1."""
    draft = PROPOSE(self, gamma, num_drafts, rng, needs_probs=needs_probs)
    rows = draft.draft_probs**self._sampling.temperature
    return Draft(draft.tokens, rows / rows.sum(-1, keepdim=True))


def of_the_first_position(self: Any, gamma: int, num_drafts: int, rng: Any, *, needs_probs: bool) -> Draft:
    """Planted: the law of position 1 for all of them, as if positions were independent."""
    draft = PROPOSE(self, gamma, num_drafts, rng, needs_probs=needs_probs)
    return Draft(draft.tokens, draft.draft_probs[:1].expand(gamma, -1))


PROPOSE = ARDrafterSession.propose


@pytest.mark.parametrize("fault", [untempered, of_the_first_position])
def test_the_same_check_refuses_other_laws(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    law = SamplingParams(0.5)
    monkeypatch.setattr(ARDrafterSession, "propose", fault)
    assert total_variation(completions(decoder(law)), expected(law)) > CLEARLY_WRONG


def test_streaks_have_the_law_of_assisted_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of either: how many of two draft tokens are accepted, without an EOS that would cut it."""
    law, num_rounds = SamplingParams(0.7), 120
    verifier, small = pair(eos_ids=())
    ours = SpeculativeDecoder(
        verifier, ARDrafter(small, verifier), rule=LeviathanRule(), gamma=GAMMA, verifier_sampling=law,
        draft_sampling=law,
    )  # fmt: skip
    streaks = enumerate_outcomes(
        lambda rng: ours.generate(PROMPT, max_new_tokens=NUM_TOKENS, rng=rng).rounds[0].num_accepted
    )
    assert len(streaks) == GAMMA + 1 and min(streaks.values()) > 0.05
    rounds: list[int] = []
    monkeypatch.setattr(
        AssistedCandidateGenerator, "update_candidate_strategy",
        lambda self, input_ids, scores, num_matches: rounds.append(int(num_matches)),
    )  # fmt: skip
    options = HFOptions("assisted", num_assistant_tokens=GAMMA, assistant_confidence_threshold=0.0)
    theirs = HFDecoder(verifier, options, assistant=small, sampling=law)
    rng, counts = TorchRandomSource(4), Counter[int]()
    for _ in range(num_rounds):
        rounds.clear()
        theirs.generate(PROMPT, max_new_tokens=NUM_TOKENS, rng=rng)
        counts[rounds[0]] += 1
    statistic = sum((counts[k] - num_rounds * p) ** 2 / (num_rounds * p) for k, p in streaks.items())
    assert statistic < 18.4, (counts, streaks)
