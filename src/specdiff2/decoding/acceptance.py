"""The acceptance rules by name, and which combinations with selection and K keep the verifier's law."""

from __future__ import annotations

from collections.abc import Callable

from specdiff2.decoding.rules.block import BlockRule
from specdiff2.decoding.rules.greedy import GreedyRule
from specdiff2.decoding.rules.leviathan import LeviathanRule
from specdiff2.decoding.rules.specinfer import SpecInferRule
from specdiff2.decoding.rules.traversal import TraversalRule
from specdiff2.decoding.rules.tree_match import TreeMatchRule
from specdiff2.protocols import AcceptanceRule, Selector
from specdiff2.types import ConfigError, NotLosslessError

__all__ = [
    "RULES",
    "BlockRule",
    "GreedyRule",
    "LeviathanRule",
    "SpecInferRule",
    "TraversalRule",
    "TreeMatchRule",
    "check_combination",
    "make_rule",
]

RULES: dict[str, Callable[[], AcceptanceRule]] = {
    "greedy": GreedyRule,
    "tree_match": TreeMatchRule,
    "leviathan": LeviathanRule,
    "block": BlockRule,
    "specinfer": SpecInferRule,
    "traversal": TraversalRule,
}


def make_rule(name: str) -> AcceptanceRule:
    """The acceptance rule called ``name``.

    Raises:
        ConfigError: unknown name.
    """
    if name not in RULES:
        raise ConfigError(f"rule={name!r}: expected one of {', '.join(sorted(RULES))}")
    return RULES[name]()


def check_combination(rule: AcceptanceRule, selector: Selector | None, num_drafts: int) -> None:
    """Refuse a sampler that could not work, or would change the verifier's law.

    Selection makes the verified chain the best of K, no longer a draw from draft_probs, so every rule that
    divides by q would be biased.

    Raises:
        ConfigError: K < 1; several drafts for a one-chain rule without selection; selection before a rule
            that reads the whole tree.
        NotLosslessError: selection before a one-chain rule that reads draft_probs.
    """
    if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or num_drafts < 1:
        raise ConfigError(f"K={num_drafts!r}: expected an integer >= 1; use 1 for a single draft")
    if selector is not None:
        if rule.walks_tree:
            raise ConfigError(
                f"rule {rule.name!r} with selection {selector.name!r}: it reads the whole tree, expected no selection; "
                "set selection to null, or use rule greedy"
            )
        if rule.reads_draft_probs:
            raise NotLosslessError(
                f"rule {rule.name!r} with selection {selector.name!r} changes the output law: it needs tokens drawn "
                "from draft_probs, and the best of K drafts is not; use rule greedy with selection, or drop selection"
            )
    elif num_drafts > 1 and not rule.walks_tree:
        remedy = "selection self_selection, " if not rule.reads_draft_probs else ""
        raise ConfigError(
            f"rule {rule.name!r} with K={num_drafts}: it verifies one draft, expected K=1; "
            f"use {remedy}K=1, or a rule that reads the whole tree (tree_match, specinfer, traversal)"
        )
