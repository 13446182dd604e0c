"""Grown trees with tree match reproduce the verifier's law; wrong trees and windows are refused by the same check.

Enumerated over every random branch: a grown tree is fixed given the committed tokens, so the only randomness is the
verifier's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import Tab, TableLaw
from torch import Tensor

from specdiff2.decoding.acceptance import TreeMatchRule
from specdiff2.decoding.cost_table import CostKey, CostTable
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.decoding.tree_growth import GrowthSettings, TreeGrowth
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table
from specdiff2.evaluation.losslessness import Prefix, Table, enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.functional.speculative import tree_streak
from specdiff2.functional.tree_search import best_first
from specdiff2.protocols import AcceptanceRule, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance, ConfigError, SamplingParams

GAMMA, PROMPT = 2, (0,)
CLEARLY_WRONG = 1e-2
KEY = CostKey("m", "v", "d", "float64", 1, "eager")
# a verifier pass that gets dearer with every node: auto keeps few nodes, and in some rounds none
STEEP = CostTable.from_medians(KEY, draft_s=0.3, other_s=0.0, verify_s={1: 1.0, 2: 1.5, 3: 2.1, 5: 3.2, 13: 9.0})
GROWTHS = {
    "smallest": TreeGrowth(GrowthSettings(2)),
    "some": TreeGrowth(GrowthSettings(5)),
    "hot": TreeGrowth(GrowthSettings(5, tree_temperature=3.0)),
    "cold": TreeGrowth(GrowthSettings(5, tree_temperature=0.2)),
    "all": TreeGrowth(GrowthSettings(12)),
    "auto": TreeGrowth(GrowthSettings("auto", max_nodes=12), STEEP),
}
Grow = Callable[[TableLaw, int], TokenTree]


class LawDrafter:
    """Drafter with a law that depends on the committed tokens: ``table(prefix) -> [gamma, vocab (, vocab)]``."""

    gamma = GAMMA

    def __init__(self, table: Table) -> None:
        self.table = table

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> LawSession:
        return LawSession(self.table, list(prompt))


class LawSession:
    def __init__(self, table: Table, tokens: list[int]) -> None:
        self._table, self._tokens = table, tokens

    def law(self, gamma: int) -> TableLaw:
        return TableLaw(self._table(tuple(self._tokens))[:gamma])

    def propose(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a grown tree draws no drafts")

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._tokens.extend(tokens)


def law_table(seed: int, *, markov: bool) -> Table:
    return random_table(seed, (GAMMA, 3, 3) if markov else (GAMMA, 3))


# ---------------------------------------------------------------- the shipped decoder
@pytest.mark.parametrize("eos_ids", [(), (2,)])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.3, top_k=2, top_p=0.5)], ids=["plain", "cut"])
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("growth", GROWTHS)
def test_decoder_law(growth: str, markov: bool, sampling: SamplingParams, eos_ids: tuple[int, ...]) -> None:
    table, num_tokens = random_table(31, (3,)), GAMMA + 2  # a full round, and shortened and draftless ones after it
    decoder = SpeculativeDecoder(
        Tab(table, eos_ids=eos_ids),
        LawDrafter(law_table(32, markov=markov)),
        rule=TreeMatchRule(),
        growth=GROWTHS[growth],
        verifier_sampling=sampling,
    )
    output = enumerate_outcomes(
        lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=num_tokens, rng=rng).tokens)
    )
    expected: dict[Prefix, float] = {}
    for tokens, mass in verifier_law(lambda p: logits_to_probs(table(p).log(), sampling), num_tokens, PROMPT).items():
        ends = [index + 1 for index, token in enumerate(tokens) if token in eos_ids]
        kept = tokens[: ends[0]] if ends else tokens
        expected[kept] = expected.get(kept, 0.0) + mass
    assert total_variation(output, expected) < 1e-12


@pytest.mark.parametrize(("growth", "streaks"), [("smallest", {0, 1, 2}), ("some", {1, 2}), ("all", {2})])
def test_the_trees_of_the_test_above_are_really_walked(growth: str, streaks: set[int]) -> None:
    """Rounds accept something, and the window that was used is the one recorded."""
    drafter = LawDrafter(law_table(32, markov=False))
    decoder = SpeculativeDecoder(Tab(random_table(31, (3,))), drafter, rule=TreeMatchRule(), growth=GROWTHS[growth])
    outcomes = enumerate_outcomes(
        lambda rng: tuple(
            (r.num_drafted, r.num_accepted, r.num_nodes)
            for r in decoder.generate(list(PROMPT), max_new_tokens=GAMMA + 1, rng=rng).rounds
        )
    )
    first = {rounds[0] for rounds in outcomes}
    assert {accepted for _, accepted, _ in first} == streaks  # "all" holds every pair of tokens
    assert {drafted for drafted, _, _ in first} == {GAMMA}
    assert {nodes for _, _, nodes in first} == {1 + min(GROWTHS[growth].settings.budget, 12)}


def test_auto_shortens_windows_by_the_law_alone() -> None:
    """Some rounds keep no draft, some one level, some the whole window; equal laws give equal trees."""
    sizes = set()
    for seed in range(40):
        probs = law_table(seed, markov=False)(PROMPT)
        sharp = (probs.log() * (seed % 4)).softmax(-1)
        tree = GROWTHS["auto"](TableLaw(sharp), 0)
        assert tree == GROWTHS["auto"](TableLaw(sharp), 0)
        sizes.add(tree.depth)
    assert sizes == {0, 1, 2}


# ---------------------------------------------------------------- one round on tables, and its mutants
def grown_law(rule: AcceptanceRule, grow: Grow, case_verifier: Table, case_draft: Table) -> dict[Prefix, float]:
    """Law of gamma + 1 tokens: one round with a grown tree, the verifier for the rest (by induction enough)."""
    num_tokens, law = GAMMA + 1, dict[Prefix, float]()
    tree = grow(TableLaw(case_draft(())), 0)
    paths: list[Prefix] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    verifier_probs = torch.stack([case_verifier(path) for path in paths])

    def one_round(rng: RandomSource) -> Prefix:
        accepted = rule(tree, verifier_probs, None, rng)
        return (*(tree.tokens[node] for node in accepted.path), accepted.next_token)

    for tokens, mass in enumerate_outcomes(one_round).items():
        for more, prob in verifier_law(case_verifier, num_tokens - len(tokens), tokens).items():
            law[tokens + more] = law.get(tokens + more, 0.0) + mass * prob
    return law


def worst_gap(rule: AcceptanceRule, grow: Grow) -> float:
    gaps = []
    for case in lossless_cases(GAMMA):
        output = grown_law(rule, grow, case.verifier_table, case.draft_table)
        gaps.append(total_variation(output, verifier_law(case.verifier_table, GAMMA + 1)))
    return max(gaps)


@pytest.mark.parametrize("growth", GROWTHS)
def test_every_case_keeps_the_law(growth: str) -> None:
    assert worst_gap(TreeMatchRule(), GROWTHS[growth]) < 1e-12


class WrongParent(TreeMatchRule):
    """The deepest node hangs below another parent than the one it was scored after."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        parents, depths = list(tree.parents), tree.depths()
        for node in range(tree.num_nodes - 1, 0, -1):
            others = [
                other
                for other in range(node)
                if depths[other] == depths[node] - 1
                and other != parents[node]
                and tree.tokens[node] not in tree.children()[other]
            ]
            if others:
                parents[node] = others[0]
                break
        moved = TokenTree(tree.tokens, parents, tree.chain_nodes)
        return super().__call__(moved, verifier_probs, draft_probs, rng)


