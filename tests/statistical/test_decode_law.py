"""The law of whole completions at T > 0, through the shipped decoders: engine, rules, selection, stopping together.

Exact where every random branch can be enumerated; sampled (with the real seeded source) for the rest. The sampled
test rejects at p < 1e-4; with 4000 completions and 26 degrees of freedom a total variation of 0.08 raises chi-square
by at least 4 * 4000 * 0.08^2 = 102 above its mean of 26 (critical value 64), i.e. is found with power above 0.95. That
it finds a wrong sampler is itself tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from helpers import FunctionDrafter, Tab, TableDrafter, tiny_verifier
from torch import Tensor

from specdiff2.decoding.acceptance import LeviathanRule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.engine import Drafting, decode
from specdiff2.decoding.samplers import SAMPLERS, make_decoder
from specdiff2.decoding.selection import SelfSelection
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Decoder, RandomSource
from specdiff2.rng import TorchRandomSource
from specdiff2.types import SamplingParams

Tokens = tuple[int, ...]
COMBINATIONS = [(name, k) for name, s in SAMPLERS.items() for k in ((1, 2) if s.num_drafts > 1 else (1,))]
PROMPT = [0]
T1 = SamplingParams()


def context_law(vocab: int, *, zeros: bool = False):
    """A law that depends on every token so far and on their order."""

    def law(context: Tokens) -> Tensor:
        seed = 7
        for token in context:
            seed = (seed * 31 + token + 1) % 1_000_003
        weights = torch.rand(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 + 0.02
        if zeros:
            weights[seed % vocab] = 0.0
        return weights / weights.sum()

    return law


def completion_law(decoder: Decoder, num_tokens: int) -> dict[Tokens, float]:
    return enumerate_outcomes(lambda rng: tuple(decoder.generate(PROMPT, max_new_tokens=num_tokens, rng=rng).tokens))


# ---------------------------------------------------------------- exact
@pytest.mark.parametrize(("sampler", "num_drafts"), COMBINATIONS)
def test_every_sampler_keeps_the_law_of_completions_exactly(sampler: str, num_drafts: int) -> None:
    """Three tokens out of three, one of them EOS: full, shortened and draftless windows, and early ends."""
    verifier = Tab(context_law(3, zeros=True), eos_ids=[1], sampling=T1)
    drafter = TableDrafter([[0.6, 0.1, 0.3], [0.0, 0.5, 0.5]])
    decoder = make_decoder(verifier, drafter, sampler=sampler, num_drafts=num_drafts, draft_sampling=T1)
    expected = completion_law(AutoregressiveDecoder(verifier), 3)
    assert expected == pytest.approx(stopped(verifier_law(verifier.probs, 3, (0,)), eos=1), abs=1e-12)
    assert total_variation(completion_law(decoder, 3), expected) < 1e-12


def stopped(law: Mapping[Tokens, float], eos: int) -> dict[Tokens, float]:
    ended: dict[Tokens, float] = {}
    for tokens, mass in law.items():
        key = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
        ended[key] = ended.get(key, 0.0) + mass
    return ended


@pytest.mark.parametrize(("sampler", "num_drafts"), COMBINATIONS)
@pytest.mark.parametrize(
    ("verifier_sampling", "draft_sampling"),
    [
        (SamplingParams(1.0, top_k=3), SamplingParams(1.0, top_k=2)),
        (SamplingParams(0.3, top_k=2, top_p=0.5), SamplingParams(1.7)),
        (SamplingParams(1.4, top_p=0.7), SamplingParams(0.5, top_p=0.9)),
    ],
)
def test_cases_1_and_5_tempered_laws_on_either_side(
    sampler: str, num_drafts: int, verifier_sampling: SamplingParams, draft_sampling: SamplingParams
) -> None:
    verifier = Tab(context_law(4))
    draft_law = logits_to_probs(torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log(), draft_sampling)
    decoder = make_decoder(
        verifier, TableDrafter(draft_law.tolist()), sampler=sampler, num_drafts=num_drafts,
        verifier_sampling=verifier_sampling,
        draft_sampling=None if SAMPLERS[sampler].num_nodes else draft_sampling,  # a grown tree draws nothing
    )  # fmt: skip

    def tempered(context: Tokens) -> Tensor:
        return logits_to_probs(verifier.probs(context).log(), verifier_sampling)

    expected = verifier_law(tempered, 2, (0,))
    law = completion_law(decoder, 2)
    assert law.keys() <= expected.keys()  # nothing outside the nucleus, wherever in a round it comes from
    assert total_variation(law, expected) < 1e-12


@pytest.mark.parametrize("sampler", ["specdiff", "specdiff2", "tree_match"])
def test_drafts_that_no_law_describes_are_lossless_under_rules_that_never_read_it(sampler: str) -> None:
    """The drafter looks at the context and always proposes the same chains: fixed, not drawn."""
    verifier = Tab(context_law(3))

    def fixed(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, None]:
        first = sum(context) % 3
        return torch.tensor([[(first + k + j) % 3 for j in range(gamma)] for k in range(num_drafts)]), None

    num_drafts = 1 if sampler == "specdiff" else 2
    decoder = make_decoder(
        verifier, FunctionDrafter(2, fixed), sampler=sampler, num_drafts=num_drafts, verifier_sampling=T1
    )
    assert total_variation(completion_law(decoder, 3), verifier_law(verifier.probs, 3, (0,))) < 1e-12


KINDS = {
    "plain": {"shifted": False},
    "shifted": {"shifted": True},
    "conditioned": {"shifted": True, "conditioning": "verifier_kv", "markov_rank": 2},
}


def real_drafter(verifier: HFVerifier, kind: str) -> BlockDrafter:
    """Input and Markov head of a conditioned one start from zero: random numbers instead, so that they matter."""
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=2, **KINDS[kind])
    with torch.no_grad():
        for part in (drafter.context_input, drafter.markov):
            for parameter in part.parameters() if part is not None else ():
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sampler", "num_drafts"),
    [
        ("leviathan", 1),
        ("block", 1),
        ("specinfer", 2),
        ("traversal", 2),
        ("tree_match", 2),
        ("tree", 1),
        ("tree_lookup", 1),
    ],
)
def test_real_models_keep_the_law(sampler: str, num_drafts: int, kind: str) -> None:
    """HFVerifier and BlockDrafter with their caches, against plain forwards; float32, so within rounding."""
    verifier = tiny_verifier(vocab=2, seed=5)
    decoder = make_decoder(
        verifier, real_drafter(verifier, kind), sampler=sampler, num_drafts=num_drafts, verifier_sampling=T1,
        draft_sampling=None if SAMPLERS[sampler].num_nodes else SamplingParams(0.8),  # a grown tree draws nothing
    )  # fmt: skip

    def plain(context: Tokens) -> Tensor:
        return verifier.model(torch.tensor([context]), use_cache=False).logits[0, -1].double().softmax(-1)

    assert total_variation(completion_law(decoder, 3), verifier_law(plain, 3, (0,))) < 1e-5


# ---------------------------------------------------------------- sampled
NUM_COMPLETIONS = 4000
VERIFIER = Tab(context_law(3), sampling=T1)
DRAFTER = TableDrafter([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])


def p_value(completions: Counter[Tokens]) -> float:
    """Chi-square of 3-token completions against the verifier's own law."""
    expected = verifier_law(VERIFIER.probs, 3, (0,))
    assert len(expected) == 27 and min(expected.values()) * NUM_COMPLETIONS > 1.0
    total = sum(completions.values())
    statistic = sum((completions[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    half_df = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_df, torch.tensor(statistic / 2, dtype=torch.float64)))


def sample(decoder: Decoder) -> Counter[Tokens]:
    rng = TorchRandomSource(11)
    return Counter(tuple(decoder.generate(PROMPT, max_new_tokens=3, rng=rng).tokens) for _ in range(NUM_COMPLETIONS))


@pytest.mark.parametrize("sampler", ["specdiff2", "specinfer", "block", "autoregressive"])
def test_seeded_source_keeps_the_law(sampler: str) -> None:
    if sampler == "autoregressive":
        decoder: Decoder = AutoregressiveDecoder(VERIFIER)
    else:
        num_drafts = 1 if sampler == "block" else 2
        decoder = make_decoder(VERIFIER, DRAFTER, sampler=sampler, num_drafts=num_drafts, draft_sampling=T1)
    assert p_value(sample(decoder)) > 1e-4


def test_the_sampled_test_finds_best_of_k_followed_by_a_ratio_rule() -> None:
    biased = Drafting(DRAFTER, LeviathanRule(), SelfSelection(), gamma=2, num_drafts=2, sampling=T1)
    rng = TorchRandomSource(11)
    completions = Counter(
        tuple(decode(VERIFIER, PROMPT, sampling=T1, drafting=biased, max_new_tokens=3, rng=rng).tokens)
        for _ in range(NUM_COMPLETIONS)
    )
    assert p_value(completions) < 1e-4


def test_case_6_temperature_and_seeds() -> None:
    law = [0.1, 0.5, 0.4]
    for temperature, num_distinct in ((0.0, {1}), (1.0, {2, 3})):
        decoder = SpeculativeDecoder(
            Tab(law), DRAFTER, rule=LeviathanRule(), verifier_sampling=SamplingParams(temperature)
        )
        tokens = {decoder.generate(PROMPT, max_new_tokens=1, rng=TorchRandomSource(s)).tokens[0] for s in range(200)}
        assert len(tokens) in num_distinct
