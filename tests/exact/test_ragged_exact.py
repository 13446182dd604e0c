"""Drafts that end early: the law stays the verifier's for rules that never read q, and only for those.

Every chain is cut before its first token 2, so its length depends on the drawn tokens themselves.
"""

from __future__ import annotations

import pytest
import torch
from helpers import FunctionDrafter, Tab
from torch import Tensor

from specdiff2.decoding.acceptance import GreedyRule, make_rule
from specdiff2.decoding.selection import make_selector
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table
from specdiff2.evaluation.losslessness import (
    Prefix,
    enumerate_outcomes,
    exact_output_law,
    total_variation,
    verifier_law,
)
from specdiff2.protocols import AcceptanceRule, RandomSource
from specdiff2.types import Acceptance, Draft, NotLosslessError, SamplingParams

GAMMA, PROMPT = 2, (0,)
CLEARLY_WRONG = 1e-2
SAMPLERS = [("greedy", None, 1), ("greedy", "self_selection", 2), ("tree_match", None, 1), ("tree_match", None, 2)]


def cut(tokens: Tensor) -> Tensor:
    """-1 from the first token 2 on."""
    return tokens.masked_fill((tokens == 2).cummax(-1).values, -1)


def worst_gap(rule: AcceptanceRule, selection: str | None, num_drafts: int) -> float:
    gaps = []
    for case in lossless_cases(GAMMA):

        def propose(prefix: Prefix, rng: RandomSource, draft_table=case.draft_table) -> Draft:
            probs = draft_table(prefix)
            return Draft(cut(rng.chains(probs, num_drafts)), probs)

        output = exact_output_law(
            rule, make_selector(selection), case.verifier_table, case.draft_table, GAMMA, num_drafts, GAMMA + 1,
            propose=propose, max_rounds=1,
        )  # fmt: skip
        gaps.append(total_variation(output, verifier_law(case.verifier_table, GAMMA + 1)))
    return max(gaps)


@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_rules_that_never_read_q_keep_the_law(rule: str, selection: str | None, num_drafts: int) -> None:
    assert worst_gap(make_rule(rule), selection, num_drafts) < 1e-12


@pytest.mark.parametrize(
    ("rule", "num_drafts"), [("leviathan", 1), ("block", 1), ("specinfer", 2), ("traversal", 1), ("traversal", 2)]
)
def test_ratio_rules_would_be_biased(rule: str, num_drafts: int) -> None:
    """Why the decoder refuses them: a drafted token that is left out was drawn from q all the same."""
    assert worst_gap(make_rule(rule), None, num_drafts) > CLEARLY_WRONG


class PaddingRejected(GreedyRule):
    """Takes the padding after a chain for a rejected token: draws from p without x, and p[-1] is the last token."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        accepted = super().__call__(tree, verifier_probs, draft_probs, rng)
        (chain,) = tree.chain_nodes
        if len(chain) == GAMMA or len(accepted.path) < len(chain):
            return accepted
        rest = verifier_probs[chain[-1] if chain else 0].clone()
        rest[-1] = 0.0
        return Acceptance(accepted.path, rng.categorical(rest) if rest.sum() > 0 else accepted.next_token)


class PaddedNode(GreedyRule):
    """Takes -1 for the node where the chain ends: the token after it comes from the last row that was scored."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        accepted = super().__call__(tree, verifier_probs, draft_probs, rng)
        (chain,) = tree.chain_nodes
        if len(chain) == GAMMA or len(accepted.path) < len(chain):
            return accepted
        return Acceptance(accepted.path, rng.categorical(verifier_probs[-1]))


@pytest.mark.parametrize(("mutant", "selection", "num_drafts"), [
    (PaddingRejected(), None, 1), (PaddingRejected(), "self_selection", 2), (PaddedNode(), "self_selection", 2),
])  # fmt: skip
def test_planted_wrong_ends_fail(mutant: AcceptanceRule, selection: str | None, num_drafts: int) -> None:
    assert worst_gap(mutant, selection, num_drafts) > CLEARLY_WRONG


# ---------------------------------------------------------------- the shipped decoder
def ragged_drafter() -> FunctionDrafter:
    table = random_table(41, (GAMMA, 3))

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        probs = table(tuple(context))[:gamma]
        if context[-1] == 2:  # [K, 0]: nothing to say after this token
            return torch.zeros((num_drafts, 0), dtype=torch.long), probs
        return cut(rng.chains(probs, num_drafts)), probs

    return FunctionDrafter(GAMMA, propose)


def decoder_of(rule: str, selection: str | None, num_drafts: int, **options: object) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        Tab(random_table(42, (3,))), ragged_drafter(), rule=make_rule(rule), selector=make_selector(selection),
        num_drafts=num_drafts, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_decoder_law(rule: str, selection: str | None, num_drafts: int) -> None:
    decoder = decoder_of(rule, selection, num_drafts)
    output = enumerate_outcomes(lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=3, rng=rng).tokens))
    assert total_variation(output, verifier_law(random_table(42, (3,)), 3, PROMPT)) < 1e-12


@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_rounds_of_every_length_occur_and_are_recorded(rule: str, selection: str | None, num_drafts: int) -> None:
    decoder = decoder_of(rule, selection, num_drafts)
    outcomes = enumerate_outcomes(
        lambda rng: tuple(
            (r.num_drafted, r.num_accepted)
            for r in decoder.generate(list(PROMPT), max_new_tokens=GAMMA + 1, rng=rng).rounds
        )
    )
    first = {rounds[0] for rounds in outcomes}
    assert first == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_the_decoder_refuses_ratio_rules(rule: str) -> None:
    decoder = decoder_of(rule, None, 1, draft_sampling=SamplingParams())
    with pytest.raises(NotLosslessError, match=rf"rule '{rule}' got drafts that end early"):
        enumerate_outcomes(lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=3, rng=rng).tokens))
