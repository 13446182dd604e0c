"""Self-selection: which of K drafts to verify, judged by the verifier itself (SpecDiff-2, section 5).

Sees verifier probabilities, never the verifier's random draws: that is what keeps a selected draft
lossless under a rule that does not read draft_probs.
"""

from __future__ import annotations

from specdiff2.functional.speculative import chain_streaks
from specdiff2.protocols import NodeProbs, Selector
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError


class SelfSelection:
    """The chain with the highest expected streak, ``argmax_k sum_j prod_{i<=j} p(x_i | path)``; first on ties."""

    name = "self_selection"

    def __call__(self, tree: TokenTree, verifier_probs: NodeProbs) -> int:
        """Raises ConfigError when the tree has no chain."""
        if not tree.chain_nodes:
            raise ConfigError("self_selection got a tree without chains, expected at least 1; skip selection there")
        streaks = chain_streaks(tree, verifier_probs)
        return streaks.index(max(streaks))


SELECTORS: dict[str, type[SelfSelection]] = {SelfSelection.name: SelfSelection}


def make_selector(name: str | None) -> Selector | None:
    """The selector called ``name``; None for None (no selection).

    Raises:
        ConfigError: unknown name.
    """
    if name is None:
        return None
    if name not in SELECTORS:
        raise ConfigError(f"selection={name!r}: expected null or one of {', '.join(sorted(SELECTORS))}")
    return SELECTORS[name]()
