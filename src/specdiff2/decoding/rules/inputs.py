"""Checks that every acceptance rule makes on its arguments before it draws anything."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from specdiff2.protocols import NodeProbs
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError


def only_chain(tree: TokenTree, rule: str) -> list[int]:
    """The nodes of the single chain to verify; empty for a tree without drafts.

    Raises:
        ConfigError: the tree has several chains.
    """
    if tree.num_chains > 1:
        raise ConfigError(
            f"rule {rule!r} got {tree.num_chains} chains, expected 1; draft one (K=1), choose one by "
            "self_selection (rule greedy only), or use a rule that reads the whole tree "
            "(tree_match, specinfer, traversal)"
        )
    return tree.chain_nodes[0] if tree.chain_nodes else []


def drafted_law(
    draft_probs: Float[Tensor, "gamma vocab"] | None, verifier_probs: NodeProbs, depth: int, rule: str
) -> Float[Tensor, "gamma vocab"]:
    """``draft_probs``, checked to cover ``depth`` positions of the verifier's vocabulary.

    Raises:
        ConfigError: no law was kept, or its shape does not fit the drafts.
    """
    if draft_probs is None:
        raise ConfigError(
            f"rule {rule!r} got draft_probs=None, expected the law the drafts were drawn from; "
            "call propose(..., needs_probs=True), or use a rule that never reads it (greedy, tree_match)"
        )
    if draft_probs.shape[0] < depth or draft_probs.shape[-1] != verifier_probs.shape[-1]:
        raise ConfigError(
            f"rule {rule!r} got draft_probs of shape {tuple(draft_probs.shape)}, expected at least {depth} rows "
            f"over the verifier's {verifier_probs.shape[-1]} tokens; scatter a draft vocabulary to the full one first"
        )
    return draft_probs
