"""Token-level speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.rules.inputs import drafted_law, only_chain
from specdiff2.functional.speculative import accept_prob, law, residual
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class LeviathanRule:
    """Accept each drafted x with probability ``min(1, p(x)/q(x))``; after a rejection draw from ``(p - q)+``.

    Lossless only for one chain whose tokens were really drawn from ``draft_probs``: a chain chosen among
    several has another law.
    """

    name = "leviathan"
    is_lossless = True
    reads_draft_probs = True
    walks_tree = False

    def __call__(
        self,
        tree: TokenTree,
        verifier_probs: NodeProbs,
        draft_probs: Float[Tensor, "gamma vocab"] | None,
        rng: RandomSource,
    ) -> Acceptance:
        """Raises ConfigError when the tree has more than one chain or ``draft_probs`` is missing."""
        chain = only_chain(tree, self.name)
        path: list[int] = []
        target = law(verifier_probs[0])
        for depth, node in enumerate(chain):
            draft = law(drafted_law(draft_probs, verifier_probs, len(chain), self.name)[depth])
            token = tree.tokens[node]
            if not rng.bernoulli(accept_prob(float(target[token]), float(draft[token]))):
                return Acceptance(path, rng.categorical(residual(target, draft)))
            path.append(node)
            target = law(verifier_probs[node])
        return Acceptance(path, rng.categorical(target))