class AnticipatingWindow(TreeMatchRule):
    """Sees where the verifier leaves the tree, cuts the window there and lets the verifier draw again."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        accepted = super().__call__(tree, verifier_probs, draft_probs, rng)
        node = accepted.path[-1] if accepted.path else 0
        if not tree.children()[node]:
            return accepted
        return Acceptance(accepted.path, rng.categorical(verifier_probs[node]))


class SwappedScores(TreeMatchRule):
    """The scores of the first two drafted nodes are taken for each other."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        if tree.num_nodes > 2:
            verifier_probs = verifier_probs[[0, 2, 1, *range(3, tree.num_nodes)]]
        return super().__call__(tree, verifier_probs, draft_probs, rng)


@pytest.mark.parametrize(
    "mutant", [WrongParent(), AnticipatingWindow(), SwappedScores()], ids=lambda m: type(m).__name__
)
def test_planted_wrong_walks_fail(mutant: AcceptanceRule) -> None:
    assert worst_gap(mutant, GROWTHS["some"]) > CLEARLY_WRONG


def test_the_verifier_session_refuses_a_path_along_a_wrong_parent() -> None:
    """The same mutant through the shipped decoder: the session that scored the tree does not commit such a path."""
    decoder = SpeculativeDecoder(
        Tab(random_table(31, (3,))),
        LawDrafter(law_table(32, markov=False)),
        rule=WrongParent(),
        growth=GROWTHS["some"],
    )
    with pytest.raises(AssertionError, match="path must go down the tree"):
        enumerate_outcomes(lambda rng: tuple(decoder.generate(list(PROMPT), max_new_tokens=5, rng=rng).tokens))


# ---------------------------------------------------------------- what trees are for
def test_the_estimate_of_a_calibrated_law_is_the_true_streak_and_no_tree_has_a_longer_one() -> None:
    """The verifier's own positions are independent here, and the drafter knows them."""
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)  # the chain is among the best
    every = [0.7, 0.2, 0.1, *(a * b for a in (0.7, 0.2, 0.1) for b in (0.6, 0.3, 0.1))]
    for num_nodes in range(GAMMA, 13):
        tree = TreeGrowth(GrowthSettings(num_nodes))(TableLaw(probs), 0)
        scores = torch.stack([probs[min(depth, GAMMA - 1)] for depth in tree.depths()])
        estimate = sum(math.exp(p) for p in best_first(TableLaw(probs), 0, num_nodes).log_probs)
        assert tree_streak(tree, scores) == pytest.approx(estimate, abs=1e-12)
        assert tree_streak(tree, scores) == pytest.approx(sum(sorted(every)[-num_nodes:]), abs=1e-12)


def test_a_drafter_without_a_law_is_named() -> None:
    class Silent:
        gamma = 2

        def start(self, *args: object) -> Silent:
            return self

        def propose(self, *args: object, **kwargs: object) -> None: ...

        def observe(self, *args: object) -> None: ...

    decoder = SpeculativeDecoder(Tab([0.5, 0.5]), Silent(), rule=TreeMatchRule(), growth=GROWTHS["some"])
    with pytest.raises(ConfigError, match=r"drafter Silent: .*law"):
        decoder.generate([0], max_new_tokens=3)
