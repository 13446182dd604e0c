"""Which rule accepts more: exact expected streaks, and the formulas that predict them."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.selection import SelfSelection
from specdiff2.evaluation.lossless_cases import fixed_table, lossless_cases, random_table
from specdiff2.evaluation.losslessness import enumerate_outcomes, independent_drafts, speculative_round
from specdiff2.functional.speculative import chain_streaks, path_probs, tree_streak
from specdiff2.tree import TokenTree
from specdiff2.types import Draft


def mean_streak(rule: str, selector, verifier_table, propose) -> float:
    outcomes = enumerate_outcomes(
        lambda rng: len(speculative_round(make_rule(rule), selector, verifier_table, propose, (), rng)[1].path)
    )
    return sum(streak * mass for streak, mass in outcomes.items())


def scripted(tokens):
    return lambda prefix, rng: Draft(torch.tensor(tokens), None)


def scored(tokens, table):
    tree = TokenTree.from_chains(-1, tokens)
    paths = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return tree, torch.stack([table(path) for path in paths])


@pytest.mark.parametrize("seed", [0, 1])
def test_tree_match_is_the_sum_over_nodes_and_never_below_self_selection(seed: int) -> None:
    table = random_table(seed, (3,))
    for flat in itertools.product(range(3), repeat=4):
        tokens = [list(flat[:2]), list(flat[2:])]
        tree, probs = scored(tokens, table)
        matched = mean_streak("tree_match", None, table, scripted(tokens))
        selected = mean_streak("greedy", SelfSelection(), table, scripted(tokens))
        assert matched == pytest.approx(tree_streak(tree, probs), abs=1e-12)
        assert selected == pytest.approx(max(chain_streaks(tree, probs)), abs=1e-12)
        assert matched >= selected - 1e-12


def test_path_probs_by_hand() -> None:
    table = fixed_table((0.2, 0.3, 0.5))
    tree, probs = scored([[2, 0], [2, 1], [2, 0]], table)
    assert path_probs(tree, probs) == pytest.approx([1.0, 0.5, 0.1, 0.15])
    assert chain_streaks(tree, probs) == pytest.approx([0.6, 0.65, 0.6])
    assert tree_streak(tree, probs) == pytest.approx(0.75)
    assert SelfSelection()(tree, probs) == 1


def test_ties_go_to_the_first_chain_and_one_hot_rows_count_agreement() -> None:
    table = fixed_table((0.0, 1.0, 0.0))
    tree, probs = scored([[0, 1], [1, 0], [1, 2], [1, 0]], table)
    assert chain_streaks(tree, probs) == [0.0, 1.0, 1.0, 1.0]
    assert SelfSelection()(tree, probs) == 1


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block_is_never_below_leviathan(gamma: int) -> None:
    gains = []
    for case in lossless_cases(gamma):
        propose = independent_drafts(case.draft_table, gamma, 1)
        gains.append(
            mean_streak("block", None, case.verifier_table, propose)
            - mean_streak("leviathan", None, case.verifier_table, propose)
        )
    assert min(gains) > -1e-12
    assert (max(gains) > 1e-3) is (gamma > 1)  # at gamma = 1 the two are the same rule


def test_block_on_the_example_that_can_be_done_by_hand() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), gamma = 2: token level gives 2/3 + 4/9 = 10/9.

    Block: w_2 of 00, 01, 10, 11 is 1/4, 1, 1/2, 1 and their q is 4/9, 2/9, 2/9, 1/9, so P(streak 2) = 5/9.
    Of the rest, 0x has h_1 = 0 and 1x has h_1 = 1, so P(streak 1) = 2/9 * 1/2 = 1/9. Mean: 11/9.
    """
    verifier_table, propose = fixed_table((1 / 3, 2 / 3)), independent_drafts(torch.tensor([[2 / 3, 1 / 3]] * 2), 2, 1)
    assert mean_streak("leviathan", None, verifier_table, propose) == pytest.approx(10 / 9, abs=1e-6)
    assert mean_streak("block", None, verifier_table, propose) == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("gamma", [1, 2])
def test_more_drafts_never_hurt(gamma: int) -> None:
    for case in lossless_cases(gamma)[:3]:
        for rule in ("tree_match", "specinfer"):
            means = [
                mean_streak(rule, None, case.verifier_table, independent_drafts(case.draft_table, gamma, num_drafts))
                for num_drafts in (1, 2)
            ]
            assert means[1] >= means[0] - 1e-12, (case.name, rule)


def test_leviathan_accepts_the_overlap_of_the_two_laws() -> None:
    for case in lossless_cases(1):
        overlap = float(torch.minimum(case.verifier_table(()), case.draft_table(())[0]).sum())
        propose = independent_drafts(case.draft_table, 1, 1)
        assert mean_streak("leviathan", None, case.verifier_table, propose) == pytest.approx(overlap, abs=1e-12)
