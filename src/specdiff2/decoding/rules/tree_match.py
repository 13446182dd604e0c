"""Tree match: greedy acceptance over the whole token tree instead of one chain."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.greedy_law import draw
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class TreeMatchRule:
    """Draw ``y ~ p`` at the current node; step to the child that carries y while there is one; emit y.

    Every emitted token is a plain draw from the verifier, so any tree is lossless. The expected streak is
    the sum over nodes of p(path), which no single chain of the tree can exceed
    (``functional.speculative.tree_streak``). K=1 makes the same draws as ``greedy``.
    """

    name = "tree_match"
    is_lossless = True
    reads_draft_probs = False
    walks_tree = True

    def __call__(
        self,
        tree: TokenTree,
        verifier_probs: NodeProbs,
        draft_probs: Float[Tensor, "gamma vocab"] | None,
        rng: RandomSource,
    ) -> Acceptance:
        children = tree.children()
        node, path = 0, list[int]()
        while True:
            token = draw(verifier_probs, node, rng)
            child = children[node].get(token)
            if child is None:
                return Acceptance(path, token)
            path.append(child)
            node = child
