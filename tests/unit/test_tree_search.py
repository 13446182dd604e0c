"""Best-first trees against brute force over every path of small vocabularies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from helpers import TableLaw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdiff2.functional import tree_search
from specdiff2.functional.tree_search import BestFirstNodes, best_first, best_prefix
from specdiff2.protocols import DraftLaw
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError

GAMMA, VOCAB, ROOT = 3, 4, 2
Path = tuple[int, ...]
Search = Callable[[DraftLaw, int, int, float], BestFirstNodes]


def random_law(seed: int, *, markov: bool, gamma: int = GAMMA, vocab: int = VOCAB, zeros: bool = False) -> Tensor:
    shape = (gamma, vocab, vocab) if markov else (gamma, vocab)
    logits = 2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if zeros:
        logits[..., seed % vocab] = -math.inf
    return logits.softmax(-1)


def tempered(probs: Tensor, temperature: float) -> Tensor:
    return (probs.log() / temperature).softmax(-1)


def row(probs: Tensor, path: Path) -> Tensor:
    """The law of the token after ``path``."""
    table = probs[len(path)]
    return table if probs.ndim == 2 else table[path[-1] if path else ROOT]


def every_path(probs: Tensor) -> dict[Path, float]:
    """Log-probability of every path of positive probability."""
    found: dict[Path, float] = {}
    for length in range(1, probs.shape[0] + 1):
        for path in itertools.product(range(probs.shape[-1]), repeat=length):
            prob = math.prod(float(row(probs, path[:end])[token]) for end, token in enumerate(path))
            if prob > 0.0:
                found[path] = math.log(prob)
    return found


def argmax_chain(probs: Tensor) -> list[Path]:
    path: Path = ()
    chain = []
    for _ in range(probs.shape[0]):
        path = (*path, int(row(probs, path).argmax()))
        chain.append(path)
    return chain


def paths_of(nodes: BestFirstNodes) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def brute_force(probs: Tensor, num_nodes: int, temperature: float) -> set[Path]:
    """The best nodes, the last of them replaced by what is missing of the argmax chain."""
    scores = every_path(tempered(probs, temperature))
    ranked = sorted(scores, key=lambda path: -scores[path])
    chain = argmax_chain(probs)
    for kept in range(num_nodes, -1, -1):
        chosen = {*ranked[:kept], *chain}
        if len(chosen) <= num_nodes:
            return chosen
    raise AssertionError("the chain alone is larger than the budget")


@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("num_nodes", [3, 4, 7, 20, 84, 200])
def test_the_best_nodes_and_their_probabilities(num_nodes: int, temperature: float, zeros: bool, markov: bool) -> None:
    for seed in range(4):
        probs = random_law(seed, markov=markov, zeros=zeros)
        nodes = best_first(TableLaw(probs), ROOT, num_nodes, temperature)
        paths = paths_of(nodes)
        assert len(set(paths)) == len(paths)
        assert set(paths) == brute_force(probs, num_nodes, temperature), seed
        plain, score = every_path(probs), every_path(tempered(probs, temperature))
        assert nodes.log_probs == pytest.approx([plain[path] for path in paths], abs=1e-12)
        assert nodes.scores == pytest.approx([score[path] for path in paths], abs=1e-12)
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(nodes.scores))


def test_a_nearly_certain_child_of_one_of_the_last_nodes_is_found() -> None:
    """(2, 0) is barely among the best seven when its level is done, and its child still belongs to them."""
    any_token = [1 / 3, 1 / 3, 1 / 3]
    probs = torch.tensor(
        [
            [[0.5, 0.3, 0.2]] * 3,
            [[0.34, 0.33, 0.33], any_token, [0.9, 0.05, 0.05]],
            [[0.99, 0.005, 0.005], any_token, any_token],
        ],
        dtype=torch.float64,
    )
    paths = paths_of(best_first(TableLaw(probs), ROOT, 7))
    assert paths == [(0,), (1,), (2,), (2, 0), (2, 0, 0), (0, 0), (0, 0, 0)]


def test_a_factorised_law_gives_the_same_tree_either_way() -> None:
    for seed in range(5):
        probs = random_law(seed, markov=False, gamma=4, vocab=6)
        by_heap = best_first(TableLaw(probs), ROOT, 25)
        markov = TableLaw(probs[:, None, :].expand(-1, 6, -1))
        by_levels = best_first(markov, ROOT, 25)
        assert paths_of(by_heap) == paths_of(by_levels)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    markov=st.booleans(),
    gamma=st.integers(1, 4),
    vocab=st.integers(1, 5),
    extra=st.integers(0, 12),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_every_tree_keeps(seed, markov, gamma, vocab, extra, temperature, dtype) -> None:
    probs = random_law(seed, markov=markov, gamma=gamma, vocab=max(vocab, ROOT + 1)).to(dtype)
    assert_tree(best_first, probs, gamma + extra, temperature)


def assert_tree(search: Search, probs: Tensor, num_nodes: int, temperature: float) -> None:
    """Within the budget, parents first, one node per path, best first, and the argmax chain inside."""
    nodes = search(TableLaw(probs), ROOT, num_nodes, temperature)
    paths = paths_of(nodes)
    assert len(paths) == len(set(paths)) <= num_nodes
    assert all(0 <= parent < node for node, parent in enumerate(nodes.parents, start=1))
    assert all(a >= b - 1e-5 for a, b in itertools.pairwise(nodes.scores))
    assert set(argmax_chain(probs)) <= set(paths), "the argmax chain is not inside"
    tree = TokenTree.best_first(ROOT, nodes.tokens, nodes.parents)
    assert [tuple(tree.tokens[node] for node in tree.chain_nodes[0][:end]) for end in range(1, len(probs) + 1)] == (
        argmax_chain(probs)
    )


@pytest.mark.parametrize("markov", [False, True])
def test_a_search_that_drops_the_argmax_chain_is_found(markov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the plain best nodes, without room kept for the chain. The same property refuses it."""
    flat = torch.full((4, 6, 6) if markov else (4, 6), 1 / 6, dtype=torch.float64)
    flat[..., 1] += 0.01
    probs = flat / flat.sum(-1, keepdim=True)
    assert_tree(best_first, probs, 5, 1.0)
    take = tree_search._take
    monkeypatch.setattr(
        tree_search,
        "_take",
        lambda order, chain, num_nodes: take((node._replace(on_chain=False) for node in order), [], num_nodes),
    )
    assert len(best_first(TableLaw(probs), ROOT, 5).tokens) == 5
    with pytest.raises(AssertionError, match="the argmax chain is not inside"):
        assert_tree(best_first, probs, 5, 1.0)


