"""Several drafters at several temperatures: the law stays the verifier's, by enumerating every random branch.

The same check refuses rules that read a draft law, whichever law an ensemble might claim: that is why they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import Tab
from torch import Tensor

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.ensemble import DrafterEnsemble, Member
from specdiff2.decoding.samplers import make_decoder
from specdiff2.decoding.selection import SelfSelection, make_selector
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table
from specdiff2.evaluation.losslessness import (
    Prefix,
    Table,
    enumerate_outcomes,
    exact_output_law,
    total_variation,
    verifier_law,
)
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.protocols import AcceptanceRule, RandomSource
from specdiff2.types import Draft, NotLosslessError, SamplingParams

GAMMA, PROMPT = 2, (0,)
CLEARLY_WRONG = 1e-2
COOL, HOT, BEST = SamplingParams(0.5), SamplingParams(2.0, top_k=2), SamplingParams(0.0)


class TemperedDrafter:
    """Draws from ``table(prefix) -> [gamma, vocab]``, tempered as it is told; ``length`` positions of it at most."""

    def __init__(self, table: Table, length: int = GAMMA) -> None:
        self.gamma, self._table, self._length = GAMMA, table, length

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> TemperedSession:
        return TemperedSession(self._table, self._length, list(prompt), sampling)


class TemperedSession:
    def __init__(self, table: Table, length: int, tokens: list[int], sampling: SamplingParams) -> None:
        self._table, self._length, self._tokens, self._sampling = table, length, tokens, sampling

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        assert not needs_probs
        logits = self._table(tuple(self._tokens))[: min(gamma, self._length)].log()
        return Draft(rng.chains(logits_to_probs(logits, self._sampling), num_drafts))

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._tokens.extend(tokens)


FIRST, SECOND = (TemperedDrafter(random_table(seed, (GAMMA, 3))) for seed in (51, 52))
SHORT = TemperedDrafter(random_table(53, (GAMMA, 3)), length=1)
ENSEMBLES = {
    "two drafters, two temperatures": [Member("a", FIRST, 1, COOL), Member("b", SECOND, 1, HOT)],
    "one drafter, two temperatures": [Member("best", FIRST, 1, BEST), Member("drawn", FIRST, 1, HOT)],
    "one drafts less": [Member("a", FIRST, 1, COOL), Member("short", SHORT, 1, HOT)],
    "shares": [Member("best", FIRST, 1, BEST), Member("short", SHORT, 2, HOT)],
}


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.3, top_k=2, top_p=0.5)], ids=["plain", "cut"])
@pytest.mark.parametrize("sampler", ["specdiff2", "tree_match"])
@pytest.mark.parametrize("members", ENSEMBLES)
def test_decoder_law(members: str, sampler: str, sampling: SamplingParams) -> None:
    """The shipped decoder: a full round, then shortened and draftless ones."""
    table, num_tokens = random_table(54, (3,)), GAMMA + 1
    decoder = make_decoder(Tab(table), DrafterEnsemble(ENSEMBLES[members]), sampler=sampler, verifier_sampling=sampling)
    output = enumerate_outcomes(
        lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=num_tokens, rng=rng).tokens)
    )
    expected = verifier_law(lambda prefix: logits_to_probs(table(prefix).log(), sampling), num_tokens, PROMPT)
    assert total_variation(output, expected) < 1e-12


def test_every_member_can_win_and_lose() -> None:
    """The rounds of the test above are not all decided by one drafter."""
    decoder = make_decoder(
        Tab(random_table(54, (3,))),
        DrafterEnsemble(ENSEMBLES["two drafters, two temperatures"]),
        sampler="tree_match",
    )
    winners = enumerate_outcomes(
        lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=GAMMA + 1, rng=rng).rounds[0].winners or ())
    )
    assert set(winners) == {(), (0,), (1,), (0, 1)}


# ---------------------------------------------------------------- rules that read a law
Claim = Callable[[Tensor, Tensor], Tensor]
CLAIMS: dict[str, Claim] = {
    "mixture": lambda first, second: (first + second) / 2,
    "of the first": lambda first, second: first,
    "of the second": lambda first, second: second,
}


def worst_gap(rule: AcceptanceRule, selection: str | None, claim: Claim, second: SamplingParams) -> float:
    """One chain of each of two drafters: the case's own, and the same at temperature ``second``; the rule is told
    that both are draws from ``claim`` of the two laws."""
    gaps = []
    for case in lossless_cases(GAMMA):

        def laws(prefix: Prefix, table: Table = case.draft_table) -> tuple[Tensor, Tensor]:
            return table(prefix), logits_to_probs(table(prefix).log(), second)

        def propose(prefix: Prefix, rng: RandomSource, laws=laws) -> Draft:
            return Draft(torch.cat([rng.chains(law, 1) for law in laws(prefix)]), claim(*laws(prefix)))

        output = exact_output_law(
            rule, make_selector(selection), case.verifier_table, case.draft_table, GAMMA, 2, GAMMA + 1,
            propose=propose, max_rounds=1,
        )  # fmt: skip
        gaps.append(total_variation(output, verifier_law(case.verifier_table, GAMMA + 1)))
    return max(gaps)


@pytest.mark.parametrize(("rule", "selection"), [("greedy", SelfSelection.name), ("tree_match", None)])
def test_rules_that_never_read_a_law_are_exact_in_every_case(rule: str, selection: str | None) -> None:
    assert worst_gap(make_rule(rule), selection, CLAIMS["mixture"], HOT) < 1e-12


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("rule", ["specinfer", "traversal"])
def test_ratio_rules_over_drafts_of_two_laws_are_biased(rule: str, claim: str) -> None:
    assert worst_gap(make_rule(rule), None, CLAIMS[claim], HOT) > CLEARLY_WRONG


@pytest.mark.parametrize("rule", ["specinfer", "traversal"])
def test_the_control_passes(rule: str) -> None:
    """Two drafters that happen to have one law: the rules above fail for the second law, not for the harness."""
    assert worst_gap(make_rule(rule), None, CLAIMS["mixture"], SamplingParams()) < 1e-12


@pytest.mark.parametrize("sampler", ["specinfer", "traversal", "leviathan", "block"])
def test_the_shipped_decoder_refuses_them(sampler: str) -> None:
    ensemble = DrafterEnsemble(ENSEMBLES["two drafters, two temperatures"])
    with pytest.raises(NotLosslessError, match="draws of different laws"):
        make_decoder(Tab(random_table(54, (3,))), ensemble, sampler=sampler)
    session = ensemble.start(PROMPT, SamplingParams(), 4)
    with pytest.raises(NotLosslessError, match="draws of different laws"):
        enumerate_outcomes(lambda rng: session.propose(1, 2, rng, needs_probs=True).tokens.numel())
