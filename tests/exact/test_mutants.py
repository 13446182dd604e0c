"""The exact check has teeth: planted wrong rules fail it, by a margin no rounding explains."""

from __future__ import annotations

import pytest
import torch

from specdiff2.decoding.acceptance import BlockRule, GreedyRule, LeviathanRule, SpecInferRule, make_rule
from specdiff2.decoding.selection import SelfSelection
from specdiff2.evaluation.lossless_cases import worst_case_gap
from specdiff2.functional.speculative import accept_prob, block_survival, law, residual
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance

CLEARLY_WRONG = 1e-2


class NoResidual(LeviathanRule):
    """After a rejection draws from p instead of (p - q)+."""

    @staticmethod
    def after_rejection(target, draft):
        return target

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        path, target = [], law(verifier_probs[0])
        for depth, node in enumerate(tree.chain_nodes[0]):
            draft, token = law(draft_probs[depth]), tree.tokens[node]
            if not rng.bernoulli(accept_prob(float(target[token]), float(draft[token]))):
                return Acceptance(path, rng.categorical(self.after_rejection(target, draft)))
            path.append(node)
            target = law(verifier_probs[node])
        return Acceptance(path, rng.categorical(target))


class ControlResidual(NoResidual):
    """The right residual in the same code: shows that the mutants fail for their mutation."""

    @staticmethod
    def after_rejection(target, draft):
        return residual(target, draft)


class SwappedResidual(NoResidual):
    @staticmethod
    def after_rejection(target, draft):
        return residual(draft, target)


class DroppedDuplicates(SpecInferRule):
    """Tries each distinct child once: q is subtracted too few times."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        unique = [list(nodes) for nodes in dict.fromkeys(map(tuple, tree.chain_nodes))]
        return super().__call__(TokenTree(tree.tokens, tree.parents, unique), verifier_probs, draft_probs, rng)


class StaleResidual(SpecInferRule):
    """Every draft is judged against p, not against what earlier rejections left of it."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        node, path, chains = 0, [], tree.chain_nodes
        for depth in range(len(chains[0])):
            target, draft = law(verifier_probs[node]), law(draft_probs[depth])
            for chain in chains:
                token = tree.tokens[chain[depth]]
                if rng.bernoulli(accept_prob(float(target[token]), float(draft[token]))):
                    node = chain[depth]
                    break
            else:
                return Acceptance(path, rng.categorical(residual(target, draft)))
            path.append(node)
            chains = [chain for chain in chains if chain[depth] == node]
        return Acceptance(path, rng.categorical(verifier_probs[node]))


class UntemperedArgmax(GreedyRule):
    """Accepts what the argmax agrees with, whatever the temperature."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        path, node = [], 0
        for child in tree.chain_nodes[0]:
            if int(verifier_probs[node].argmax()) != tree.tokens[child]:
                break
            path.append(child)
            node = child
        return Acceptance(path, rng.categorical(verifier_probs[node]))


class AnticipatingWindow(LeviathanRule):
    """Ends the window before a drafted token of low q: the length depends on the tokens drawn."""

    inner = LeviathanRule

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        chain = tree.chain_nodes[0]
        kept = []
        for depth, node in enumerate(chain):
            if float(draft_probs[depth, tree.tokens[node]]) < 0.3:
                break
            kept.append(node)
        return self.inner()(TokenTree(tree.tokens, tree.parents, [kept]), verifier_probs, draft_probs, rng)


class AnticipatingGreedy(AnticipatingWindow):
    inner = GreedyRule


class BlockWithTokenResidual(BlockRule):
    """Block acceptance, but the residual forgets the weight of the accepted prefix."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        accepted = super().__call__(tree, verifier_probs, draft_probs, rng)
        if len(accepted.path) == len(tree.chain_nodes[0]):
            return accepted
        node = accepted.path[-1] if accepted.path else 0
        target, draft = law(verifier_probs[node]), law(draft_probs[len(accepted.path)])
        return Acceptance(accepted.path, rng.categorical(residual(target, draft)))


class BlockWithoutClipping(BlockRule):
    """Accepts the longest prefix by its weight alone, as if the coins were not corrected."""

    def __call__(self, tree, verifier_probs, draft_probs, rng):
        chain = tree.chain_nodes[0]
        parents = [0, *chain[:-1]]
        weights = block_survival(
            [float(verifier_probs[parent, tree.tokens[node]]) for parent, node in zip(parents, chain, strict=True)],
            [float(draft_probs[depth, tree.tokens[node]]) for depth, node in enumerate(chain)],
        )
        length = len(chain)
        while length and not rng.bernoulli(weights[length]):
            length -= 1
        node = [0, *chain][length]
        if length == len(chain):
            return Acceptance(chain, rng.categorical(verifier_probs[node]))
        return Acceptance(
            chain[:length],
            rng.categorical(residual(law(verifier_probs[node]), law(draft_probs[length]), weights[length])),
        )


def test_the_control_passes() -> None:
    case, gap = worst_case_gap(ControlResidual())
    assert gap < 1e-12, case


@pytest.mark.parametrize(
    ("mutant", "num_drafts", "gamma"),
    [
        (NoResidual(), 1, 1),
        (SwappedResidual(), 1, 1),
        (DroppedDuplicates(), 2, 1),
        (DroppedDuplicates(), 3, 1),
        (StaleResidual(), 2, 1),
        (UntemperedArgmax(), 1, 1),
        (AnticipatingWindow(), 1, 1),
        (BlockWithTokenResidual(), 1, 2),
        (BlockWithoutClipping(), 1, 2),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_planted_wrong_rules_fail(mutant, num_drafts: int, gamma: int) -> None:
    case, gap = worst_case_gap(mutant, num_drafts=num_drafts, gamma=gamma)
    assert gap > CLEARLY_WRONG, case


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_best_of_k_before_a_ratio_rule_fails(rule: str) -> None:
    """The combination that ``check_combination`` refuses really is biased."""
    case, gap = worst_case_gap(make_rule(rule), SelfSelection(), num_drafts=2)
    assert gap > CLEARLY_WRONG, case


def test_a_window_cut_by_its_own_tokens_is_harmless_only_where_q_is_never_read() -> None:
    case, gap = worst_case_gap(AnticipatingGreedy(), gamma=2)
    assert gap < 1e-12, case


class LooseRandomSource(TorchRandomSource):
    """``u <= p`` instead of ``u < p``: differs only when u is exactly 0, which torch.rand can return."""

    def bernoulli(self, prob: float) -> bool:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) <= prob


@pytest.mark.parametrize(("source", "emits_impossible"), [(TorchRandomSource, False), (LooseRandomSource, True)])
@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_u_equal_to_zero_accepts_no_impossible_token(rule: str, source, emits_impossible: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, dtype=torch.float64))
    verifier_probs = torch.tensor([[0.0, 0.4, 0.6], [0.2, 0.3, 0.5]])
    draft_probs = torch.tensor([[1.0, 0.0, 0.0]])
    accepted = make_rule(rule)(TokenTree.from_chains(2, [[0]]), verifier_probs, draft_probs, source(0))
    assert (accepted.path == [1]) is emits_impossible
    if not emits_impossible:
        assert float(verifier_probs[0, accepted.next_token]) > 0.0
