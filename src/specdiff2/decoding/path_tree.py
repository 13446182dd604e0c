"""Token trees from a drafter whose law depends on the whole path: one head pass per level, then tree match.

``static``: the same tree of ranks every round (arXiv 2401.15077): the node (0, 2) is the third most probable token
after the most probable one. The default tree holds the most promising rank paths under ``RANK_SHARES``.
``dynamic``: on each level the ``branching`` most probable nodes are expanded, then all nodes ever listed are ranked
again by path probability and the best are kept (arXiv 2406.16858). A child is never more probable than its parent,
and of equals the parent comes first, so what is kept is a tree.

Both look at the drafter's law alone, so the tree is fixed before the verifier speaks, and tree match is lossless for
it. It knows no model: a ``PathLawSession`` answers for the nodes it is given.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.protocols import PathLawSession
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError

RankPath = tuple[int, ...]
# How often the token of a rank is the verifier's, roughly, for a head of a small model; only their order of magnitude
# matters, for which paths a static tree holds.
RANK_SHARES = (0.55, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013, 0.01, 0.008)


@dataclass(frozen=True, slots=True)
class RankTree:
    """A static tree: ``levels[d]`` holds the rank paths of its nodes at depth d + 1, sorted, parents included."""

    levels: tuple[tuple[RankPath, ...], ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> RankTree:
        """The smallest tree that holds ``paths``.

        Raises:
            ConfigError: no path, an empty one, or a rank below 0.
        """
        if not paths or any(not path or min(path) < 0 for path in paths):
            raise ConfigError(f"rank_paths={paths!r}: expected lists of ranks >= 0, e.g. [[0, 0, 0], [0, 1], [1]]")
        nodes = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        depth = max(map(len, nodes))
        return cls(tuple(tuple(sorted(n for n in nodes if len(n) == d)) for d in range(1, depth + 1)))

    @classmethod
    @functools.cache
    def likely(cls, num_nodes: int, depth: int) -> RankTree:
        """The ``num_nodes`` rank paths of at most ``depth`` whose product of ``RANK_SHARES`` is largest."""
        chosen: list[RankPath] = []
        heap: list[tuple[float, RankPath]] = [(-RANK_SHARES[0], (0,))]
        while heap and len(chosen) < num_nodes:
            cost, path = heapq.heappop(heap)
            chosen.append(path)
            if path[-1] + 1 < len(RANK_SHARES):
                sibling = cost * RANK_SHARES[path[-1] + 1] / RANK_SHARES[path[-1]]
                heapq.heappush(heap, (sibling, (*path[:-1], path[-1] + 1)))
            if len(path) < depth:
                heapq.heappush(heap, (cost * RANK_SHARES[0], (*path, 0)))
        return cls.of(chosen)

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.levels))


def grow_static(session: PathLawSession, root: int, ranks: RankTree, gamma: int) -> TokenTree:
    """The tree of ``ranks``, cut at depth ``gamma``; nodes that the law has no token for are left out."""
    tokens, parents = list[int](), list[int]()
    number: dict[RankPath, int] = {(): 0}  # path -> node of the tree
    in_session: dict[RankPath, int] = {(): 0}  # path -> node of the session's draft tree
    log_probs = session.start_tree()[None]
    row: dict[RankPath, int] = {(): 0}
    for depth, level in enumerate(ranks.levels[:gamma], start=1):
        ranked = top_tokens(log_probs, session.ids, 1 + max(path[-1] for path in level))
        for path in level:
            siblings = ranked[row[path[:-1]]] if path[:-1] in row else []
            if path[-1] < len(siblings):
                number[path] = len(tokens) + 1
                tokens.append(siblings[path[-1]][1])
                parents.append(number[path[:-1]])
        deeper = {path[:-1] for path in ranks.levels[depth]} if depth < min(gamma, len(ranks.levels)) else set()
        inner = [path for path in level if path in deeper and path in number]
        if not inner:
            break
        added = len(in_session)
        log_probs = session.expand([tokens[number[p] - 1] for p in inner], [in_session[p[:-1]] for p in inner])
        row = {path: index for index, path in enumerate(inner)}
        in_session |= {path: added + index for index, path in enumerate(inner)}
    return TokenTree.best_first(root, tokens, parents)


class _Node(NamedTuple):
    score: float  # log-probability of its path
    key: int  # 1, 2, ... in the order of listing; 0 is the root
    token: int
    parent: int  # key of the parent


def grow_dynamic(session: PathLawSession, root: int, gamma: int, branching: int, num_nodes: int) -> TokenTree:
    """The ``num_nodes`` most probable of all nodes listed while the best ``branching`` of each level were expanded.

    Args:
        gamma: levels; the last one is listed and not expanded.
        branching: nodes expanded on a level, and children listed of each.
    """
    listed: list[_Node] = []
    frontier, in_session = [_Node(0.0, 0, root, -1)], {0: 0}
    log_probs = session.start_tree()[None]
    for depth in range(1, gamma + 1):
        ranked = top_tokens(log_probs, session.ids, branching)
        level = list[_Node]()
        for parent, children in zip(frontier, ranked, strict=True):
            for log_prob, token in children:
                level.append(_Node(parent.score + log_prob, len(listed) + len(level) + 1, token, parent.key))
        listed += level
        frontier = best_nodes(level, branching)
        if depth == gamma or not frontier:
            break
        added = len(in_session)
        log_probs = session.expand([n.token for n in frontier], [in_session[n.parent] for n in frontier])
        in_session |= {node.key: added + index for index, node in enumerate(frontier)}
    kept = best_nodes(listed, num_nodes)
    number = {0: 0} | {node.key: index for index, node in enumerate(kept, start=1)}
    return TokenTree.best_first(root, [node.token for node in kept], [number[node.parent] for node in kept])


def best_nodes(nodes: Sequence[_Node], count: int) -> list[_Node]:
    """The ``count`` most probable, best first; of equals the one listed first, so that no child precedes its parent."""
    return sorted(nodes, key=lambda node: (-node.score, node.key))[:count]


def top_tokens(
    log_probs: Float[Tensor, "node draft_vocab"], ids: Int[Tensor, " draft_vocab"], count: int
) -> list[list[tuple[float, int]]]:
    """For each row its ``count`` best (log-probability <= 0, token) of probability > 0; two transfers to the host."""
    values, index = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    rows = zip(values.tolist(), ids[index].tolist(), strict=True)
    return [[(min(value, 0.0), token) for value, token in zip(*row, strict=True) if value > -math.inf] for row in rows]
