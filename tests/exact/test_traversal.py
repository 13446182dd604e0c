"""Traversal verification: exact law for K chains, order of decisions, planted wrong versions, expected streaks."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdiff2.decoding.acceptance import SpecInferRule, TraversalRule, make_rule
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table, worst_case_gap
from specdiff2.evaluation.losslessness import (
    enumerate_outcomes,
    exact_output_law,
    independent_drafts,
    speculative_round,
    total_variation,
    verifier_law,
)
from specdiff2.functional.speculative import accept_prob, block_accept_prob, law, residual
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance

TOLERANCE, CLEARLY_WRONG = 1e-12, 1e-2


class Retrying:
    """A second version, top to bottom in one function: every draw of a duplicate runs its whole subtree again.

    The hooks are where the mutants below go wrong.
    """

    name, is_lossless, reads_draft_probs, walks_tree = "retrying", True, True, True

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        self.tree, self.probs, self.rng = tree, [law(row) for row in verifier_probs], rng
        self.drafts = [law(row) for row in draft_probs]
        return self.solve([0], 1.0, tree.chain_nodes)

    def solve(self, path, weight, chains):
        depth, target, coin = len(path) - 1, self.probs[path[-1]], True
        if self.node_first(depth) and not self.rng.bernoulli(weight):
            return None
        for chain in self.ordered([chain for chain in chains if len(chain) > depth], depth, target):
            token, draft = self.tree.tokens[chain[depth]], self.drafts[depth]
            kept = self.child_weight(path, weight, target, draft, token)
            below = [other for other in chains if other[: depth + 1] == chain[: depth + 1]]
            accepted = self.solve([*path, chain[depth]], kept, below)
            if accepted is not None:
                return accepted
            weight, target = self.after_rejection(weight, target, draft)
        if depth and not self.node_first(depth):
            coin = self.rng.bernoulli(weight)
        return Acceptance(path[1:], self.rng.categorical(self.emitted(path, target))) if coin else None

    def node_first(self, depth):
        return False

    def ordered(self, chains, depth, target):
        return chains

    def child_weight(self, path, weight, target, draft, token):
        return accept_prob(weight * float(target[token]), float(draft[token]))

    def after_rejection(self, weight, target, draft):
        return block_accept_prob(weight, target, draft), residual(target, draft, weight)

    def emitted(self, path, target):
        return target


class LastDrawnFirst(Retrying):
    """Another order that does not look at the draws: lossless as well."""

    def ordered(self, chains, depth, target):
        return chains[::-1]


class NoUpdate(Retrying):
    """A given-up branch leaves no trace."""

    def after_rejection(self, weight, target, draft):
        return weight, target


class StaleLaw(Retrying):
    """The weight is updated, the law is not."""

    def after_rejection(self, weight, target, draft):
        return block_accept_prob(weight, target, draft), target


class StaleWeight(Retrying):
    """The law is updated, the weight is not."""

    def after_rejection(self, weight, target, draft):
        return weight, residual(target, draft, weight)


class TokenResidual(Retrying):
    """The residual forgets that the node itself is in doubt."""

    def after_rejection(self, weight, target, draft):
        return block_accept_prob(weight, target, draft), residual(target, draft)


class DroppedDuplicates(Retrying):
    """Each distinct child counts once."""

    def ordered(self, chains, depth, target):
        return list({chain[depth]: chain for chain in reversed(chains)}.values())[::-1]


class WrongParent(Retrying):
    """A child is accepted by its probability after the grandparent; residuals and bonus tokens are right."""

    def child_weight(self, path, weight, target, draft, token):
        row = self.probs[path[-2]] if len(path) > 1 else target
        return accept_prob(weight * float(row[token]), float(draft[token]))


class ChildTokenOnly(Retrying):
    """The token alone is judged, not the path to it."""

    def child_weight(self, path, weight, target, draft, token):
        return accept_prob(float(target[token]), float(draft[token]))


class NodeFirst(Retrying):
    """The coin of an inner node comes before those of its children, not after them."""

    def node_first(self, depth):
        return 0 < depth < len(self.drafts)


class BestFirst(Retrying):
    """The draws are looked at to decide which one to try first."""

    def ordered(self, chains, depth, target):
        return sorted(chains, key=lambda chain: -float(target[self.tree.tokens[chain[depth]]]))


class PlainBonus(Retrying):
    """The token after an inner node comes from the verifier, not from what the given-up branches left."""

    def emitted(self, path, target):
        return self.probs[path[-1]]


def survivals(rule, case, gamma: int, num_drafts: int) -> list[float]:
    """P(streak >= j) for j = 1..gamma."""
    propose = independent_drafts(case.draft_table, gamma, num_drafts)
    streaks = enumerate_outcomes(
        lambda rng: len(speculative_round(rule, None, case.verifier_table, propose, (), rng)[1].path)
    )
    return [sum(mass for streak, mass in streaks.items() if streak >= j) for j in range(1, gamma + 1)]


def outcomes_of(rule, tree, verifier_probs, draft_probs):
    def run(rng):
        accepted = rule(tree, verifier_probs, draft_probs, rng)
        return tuple(accepted.path), accepted.next_token

    return enumerate_outcomes(run)


def case_named(name: str, gamma: int):
    return next(case for case in lossless_cases(gamma) if case.name == name)


# ---------------------------------------------------------------- the law (gamma 1, 2 with K 1..3: test_rules_exact)
@pytest.mark.parametrize("name", [case.name for case in lossless_cases(1)])
def test_law_for_a_window_of_three_and_two_drafts(name: str) -> None:
    case = case_named(name, 3)
    output = exact_output_law(TraversalRule(), None, case.verifier_table, case.draft_table, 3, 2, 4, max_rounds=1)
    assert total_variation(output, verifier_law(case.verifier_table, 4)) < TOLERANCE


@pytest.mark.parametrize("name", ["draft_top_k", "both_truncated", "draft_one_hot", "disjoint"])
def test_law_for_a_window_of_three_and_three_drafts(name: str) -> None:
    case = case_named(name, 3)
    output = exact_output_law(TraversalRule(), None, case.verifier_table, case.draft_table, 3, 3, 4, max_rounds=1)
    assert total_variation(output, verifier_law(case.verifier_table, 4)) < TOLERANCE


def test_law_when_every_round_speculates() -> None:
    """Windows of two with two drafts, rounds that start after partly accepted paths."""
    case = case_named("draft_top_k", 2)
    output = exact_output_law(TraversalRule(), None, case.verifier_table, case.draft_table, 2, 2, 4)
    assert total_variation(output, verifier_law(case.verifier_table, 4)) < TOLERANCE


def test_law_with_drafts_of_unequal_length() -> None:
    """The second chain is cut to one token whatever was drawn."""
    case = case_named("random", 2)

    class Cut(TraversalRule):
        def __call__(self, tree, verifier_probs, draft_probs, rng):
            first, second = tree.chain_nodes
            cut = TokenTree(tree.tokens, tree.parents, [first, second[:1]])
            return super().__call__(cut, verifier_probs, draft_probs, rng)

    output = exact_output_law(Cut(), None, case.verifier_table, case.draft_table, 2, 2, 3, max_rounds=1)
    assert total_variation(output, verifier_law(case.verifier_table, 3)) < TOLERANCE


# ---------------------------------------------------------------- decisions
def test_one_tree_by_hand() -> None:
    """p = (.5, .1, .4), q = (.6, .2, .2), chains 00, 01, 20.

    Node 0 has w = 5/6, leaf 00 5/6 * 5/6 = 25/36. Without it: S = 2/15 on token 2 only, w = 4/9; leaf 01 is
    impossible; S = 4/9 - 1/5, w = 11/36. Without node 0 the root's residual is token 2: w = 1; leaf 20 has 5/6,
    and without it node 2 stays certain and emits the residual (p - q)+, which is token 2.
    """
    tree = TokenTree.from_chains(9, [[0, 0], [0, 1], [2, 0]])
    verifier_probs = torch.tensor([[0.5, 0.1, 0.4]], dtype=torch.float64).expand(6, 3)
    draft_probs = torch.tensor([[0.6, 0.2, 0.2]] * 2, dtype=torch.float64)
    node_0, leaf_00, node_2, leaf_20 = 1, 2, 4, 5
    outcomes = outcomes_of(TraversalRule(), tree, verifier_probs, draft_probs)
    beyond_0 = 11 / 36 * 25 / 36
    expected = {((node_0,), 2): (11 / 36) ** 2, ((node_2,), 2): beyond_0 / 6}
    for token, prob in enumerate((0.5, 0.1, 0.4)):
        expected[(node_0, leaf_00), token] = 25 / 36 * prob
        expected[(node_2, leaf_20), token] = beyond_0 * 5 / 6 * prob
    assert outcomes == pytest.approx(expected, abs=1e-12)


class Recorder:
    """Notes every coin; heads at the one asked for."""

    def __init__(self, heads_at: int) -> None:
        self.heads_at, self.coins = heads_at, list[float]()

    def bernoulli(self, prob: float) -> bool:
        self.coins.append(prob)
        return len(self.coins) - 1 == self.heads_at

    def categorical(self, probs) -> int:
        return int(probs.argmax())


def test_decisions_go_from_the_leaves_to_the_root_branch_by_branch() -> None:
    """One coin per node, children before their node, siblings in the order drawn, none for the root."""
    tree = TokenTree.from_chains(9, [[0, 0], [1, 0], [0, 1], [0, 0]])
    probs = torch.tensor([[0.5, 0.1, 0.4]], dtype=torch.float64).expand(tree.num_nodes, 3)
    draft_probs = torch.tensor([[0.6, 0.2, 0.2]] * 2, dtype=torch.float64)
    node_0, leaf_00, node_1, leaf_10, leaf_01 = 1, 2, 3, 4, 5
    ends = [TraversalRule()(tree, probs, draft_probs, Recorder(heads_at)).path for heads_at in range(6)]
    assert ends == [[node_0, leaf_00], [node_0, leaf_01], [node_0], [node_1, leaf_10], [node_1], []]
    recorder = Recorder(6)
    TraversalRule()(tree, probs, draft_probs, recorder)
    # leaf 00 as in the test by hand; the second draw of 0 is a duplicate: w = 4/9 -> 11/36 (after 01) -> 19/144
    assert recorder.coins == pytest.approx([25 / 36, 0.0, 19 / 144, 0.0, 0.0])


@pytest.mark.parametrize("seed", range(4))
def test_a_duplicate_needs_no_second_look(seed: int) -> None:
    """Same law of (path, next token) as trying the whole branch again, tree by tree."""
    draft_probs = random_table(60 + seed, (2, 3))(())
    table = random_table(70 + seed, (3,))
    for flat in itertools.product(range(3), repeat=5):
        tree = TokenTree.from_chains(9, [flat[:2], flat[2:4], [flat[0], flat[4]]])
        paths = [()]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            paths.append((*paths[parent], token))
        probs = torch.stack([table(path) for path in paths])
        ours, theirs = (outcomes_of(rule, tree, probs, draft_probs) for rule in (TraversalRule(), Retrying()))
        assert total_variation(ours, theirs) < TOLERANCE


# ---------------------------------------------------------------- mutants
@pytest.mark.parametrize("control", [Retrying(), LastDrawnFirst()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("num_drafts", "gamma"), [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_the_controls_pass(control, num_drafts: int, gamma: int) -> None:
    case, gap = worst_case_gap(control, num_drafts=num_drafts, gamma=gamma)
    assert gap < TOLERANCE, case


@pytest.mark.parametrize(
    ("mutant", "num_drafts", "gamma"),
    [
        (NoUpdate(), 1, 1),
        (NoUpdate(), 2, 2),
        (StaleLaw(), 1, 2),
        (StaleLaw(), 2, 1),
        (StaleWeight(), 1, 2),
        (TokenResidual(), 1, 2),
        (TokenResidual(), 2, 2),
        (DroppedDuplicates(), 2, 1),
        (DroppedDuplicates(), 3, 1),
        (WrongParent(), 1, 2),
        (WrongParent(), 2, 2),
        (ChildTokenOnly(), 1, 2),
        (ChildTokenOnly(), 2, 2),
        (NodeFirst(), 1, 2),
        (NodeFirst(), 2, 2),
        (BestFirst(), 2, 1),
        (BestFirst(), 2, 2),
        (PlainBonus(), 1, 1),
        (PlainBonus(), 2, 2),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_planted_wrong_versions_fail(mutant, num_drafts: int, gamma: int) -> None:
    case, gap = worst_case_gap(mutant, num_drafts=num_drafts, gamma=gamma)
    assert gap > CLEARLY_WRONG, case


# ---------------------------------------------------------------- one chain: block verification
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_one_chain_has_the_outcomes_of_block_verification(gamma: int) -> None:
    for case in lossless_cases(gamma):
        laws = []
        for rule in (TraversalRule(), make_rule("block")):
            propose = independent_drafts(case.draft_table, gamma, 1)

            def run(rng, rule=rule, case=case, propose=propose):
                tree, accepted = speculative_round(rule, None, case.verifier_table, propose, (), rng)
                return tuple(tree.tokens), len(accepted.path), accepted.next_token

            laws.append(enumerate_outcomes(run))
        assert total_variation(*laws) < TOLERANCE, case.name


@pytest.mark.parametrize("seed", range(20))
def test_one_chain_makes_the_draws_of_block_verification(seed: int) -> None:
    verifier, propose = random_table(33, (5,)), independent_drafts(random_table(34, (4, 5)), 4, 1)
    rounds = []
    for rule in (TraversalRule(), make_rule("block")):
        rng = TorchRandomSource(seed)
        accepted = [speculative_round(rule, None, verifier, propose, (step,), rng)[1] for step in range(5)]
        rounds.append([(one.path, one.next_token) for one in accepted])
    assert rounds[0] == rounds[1]


# ---------------------------------------------------------------- expected streaks
@pytest.mark.parametrize(("gamma", "num_drafts"), [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_never_below_specinfer_and_equal_at_the_first_position(gamma: int, num_drafts: int) -> None:
    gains = []
    for case in lossless_cases(gamma):
        ours = survivals(TraversalRule(), case, gamma, num_drafts)
        theirs = survivals(SpecInferRule(), case, gamma, num_drafts)
        assert ours[0] == pytest.approx(theirs[0], abs=1e-12), case.name
        assert all(one >= other - 1e-12 for one, other in zip(ours, theirs, strict=True)), case.name
        gains.append(sum(ours) - sum(theirs))
    assert (max(gains) > 1e-2) is (gamma > 1)  # at gamma = 1 the two are the same rule


@pytest.mark.parametrize("gamma", [1, 2])
def test_more_drafts_never_hurt(gamma: int) -> None:
    for case in lossless_cases(gamma):
        means = [sum(survivals(TraversalRule(), case, gamma, num_drafts)) for num_drafts in (1, 2, 3)]
        assert means[0] <= means[1] + 1e-12 and means[1] <= means[2] + 1e-12, case.name
