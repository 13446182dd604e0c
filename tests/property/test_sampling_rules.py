"""Every rule on random laws with zeros, any tree, honest drafts or not: no NaN, no impossible token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff2.decoding.acceptance import RULES, make_rule
from specdiff2.decoding.selection import SelfSelection
from specdiff2.evaluation.losslessness import enumerate_outcomes
from specdiff2.functional.speculative import (
    accept_prob,
    block_accept_prob,
    block_survival,
    chain_streaks,
    residual,
    tree_streak,
)
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree

VOCAB, GAMMA = 4, 3
weight = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-12, 1.0))
law_row = (
    st.lists(weight, min_size=VOCAB, max_size=VOCAB)
    .filter(lambda row: sum(row) > 1e-6)
    .map(lambda row: [value / math.fsum(row) for value in row])
)
chain = st.lists(st.integers(0, VOCAB - 1), min_size=GAMMA, max_size=GAMMA)


@st.composite
def rounds(draw):
    """A tree with its probabilities; the tokens need not be possible under either law."""
    tree = TokenTree.from_chains(0, draw(st.lists(chain, min_size=1, max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    verifier = [draw(law_row) for _ in range(tree.num_nodes)]
    draft = verifier[:GAMMA] if draw(st.booleans()) else [draw(law_row) for _ in range(GAMMA)]
    return tree, torch.tensor(verifier, dtype=dtype), torch.tensor(draft, dtype=dtype), draw(st.integers(0, 99))


@pytest.mark.parametrize("name", sorted(RULES))
@settings(deadline=None, max_examples=60)
@given(rounds())
def test_never_an_impossible_token(name: str, given_round) -> None:
    tree, verifier_probs, draft_probs, seed = given_round
    rule = make_rule(name)
    verified = tree if rule.walks_tree else tree.select(0)
    accepted = rule(verified, verifier_probs, draft_probs, TorchRandomSource(seed))
    node = 0
    for child in accepted.path:
        assert tree.parents[child] == node
        assert float(verifier_probs[node, tree.tokens[child]]) > 0.0
        node = child
    assert float(verifier_probs[node, accepted.next_token]) > 0.0
    if not rule.walks_tree:
        assert accepted.path == verified.chain_nodes[0][: len(accepted.path)]


@pytest.mark.parametrize("name", sorted(RULES))
@settings(deadline=None, max_examples=20)
@given(rounds())
def test_every_branch_is_a_law(name: str, given_round) -> None:
    """The enumerator raises on NaN and on rows without mass, in any branch."""
    tree, verifier_probs, draft_probs, _ = given_round
    rule = make_rule(name)
    verified = tree if rule.walks_tree else tree.select(0)
    outcomes = enumerate_outcomes(lambda rng: rule(verified, verifier_probs, draft_probs, rng).next_token)
    assert math.fsum(outcomes.values()) == pytest.approx(1.0, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(rounds())
def test_self_selection_and_tree_streak(given_round) -> None:
    tree, verifier_probs, _, _ = given_round
    streaks = chain_streaks(tree, verifier_probs)
    slow = []
    for nodes in tree.chain_nodes:
        product, total, parent = 1.0, 0.0, 0
        for node in nodes:
            product *= float(verifier_probs[parent, tree.tokens[node]])
            total, parent = total + product, node
        slow.append(total)
    assert streaks == pytest.approx(slow, abs=1e-6)
    assert SelfSelection()(tree, verifier_probs) == streaks.index(max(streaks))
    assert max(streaks) - 1e-9 <= tree_streak(tree, verifier_probs) <= GAMMA + 1e-5


@settings(deadline=None, max_examples=100)
@given(law_row, law_row, st.floats(0.0, 1.0))
def test_residual_and_block_arithmetic(first: list[float], second: list[float], scale: float) -> None:
    target, draft = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    kept = target.clone()
    rest = residual(target, draft, scale)
    assert float(rest.sum()) == pytest.approx(1.0)
    assert not bool(rest[target == 0].any())
    assert 0.0 <= block_accept_prob(scale, target, draft) <= 1.0
    assert torch.equal(target, kept)  # arguments are left alone


def test_arithmetic_at_the_corners() -> None:
    assert accept_prob(0.0, 0.0) == 0.0
    assert accept_prob(0.3, 0.0) == 1.0
    assert accept_prob(0.3, 0.6) == 0.5
    assert accept_prob(0.0, 0.6) == 0.0
    law = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(law, law), law)
    assert block_accept_prob(1.0, law, law) == 1.0
    assert block_accept_prob(0.0, law, law) == 0.0
    assert block_survival([0.5, 0.0, 0.9], [0.25, 0.0, 0.0]) == [1.0, 1.0, 0.0, 0.0]
