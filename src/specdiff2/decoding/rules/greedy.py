"""Greedy acceptance (SpecDiff-2, arXiv 2511.00606): keep a drafted token when the verifier draws the same one."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.greedy_law import draw
from specdiff2.decoding.rules.inputs import only_chain
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class GreedyRule:
    """Draw ``y ~ p`` at each node of one chain; go on while y is the drafted token; emit y either way.

    That is the paper's "accept x with probability p(x), else resample from p without x", without the
    residual and its 0/0. It never reads q: the chain may be chosen, or drafted, in any way that does not
    see these draws. Temperature 0 is the same walk with one-hot rows.
    """

    name = "greedy"
    is_lossless = True
    reads_draft_probs = False
    walks_tree = False

    def __call__(
        self,
        tree: TokenTree,
        verifier_probs: NodeProbs,
        draft_probs: Float[Tensor, "gamma vocab"] | None,
        rng: RandomSource,
    ) -> Acceptance:
        """Raises ConfigError when the tree has more than one chain."""
        chain = only_chain(tree, self.name)
        path: list[int] = []
        token = draw(verifier_probs, 0, rng)
        for node in chain:
            if token != tree.tokens[node]:
                break
            path.append(node)
            token = draw(verifier_probs, node, rng)
        return Acceptance(path, token)
