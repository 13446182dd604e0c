"""Multi-round rejection over K independent drafts (SpecInfer, Miao et al., arXiv 2305.09781)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.rules.inputs import drafted_law
from specdiff2.functional.speculative import accept_prob, law, residual
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class SpecInferRule:
    """At each node try the draws of the chains through it, in order; each rejection updates the residual.

    The i-th draw x is accepted with probability ``min(1, r(x)/q(x))`` where r starts as p and becomes
    ``(r - q)+`` after each rejection; when all fail the token is drawn from the last r. Duplicate draws
    are tried again (their residual is zero there, but q has to be subtracted once per draw). Chains that
    carry the accepted token go on to the next position: the drafts' positions are independent, so their
    later tokens are still fresh draws from q. K=1 makes the same draws as ``leviathan``.

    Lossless only for draws from ``draft_probs``. A deterministic tree (the top-k tokens of q) is none: each
    of its drafts has q = 1 on its own token; ``tree_match`` takes such trees as they are.
    """

    name = "specinfer"
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
        chains = tree.chain_nodes
        node, path = 0, list[int]()
        while True:
            depth = len(path)
            chains = [chain for chain in chains if len(chain) > depth]
            target = law(verifier_probs[node])
            if not chains:
                return Acceptance(path, rng.categorical(target))
            draft = law(drafted_law(draft_probs, verifier_probs, depth + 1, self.name)[depth])
            for chain in chains:
                token = tree.tokens[chain[depth]]
                if rng.bernoulli(accept_prob(float(target[token]), float(draft[token]))):
                    node = chain[depth]
                    break
                target = residual(target, draft)
            else:
                return Acceptance(path, rng.categorical(target))
            path.append(node)
            chains = [chain for chain in chains if chain[depth] == node]
