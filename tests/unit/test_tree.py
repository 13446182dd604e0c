"""Token trees against brute force."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff2.tree import TokenTree

chains = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=4), min_size=0, max_size=5)


def node_path(tree: TokenTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while tree.parents[node] >= 0:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return tuple(path)


@settings(deadline=None, max_examples=100)
@given(chains)
def test_nodes_are_the_distinct_prefixes(rows: list[list[int]]) -> None:
    tree = TokenTree.from_chains(7, rows)
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    paths = [node_path(tree, node) for node in range(1, tree.num_nodes)]
    assert len(paths) == len(set(paths))
    assert set(paths) == prefixes
    assert tree.tokens[0] == 7
    assert tree.num_chains == len(rows)
    for row, nodes in zip(rows, tree.chain_nodes, strict=True):
        assert [node_path(tree, node) for node in nodes] == [tuple(row[: end + 1]) for end in range(len(row))]


@settings(deadline=None, max_examples=100)
@given(chains)
def test_depths_children_and_mask(rows: list[list[int]]) -> None:
    tree = TokenTree.from_chains(7, rows)
    paths = [node_path(tree, node) for node in range(tree.num_nodes)]
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.depths() == [len(path) for path in paths]
    for node, children in enumerate(tree.children()):
        assert children == {paths[c][-1]: c for c, parent in enumerate(tree.parents) if parent == node}
    expected = [[path[: len(ancestor)] == ancestor for ancestor in paths] for path in paths]
    assert tree.ancestor_mask().tolist() == expected


def test_tensor_and_lists_give_the_same_tree() -> None:
    rows = [[1, 2], [1, 3], [1, 2]]
    assert TokenTree.from_chains(0, torch.tensor(rows)) == TokenTree.from_chains(0, rows)


def test_identical_drafts_share_nodes_and_keep_multiplicity() -> None:
    tree = TokenTree.from_chains(0, [[1, 1], [1, 1], [1, 2]])
    assert tree == TokenTree([0, 1, 1, 2], [-1, 0, 1, 1], [[1, 2], [1, 2], [1, 3]])


def test_selecting_keeps_the_nodes() -> None:
    tree = TokenTree.from_chains(0, [[1, 1], [2, 2]])
    chosen = tree.select(1)
    assert chosen.chain_nodes == [[3, 4]]
    assert (chosen.tokens, chosen.parents) == (tree.tokens, tree.parents)


def test_root_only() -> None:
    tree = TokenTree.root_only(5)
    assert (tree.num_nodes, tree.num_chains, tree.depths(), tree.children()) == (1, 0, [0], [{}])
    assert tree.ancestor_mask().tolist() == [[True]]


def test_a_chain_ends_before_its_first_padding() -> None:
    tree = TokenTree.from_chains(0, torch.tensor([[1, 2, -1], [-1, -1, -1], [1, 2, 3], [4, -1, 5]]))
    assert tree == TokenTree([0, 1, 2, 3, 4], [-1, 0, 1, 2, 0], [[1, 2], [], [1, 2, 3], [4]])
    assert tree.depth == 3
    empty = TokenTree.from_chains(7, torch.zeros((2, 0), dtype=torch.long))
    assert empty == TokenTree([7], [-1], [[], []]) and empty.depth == 0


@settings(deadline=None, max_examples=100)
@given(chains)
def test_padding_gives_the_tree_of_the_lists(rows: list[list[int]]) -> None:
    width = max(map(len, rows), default=0)
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long)
    assert TokenTree.from_chains(7, padded) == TokenTree.from_chains(7, rows)


def test_chains_along_a_path() -> None:
    tree = TokenTree.from_chains(0, [[1, 2], [], [1, 3, 4], [1], [5]])
    assert tree.chains_along([]) == [0, 1, 2, 3, 4]
    assert tree.chains_along([1]) == [0, 2, 3]
    assert tree.chains_along([1, 3, 4]) == [2]
