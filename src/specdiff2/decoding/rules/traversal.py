"""Traversal verification (Weng et al., arXiv 2505.12398) of K independent drafts: whole paths, leaf to root.

Knows nothing of how the drafts were made, only that each position of each chain is a fresh draw from its row
of ``draft_probs``. The rule is stated in terms of one *node problem* (w, r, draws): at a node that still has
to be kept with probability w, with r the law of the token after it, given the draws of the chains through it.

- No draw left: keep the node with probability w and emit a token from r, or give the node up.
- Next draw x ~ q: solve the problem of child x with weight ``min(1, w r(x) / q(x))`` and the verifier's own
  law. If x and all below it were given up, go on with ``w' = S / (S + 1 - w)`` and ``r' = (w r - q)+ / S``,
  where ``S = sum_v (w r(v) - q(v))+``.

Why it is lossless. Claim: a node problem keeps something with probability exactly w, whatever the number of
draws, and then the emitted text starts with r and goes on with the verifier. By induction x is kept with mass
``q(x) min(1, w r(x) / q(x)) = min(q(x), w r(x))``. The rest has probability ``1 - w + S``, so the problem that
is left adds ``(1 - w + S) w' r'(x) = (w r(x) - q(x))+``, and the sum is ``w r(x)``. The root has w = 1. The
number of draws below x depends on how often x was drawn; the claim holds for each number, so giving x up says
nothing about the other draws and they are still fresh.

Duplicates. x is given up only if ``w r(x) < q(x)``, and then r'(x) = 0: a second draw of x would fail for
certain. It takes no coin of its own, but q has to be subtracted once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.rules.inputs import drafted_law
from specdiff2.functional.speculative import accept_prob, block_accept_prob, law, residual
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class TraversalRule:
    """Try the leaf of the first chain, then the nodes above it, then the other branches; keep the first success.

    The chance of a first accepted token is that of ``specinfer``; the gain is in the tokens after it, since a
    path is judged by its whole probability and a likely continuation can make up for an unlikely token. Each
    node that is reached takes one coin, also where it cannot win: K=1 makes the same draws as ``block``.

    Lossless only for independent draws from ``draft_probs``, taken in an order that does not look at them.
    """

    name = "traversal"
    is_lossless = True
    reads_draft_probs = True
    walks_tree = True

    def __call__(
        self,
        tree: TokenTree,
        verifier_probs: NodeProbs,
        draft_probs: Float[Tensor, "gamma vocab"] | None,
        rng: RandomSource,
    ) -> Acceptance:
        """Raises ConfigError when ``draft_probs`` is missing."""
        depth = max(map(len, tree.chain_nodes), default=0)
        if not depth:
            return Acceptance([], rng.categorical(law(verifier_probs[0])))
        checked = drafted_law(draft_probs, verifier_probs, depth, self.name)
        walk = _Walk(tree, verifier_probs, [law(row) for row in checked[:depth]], rng)
        accepted = walk.solve([0], 1.0, tree.chain_nodes)
        assert accepted is not None  # the root has weight 1
        return accepted


@dataclass(frozen=True, slots=True)
class _Walk:
    """One round: what all node problems share. ``drafts[d]`` is the law of the tokens at depth d + 1."""

    tree: TokenTree
    verifier_probs: NodeProbs
    drafts: list[Float[Tensor, " vocab"]]
    rng: RandomSource

    def solve(self, path: list[int], weight: float, chains: list[list[int]]) -> Acceptance | None:
        """The node problem of ``path[-1]``; None when the node is given up.

        Args:
            path: nodes from the root down to this one, both included.
            weight: probability w in 0..1 that this node, or one below it, has to be kept with.
            chains: the chains through this node, in the order they were drawn.
        """
        depth, tried = len(path) - 1, set[int]()
        target = self.verifier_probs[path[-1]]
        if weight > 0.0:  # below a hopeless node only coins of probability 0 are left: no law is needed
            target = law(target)
        for chain in chains:
            if len(chain) <= depth:
                continue  # a shorter draft ends here
            child, draft = chain[depth], self.drafts[depth]
            if child not in tried:
                tried.add(child)
                token = self.tree.tokens[child]
                below = [other for other in chains if other[depth : depth + 1] == [child]]
                kept = accept_prob(weight * float(target[token]), float(draft[token]))
                accepted = self.solve([*path, child], kept, below)
                if accepted is not None:
                    return accepted
            if weight > 0.0:
                weight, target = block_accept_prob(weight, target, draft), residual(target, draft, weight)
        if depth and not self.rng.bernoulli(weight):  # no coin for the root
            return None
        return Acceptance(path[1:], self.rng.categorical(target))
