"""Block verification (Sun et al., arXiv 2403.10444): accept or reject prefixes of the block jointly."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.rules.inputs import drafted_law, only_chain
from specdiff2.functional.speculative import block_accept_prob, block_survival, law, residual
from specdiff2.protocols import NodeProbs, RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance


class BlockRule:
    """Keep the longest prefix i whose own coin, with probability ``block_accept_prob``, came up heads.

    Its expected streak is at least that of ``leviathan`` for the same laws. The coins are independent, so
    they are flipped from the longest prefix downwards and the first success ends the search. Lossless only
    for one chain whose tokens were really drawn from ``draft_probs``.
    """

    name = "block"
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
        if not chain:
            return Acceptance([], rng.categorical(verifier_probs[0]))
        checked = drafted_law(draft_probs, verifier_probs, len(chain), self.name)
        drafts = [law(checked[depth]) for depth in range(len(chain))]
        targets = [law(verifier_probs[node]) for node in [0, *chain]]  # targets[i]: law after i drafted tokens
        tokens = [tree.tokens[node] for node in chain]
        weights = block_survival(
            [float(row[token]) for row, token in zip(targets[:-1], tokens, strict=True)],
            [float(row[token]) for row, token in zip(drafts, tokens, strict=True)],
        )
        if rng.bernoulli(weights[-1]):
            return Acceptance(list(chain), rng.categorical(targets[-1]))
        length = len(chain) - 1
        while length and not rng.bernoulli(block_accept_prob(weights[length], targets[length], drafts[length])):
            length -= 1
        return Acceptance(chain[:length], rng.categorical(residual(targets[length], drafts[length], weights[length])))
