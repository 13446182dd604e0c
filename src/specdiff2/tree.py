"""Token trees: several drafts of one round, merged where they share a prefix.

Trees grown node by node from the drafter's law have the same form. Structure only: which tokens, whose child,
which chain runs through which nodes. It knows no model and no probabilities. Kept as Python lists and small CPU
tensors: a tree has tens of nodes and is walked on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Node 0 is the last committed token; parents come before their children.

    Attributes:
        tokens: token id of each node.
        parents: parent index of each node; -1 for the root.
        chain_nodes: node indices of each chain, ``[K]`` lists of at most gamma. Identical drafts share their
            nodes and keep their multiplicity here, which the ratio rules need.
    """

    tokens: list[int]
    parents: list[int]
    chain_nodes: list[list[int]]

    @classmethod
    def from_chains(cls, root: int, chains: Int[Tensor, "K gamma"] | Sequence[Sequence[int]]) -> TokenTree:
        """Merge K drafts into a trie under ``root``. A chain ends before its first -1; it may be empty."""
        rows = chains.tolist() if isinstance(chains, Tensor) else [list(row) for row in chains]
        tokens, parents = [root], [-1]
        children: dict[tuple[int, int], int] = {}
        chain_nodes = []
        for row in rows:
            node, nodes = 0, []
            for token in row:
                if token < 0:
                    break
                child = children.get((node, token))
                if child is None:
                    child = len(tokens)
                    children[node, token] = child
                    tokens.append(token)
                    parents.append(node)
                nodes.append(child)
                node = child
            chain_nodes.append(nodes)
        return cls(tokens, parents, chain_nodes)

    @classmethod
    def best_first(cls, root: int, tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
        """A grown tree, drafted nodes in best-first order (``functional.tree_search``).

        Its one chain goes from the root to the first-listed, most probable child while there is one: the argmax
        chain of the law. A prefix of a best-first order is a tree as well.

        Args:
            tokens, parents: one entry per drafted node, without the root; parents count the root as node 0.

        Raises:
            ValueError: a parent that does not come before its child.
        """
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: expected a node before it, 0 .. {node - 1}")
        return cls([root, *tokens], [-1, *parents], [first_children(parents)] if tokens else [])

    @classmethod
    def root_only(cls, root: int) -> TokenTree:
        """A tree without drafts: one autoregressive step."""
        return cls([root], [-1], [])

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_chains(self) -> int:
        return len(self.chain_nodes)

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Distance of the deepest node from the root: the window length."""
        return max(self.depths())

    def children(self) -> list[dict[int, int]]:
        """For each node: token id -> child node."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent][self.tokens[node]] = node
        return children

    def chains_along(self, path: Sequence[int]) -> list[int]:
        """Indices of the chains that start with ``path``: nodes from the root's child downwards, root excluded."""
        return [index for index, nodes in enumerate(self.chain_nodes) if nodes[: len(path)] == list(path)]

    def ancestor_mask(self) -> Bool[Tensor, "node node"]:
        """``mask[i, j]``: node i may attend to node j (j is i itself or one of its ancestors)."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def select(self, chain: int) -> TokenTree:
        """The same nodes with only ``chain`` left to verify (the scores of all nodes stay valid)."""
        return TokenTree(self.tokens, self.parents, [self.chain_nodes[chain]])


def first_children(parents: Sequence[int]) -> list[int]:
    """Nodes from the root, excluded, to the first-listed child while there is one (``parents`` without the root)."""
    chain = [0]
    for node, parent in enumerate(parents, start=1):
        if parent == chain[-1]:
            chain.append(node)
    return chain[1:]
