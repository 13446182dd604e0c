"""Copies from the committed text: what is found, how its success is learned, how it joins a tree, and exactness."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import TableLaw

from specdiff2.decoding.tree_growth import GrowthSettings, TreeGrowth
from specdiff2.functional.suffix_lookup import PRIOR_MEANS, SuffixLookup
from specdiff2.functional.tree_search import BestFirstNodes, best_first, with_copy
from specdiff2.types import ConfigError


def test_the_longest_suffix_and_its_latest_occurrence_win() -> None:
    lookup = SuffixLookup([1, 2, 3, 9, 2, 3, 7, 8, 1, 2, 3], 3)
    copy = lookup.find(4)
    assert copy is not None and copy.tokens == [9, 2, 3, 7] and copy.num_matched == 3
    short = SuffixLookup([1, 2, 3, 9, 2, 3, 7, 8, 5, 2, 3], 3).find(2)
    assert short is not None and short.tokens == [7, 8] and short.num_matched == 2, "the latest 2, 3"
    assert SuffixLookup([1, 2, 3], 3).find(4) is None
    assert SuffixLookup([1], 3).find(4) is None and SuffixLookup([1, 1], 3).find(0) is None


def test_a_repeating_token_copies_itself() -> None:
    copy = SuffixLookup([5, 5, 5], 2).find(3)
    assert copy is not None and copy.tokens == [5] and copy.num_matched == 2


def test_extending_equals_starting_with_the_whole_text() -> None:
    text = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    grown = SuffixLookup(text[:5], 3)
    for end in range(6, 61):
        grown.extend(text[end - 1 : end])
        assert grown.find(5) == SuffixLookup(text[:end], 3).find(5)


def test_success_is_learned_by_length_of_the_match() -> None:
    lookup = SuffixLookup([1, 2, 3, 1, 2], 2)
    copy = lookup.find(3)
    assert copy is not None and copy.prob == PRIOR_MEANS[1]
    for _ in range(50):
        lookup.learn(copy, [3, 1, 9])  # two right, one wrong
    learned = lookup.find(3)
    assert learned is not None and learned.prob == pytest.approx(2 / 3, abs=0.02)
    only_one = SuffixLookup([1, 2, 3, 1], 1).find(3)
    assert only_one is not None and only_one.prob == PRIOR_MEANS[0], "other lengths and other texts know nothing of it"
    lookup.learn(copy, [3])  # the output ended: tokens that were never compared count neither way
    assert lookup.find(3).prob > learned.prob


@pytest.mark.parametrize("ngram", [0, -1, True])
def test_a_bad_ngram_is_refused(ngram) -> None:
    with pytest.raises(ConfigError, match="lookup_ngram"):
        SuffixLookup([1], ngram)


def law_of(seed: int = 0, gamma: int = 3, vocab: int = 4) -> TableLaw:
    table = torch.randn(gamma, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    return TableLaw(table)


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_joins_in_best_first_order(seed: int) -> None:
    nodes = best_first(law_of(seed), 0, 8)
    chain = [3, 3, 2]
    joined = with_copy(nodes, chain, math.log(0.5), 8)
    assert len(joined.tokens) == 8
    assert all(parent < node for node, parent in enumerate(joined.parents, start=1))
    pairs = list(zip(joined.parents, joined.tokens, strict=True))
    assert len(set(pairs)) == 8, "a token is the child of a node once"
    paths = path_probs(joined)
    before = path_probs(nodes)
    for path, score in paths.items():
        copied = len(path) * math.log(0.5) if list(path) == chain[: len(path)] else -math.inf
        assert score == pytest.approx(max(before.get(path, -math.inf), copied), abs=1e-6)
    argmax = tuple(int(row.argmax()) for row in law_of(seed).position_log_probs())
    assert all(argmax[:depth] in paths for depth in range(1, 4)), "the argmax chain stays inside"
    everything = with_copy(nodes, chain, math.log(0.5), 20)
    assert everything.log_probs == sorted(everything.log_probs, reverse=True)
    assert set(path_probs(everything)) == set(before) | {tuple(chain[:depth]) for depth in range(1, 4)}


def path_probs(nodes: BestFirstNodes) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], nodes.log_probs, strict=True))


def test_a_grower_copies_learns_and_never_drafts_beyond_the_window() -> None:
    growth = TreeGrowth(GrowthSettings(num_nodes=6, lookup_tokens=10, lookup_ngram=2))
    grow = growth.start([1, 2, 3, 1, 2])
    tree = grow(law_of(), 2)
    children = tree.children()
    assert 3 in children[0] and tree.depth <= 3
    assert tree.num_nodes == 7
    grow.observe([0, 0])
    assert growth.start([1, 2, 3, 0])(law_of(), 0).num_nodes == 7, "nothing recurs: the tree as without copies"


@pytest.mark.parametrize("changes", [{"lookup_tokens": -1}, {"lookup_ngram": 0}, {"lookup_tokens": True}])
def test_bad_settings_are_refused(changes) -> None:
    with pytest.raises(ConfigError, match="lookup_"):
        GrowthSettings(num_nodes=8, **changes)
