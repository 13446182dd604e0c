"""The most probable nodes of a drafter's law, in best-first order: token trees under a node budget.

A node is a path of drafted tokens; its probability is the product of the law's probabilities along the path. Under
tree match the expected streak is the sum of the verifier's path probabilities over the nodes, so the best tree that
the law can propose holds its most probable nodes. A path's probability never rises with its length and falls from
sibling to sibling, so the most probable nodes always form a tree:

- positions independent of each other (a masked-diffusion drafter): a heap over top-k lists finds the B most
  probable nodes in O(B log B), after one transfer to the host;
- each position conditioned on the token before it (a Markov head): level by level. An ancestor of one of the B most
  probable nodes is one of them as well, so it is enough to expand, on each level, the nodes that are still among the
  B most probable so far. One batch of parents and one transfer per level.

The argmax chain (at each position the law's most probable token after the one chosen before) is always inside; where
it is not among the best, its missing nodes take the places of the least probable ones, at the end of the order.

It knows no model, no verifier and no costs, and draws nothing: equal laws give equal trees. Equal probabilities are
ordered by depth, parent and token id; which of several equal tokens at the end of a top-k list are listed is
``torch.topk``'s choice. EAGLE-2 (arXiv 2406.16858) ranks the nodes of its trees by the same score.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.protocols import DraftLaw
from specdiff2.tree import first_children
from specdiff2.types import ConfigError

# (depth, previous token ids [parent]) -> log-probabilities of the candidates [parent, candidate], their ids [candidate]
CandidatesAt = Callable[
    [int, Int[Tensor, " parent"]], tuple[Float[Tensor, "parent candidate"], Int[Tensor, " candidate"]]
]


@dataclass(frozen=True, slots=True)
class BestFirstNodes:
    """Drafted nodes in best-first order, without the root; any prefix of the lists is a tree too.

    Attributes:
        tokens: verifier ids.
        parents: the root is node 0, the first drafted node is node 1; parents come before their children.
        scores: path log-probability under the tempered law: the order.
        log_probs: path log-probability under the law itself.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, score: float, log_prob: float) -> int:
        """Append a node; its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.log_probs.append(log_prob)
        return len(self.tokens)


class _Candidate(NamedTuple):
    score: float
    log_prob: float
    token: int
    key: int  # the search's own number of this node; 0 is the root
    parent: int  # key of the parent
    on_chain: bool


def best_first(law: DraftLaw, root: int, num_nodes: int, temperature: float = 1.0) -> BestFirstNodes:
    """The ``num_nodes`` most probable nodes of ``law`` after the token ``root``; see the module docstring.

    Args:
        num_nodes: drafted nodes, without the root; fewer come back where the law has no more of probability > 0.
        temperature: divides the log-probabilities, which are then renormalised per position, before paths are
            compared: below 1 the tree gets deeper, above 1 wider.

    Raises:
        ConfigError: ``num_nodes`` below ``law.gamma``: the argmax chain would not fit.
    """
    if law.factorised:
        return best_first_factorised(law.position_log_probs(), law.ids, num_nodes, temperature)
    return best_first_markov(law.candidates, law.gamma, root, num_nodes, temperature)


def best_first_factorised(
    log_probs: Float[Tensor, "gamma draft_vocab"],
    ids: Int[Tensor, " draft_vocab"],
    num_nodes: int,
    temperature: float = 1.0,
) -> BestFirstNodes:
    """``best_first`` for a law whose positions are independent."""
    check_budget(num_nodes, log_probs.shape[0])
    steps = _top_lists(log_probs, ids, min(num_nodes, len(ids)), temperature)
    chain, score, log_prob = list[_Candidate](), 0.0, 0.0
    for depth, ranked in enumerate(steps):
        score, log_prob = score + ranked[0][0], log_prob + ranked[0][1]
        chain.append(_Candidate(score, log_prob, ranked[0][2], depth + 1, depth, True))
    return _take(_by_heap(steps), chain, num_nodes)


def best_first_markov(
    candidates_at: CandidatesAt,
    gamma: int,
    root: int,
    num_nodes: int,
    temperature: float = 1.0,
) -> BestFirstNodes:
    """``best_first`` for a law whose positions depend on the token before them (and on nothing earlier)."""
    check_budget(num_nodes, gamma)
    pool: list[_Candidate] = []
    depth_of: list[int] = [0]
    chain: list[_Candidate] = []
    scores: list[float] = []  # of the best nodes so far
    least = -math.inf  # a node below the best B so far, and all its descendants, cannot be among the best B
    frontier = [_Candidate(0.0, 0.0, root, 0, -1, True)]
    for depth in range(gamma):
        level = _expand(candidates_at, depth, frontier, num_nodes, temperature, least, first_key=len(pool) + 1)
        pool += level
        depth_of += [depth + 1] * len(level)
        chain += [node for node in level if node.on_chain]
        scores = sorted([*scores, *(node.score for node in level)], reverse=True)[:num_nodes]
        least = scores[-1] if len(scores) == num_nodes else -math.inf
        # the chain comes first: its own argmax is read from row 0
        frontier = [chain[-1], *(node for node in level if node.score >= least and not node.on_chain)]
    order = sorted(pool, key=lambda node: (-node.score, depth_of[node.key], node.parent, node.token))
    return _take(order, chain, num_nodes)


def with_copy(
    nodes: BestFirstNodes, tokens: Sequence[int], log_prob: float, num_nodes: int, *, keep_chain: bool = True
) -> BestFirstNodes:
    """``nodes`` with one more chain from the root, in best-first order of ``log_probs``, at most ``num_nodes``.

    Args:
        tokens: the chain; where the tree has its nodes already these keep the larger probability.
        log_prob: of each of its tokens given the ones before.
        keep_chain: the argmax chain of ``nodes`` stays inside, as in ``best_first``.
    """
    chain = set(first_children(nodes.parents))
    tokens_of, parents, scores = [-1, *nodes.tokens], [-1, *nodes.parents], [0.0, *nodes.log_probs]
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens_of, strict=True))}
    node = 0
    for step, token in enumerate(tokens, start=1):
        child = children.get((node, token))
        if child is None:
            child = len(tokens_of)
            tokens_of.append(token)
            parents.append(node)
            scores.append(step * log_prob)
        scores[child] = max(scores[child], step * log_prob)
        node = child
    candidates = [
        _Candidate(scores[i], scores[i], tokens_of[i], i, parents[i], keep_chain and i in chain)
        for i in range(1, len(tokens_of))
    ]
    # parents never score below their children and have smaller numbers, so they come first among equals
    order = sorted(candidates, key=lambda candidate: (-candidate.score, candidate.key))
    return _take(order, [c for c in candidates if c.on_chain], min(num_nodes, len(candidates)))


def best_prefix(log_probs: Sequence[float], round_s: Float[Tensor, " count"]) -> int:
    """How many nodes of a best-first order to keep: the n that maximises (1 + expected streak) / seconds.

    The expected streak of n nodes is estimated by the law itself: the sum of their path probabilities. It depends on
    nothing that the verifier has yet to say, so the choice is non-anticipating.

    Args:
        log_probs: ``BestFirstNodes.log_probs``.
        round_s: seconds of a whole round with 0, 1, 2 ... drafted nodes; at least ``len(log_probs) + 1`` of them,
            float64 on the CPU.

    Returns:
        0 .. len(log_probs), the smallest where several are best; 0 where no draft pays for its scoring.
    """
    streak = torch.tensor([0.0, *log_probs], dtype=torch.float64).exp_().cumsum(0)  # entry 0 is the verifier's token
    return int((streak / round_s[: len(streak)]).argmax())


def check_budget(num_nodes: int, gamma: int, key: str = "num_nodes") -> None:
    """Refuse a node budget that the argmax chain does not fit into.

    Raises:
        ConfigError: ``num_nodes`` is below ``gamma``.
    """
    if num_nodes < gamma:
        raise ConfigError(
            f"{key}={num_nodes!r}: expected at least gamma={gamma}, the nodes of the argmax chain; "
            f"raise {key} or lower gamma"
        )


def _top_lists(
    log_probs: Float[Tensor, "gamma draft_vocab"], ids: Int[Tensor, " draft_vocab"], count: int, temperature: float
) -> list[list[tuple[float, float, int]]]:
    """For each position its ``count`` best (tempered, plain log-probability, token), from one transfer to the host."""
    log_probs = _wide(log_probs)
    plain, index = log_probs.topk(count, dim=-1)
    tempered = _tempered(log_probs, plain, temperature)
    packed = torch.stack([tempered, plain, ids[index].to(plain.dtype)]).tolist()
    return [
        sorted(((a, b, int(c)) for a, b, c in zip(*row, strict=True)), key=lambda step: (-step[0], -step[1], step[2]))
        for row in zip(*packed, strict=True)
    ]


def _tempered(
    log_probs: Float[Tensor, "row draft_vocab"], values: Float[Tensor, "row count"], temperature: float
) -> Float[Tensor, "row count"]:
    """``log softmax(log_probs / temperature)`` at its ``values``, largest first; rounding takes none above 0."""
    if temperature == 1.0:
        return values.clamp(max=0.0)
    peak = values[:, :1]  # goes first: dividing by a tiny temperature can overflow, and inf - inf would be NaN
    normaliser = ((log_probs - peak) / temperature).logsumexp(-1, keepdim=True)
    return ((values - peak) / temperature - normaliser).clamp_(max=0.0)


def _wide(log_probs: Float[Tensor, "row draft_vocab"]) -> Float[Tensor, "row draft_vocab"]:
    """float32 or float64: token ids travel to the host in this dtype, and are exact in float32 below 2^24."""
    return log_probs if log_probs.dtype == torch.float64 else log_probs.float()


def _by_heap(steps: list[list[tuple[float, float, int]]]) -> Iterator[_Candidate]:
    """Every node of probability > 0, best first. A node is pushed when its parent or its better sibling comes out."""
    scores, log_probs = [0.0], [0.0]  # of the nodes that came out, by key
    heap = [(-steps[0][0][0], 0, 0, 0, True)]  # (-score, depth, parent, rank among its siblings, on the chain)
    while heap:
        cost, depth, parent, rank, on_chain = heapq.heappop(heap)
        key = len(scores)
        scores.append(-cost)
        log_probs.append(log_probs[parent] + steps[depth][rank][1])
        yield _Candidate(-cost, log_probs[key], steps[depth][rank][2], key, parent, on_chain)
        if rank + 1 < len(steps[depth]) and steps[depth][rank + 1][0] > -math.inf:
            heapq.heappush(heap, (-(scores[parent] + steps[depth][rank + 1][0]), depth, parent, rank + 1, False))
        if depth + 1 < len(steps):
            heapq.heappush(heap, (cost - steps[depth + 1][0][0], depth + 1, key, 0, on_chain))


def _expand(
    candidates_at: CandidatesAt,
    depth: int,
    frontier: list[_Candidate],
    num_nodes: int,
    temperature: float,
    least: float,
    *,
    first_key: int,
) -> list[_Candidate]:
    """The best ``num_nodes`` children of ``frontier`` that score ``least``, and the argmax child of its first node."""
    log_probs, ids = candidates_at(depth, torch.tensor([node.token for node in frontier]))
    log_probs = _wide(log_probs)
    plain, index = log_probs.topk(min(num_nodes, len(ids)), dim=-1)  # rank r has r better siblings: no more is needed
    paths = plain.new_tensor([[node.score, node.log_prob] for node in frontier])
    score = paths[:, :1] + _tempered(log_probs, plain, temperature)
    width = score.shape[1]
    best = score.flatten().topk(min(num_nodes, score.numel())).indices
    # the head of row 0 goes along: it holds the chain's next node, whether or not that is among the best
    picked = torch.cat([torch.arange(width, device=best.device), best])
    fields = (score, paths[:, 1:] + plain, ids[index].to(score.dtype))
    packed = torch.stack([picked.to(score.dtype), *(part.flatten()[picked] for part in fields)], dim=-1).tolist()
    chain_child = min(packed[:width], key=lambda entry: (-entry[1], -entry[2], entry[3]))
    kept = [entry for entry in packed[width:] if entry[1] >= least and entry[1] > -math.inf]
    children = {entry[0]: entry for entry in [chain_child, *kept] if entry[1] > -math.inf}
    ordered = sorted(children.values(), key=lambda entry: (int(entry[0]) // width, -entry[1], entry[3]))
    return [
        _Candidate(value, log_prob, int(token), key, frontier[int(place) // width].key, place == chain_child[0])
        for key, (place, value, log_prob, token) in enumerate(ordered, start=first_key)
    ]


def _take(order: Iterable[_Candidate], chain: Sequence[_Candidate], num_nodes: int) -> BestFirstNodes:
    """Nodes in ``order`` until only the rest of ``chain`` fits, then that rest."""
    nodes = BestFirstNodes()
    number = {0: 0}  # key -> node
    last_chain_node, num_chained = 0, 0
    for candidate in order:
        if num_nodes - len(nodes.tokens) == len(chain) - num_chained:
            break
        node = nodes.add(candidate.token, number[candidate.parent], candidate.score, candidate.log_prob)
        number[candidate.key] = node
        if candidate.on_chain:
            last_chain_node, num_chained = node, num_chained + 1
    for candidate in chain[num_chained:]:
        last_chain_node = nodes.add(candidate.token, last_chain_node, candidate.score, candidate.log_prob)
    return nodes