@pytest.mark.parametrize("markov", [False, True])
def test_ties_are_ordered_by_depth_parent_and_token(markov: bool) -> None:
    probs = torch.full((2, 3, 3) if markov else (2, 3), 1 / 3, dtype=torch.float64)
    nodes = best_first(TableLaw(probs), ROOT, 12)
    assert paths_of(nodes) == [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]


def test_one_hot_positions_give_one_chain() -> None:
    probs = torch.eye(4, dtype=torch.float64)[[3, 0, 2]]
    for law in (TableLaw(probs), TableLaw(probs[:, None].expand(-1, 4, -1))):
        nodes = best_first(law, ROOT, 10, 0.3)
        assert (nodes.tokens, nodes.parents, nodes.scores) == ([3, 0, 2], [0, 1, 2], [0.0, 0.0, 0.0])


def test_a_temperature_near_zero_leaves_the_argmax_chain() -> None:
    for markov in (False, True):
        probs = random_law(3, markov=markov).float()
        nodes = best_first(TableLaw(probs), ROOT, 20, 1e-40)
        assert paths_of(nodes) == argmax_chain(probs)


def test_a_draft_vocabulary_gives_verifier_ids() -> None:
    probs = random_law(1, markov=False)
    plain = best_first(TableLaw(probs), ROOT, 9)
    mapped = best_first(TableLaw(probs, ids=[30, 10, 40, 20]), ROOT, 9)
    assert mapped.tokens == [[30, 10, 40, 20][token] for token in plain.tokens]
    assert mapped.parents == plain.parents


def test_one_question_to_the_law_per_level_at_most() -> None:
    factorised = TableLaw(random_law(0, markov=False))
    best_first(factorised, ROOT, 20)
    markov = TableLaw(random_law(0, markov=True))
    best_first(markov, ROOT, 20)
    assert (factorised.num_calls, markov.num_calls) == (1, GAMMA)


@pytest.mark.parametrize("markov", [False, True])
def test_a_budget_below_gamma_is_refused(markov: bool) -> None:
    law = TableLaw(random_law(0, markov=markov))
    assert paths_of(best_first(law, ROOT, GAMMA)) == argmax_chain(random_law(0, markov=markov))
    with pytest.raises(ConfigError, match=r"num_nodes=2.*gamma=3"):
        best_first(law, ROOT, GAMMA - 1)


# ---------------------------------------------------------------- how many nodes pay
def test_best_prefix_by_hand() -> None:
    log_probs = [math.log(p) for p in (0.5, 0.4, 0.1, 0.1)]
    free = torch.ones(5, dtype=torch.float64)
    assert best_prefix(log_probs, free) == 4
    steep = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    assert best_prefix(log_probs, steep) == 0
    # (1, 1.5, 1.9, 2.0, 2.1) over the seconds: 1, 1.25, 1.357, 1.25, 1.167
    assert best_prefix(log_probs, torch.tensor([1.0, 1.2, 1.4, 1.6, 1.8], dtype=torch.float64)) == 2
    assert best_prefix([], free) == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-8.0, 0.0), max_size=10), st.integers(0, 1000))
def test_best_prefix_is_the_best_of_all(log_probs: list[float], seed: int) -> None:
    steps = torch.rand(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 4
    round_s = 1.0 + steps.cumsum(0)
    rates = [(1.0 + sum(math.exp(p) for p in log_probs[:n])) / float(round_s[n]) for n in range(len(log_probs) + 1)]
    assert rates[best_prefix(log_probs, round_s)] == pytest.approx(max(rates), abs=1e-12)


# ---------------------------------------------------------------- the tree made of it
def test_any_prefix_is_a_tree_and_its_chain_ends_where_it_is_cut() -> None:
    tokens, parents = [5, 6, 7, 8], [0, 0, 1, 3]
    assert TokenTree.best_first(9, tokens, parents) == TokenTree([9, 5, 6, 7, 8], [-1, 0, 0, 1, 3], [[1, 3, 4]])
    assert TokenTree.best_first(9, tokens[:2], parents[:2]) == TokenTree([9, 5, 6], [-1, 0, 0], [[1]])
    assert TokenTree.best_first(9, [], []) == TokenTree.root_only(9)
    assert [TokenTree.best_first(9, tokens[:n], parents[:n]).depth for n in range(5)] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("parents", [[1], [0, 2], [-1], [0, 1, 4]])
def test_a_parent_after_its_child_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="expected a node before it"):
        TokenTree.best_first(0, [1] * len(parents), parents)
