"""Token trees grown from the drafter's law: how many nodes, at which temperature, and when more do not pay.

With a number, every tree has that many drafted nodes. With ``auto`` the most probable ``max_nodes`` nodes are
listed best first, and each round keeps the prefix of the list that maximises

    (1 + expected streak) / (draft seconds + verify seconds(nodes) + other seconds),

the expected streak being the sum of the kept nodes' path probabilities under the law itself (whatever the tree
temperature). The argmax chain then stays inside as far as it still pays: the window may be shortened, down to no
draft at all. The choice depends on the law and on costs measured beforehand, never on what the verifier draws, so it
is non-anticipating; and tree match is lossless for any tree that is fixed before those draws.

Drafters whose law depends on the whole path (EAGLE heads) have trees of their own kinds: ``decoding.path_tree``.

With ``lookup_tokens`` a chain copied from the committed text (``functional.suffix_lookup``) joins the tree, its nodes
ranked among the others by the copies' running success in this text. It costs no pass, and depends on committed tokens
only.

It knows no particular drafter, and not how costs are measured (``decoding.cost_measure``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specdiff2.decoding.cost_table import CostTable
from specdiff2.decoding.path_tree import RankTree, grow_dynamic, grow_static
from specdiff2.functional.suffix_lookup import Copy, SuffixLookup
from specdiff2.functional.tree_search import best_first, best_prefix, check_budget, with_copy
from specdiff2.protocols import (
    AcceptanceRule,
    Drafter,
    DrafterSession,
    DraftLaw,
    LawSession,
    PathLawSession,
    Selector,
)
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError

NumNodes = int | Literal["auto"]
Shape = Literal["best_first", "static", "dynamic"]
RankPaths = Sequence[Sequence[int]]
MAX_NODES = 32


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """Checked before any model loads.

    Attributes:
        num_nodes: drafted nodes of a tree, without the root; ``auto``: what pays, up to ``max_nodes``.
        max_nodes: upper limit for ``auto``; not used with a number.
        tree_temperature: of the law that decides which nodes are in the tree; > 0.
        lookup_tokens: longest chain copied from the committed text; 0 copies nothing.
        lookup_ngram: longest suffix whose earlier occurrence is looked up.
        shape: ``best_first`` from a law of windows; ``static`` or ``dynamic`` from a law of paths, which nothing above
            but ``num_nodes`` as a number goes with.
        branching: nodes that a dynamic tree expands on each level, and children it lists of each.
        rank_paths: the static tree as paths of ranks; None: ``num_nodes`` likely ones, as deep as the window.

    Raises:
        ConfigError: a value out of range.
    """

    num_nodes: NumNodes
    max_nodes: int = MAX_NODES
    tree_temperature: float = 1.0
    lookup_tokens: int = 0
    lookup_ngram: int = 3
    shape: Shape = "best_first"
    branching: int | None = None
    rank_paths: RankPaths | None = None

    def __post_init__(self) -> None:
        self._check_shape()
        for name, value, least in (("lookup_tokens", self.lookup_tokens, 0), ("lookup_ngram", self.lookup_ngram, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: expected an integer >= {least}")
        for name, count in (("num_nodes", self.num_nodes), ("max_nodes", self.max_nodes)):
            if name == "num_nodes" and count == "auto":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                other = ", or 'auto'" if name == "num_nodes" else ""
                raise ConfigError(f"{name}={count!r}: expected an integer >= 1{other}")
        temperature = self.tree_temperature
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not (is_number and math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"tree_temperature={temperature!r}: expected a finite number > 0; 1 is the law itself")

    def _check_shape(self) -> None:
        if self.shape not in ("best_first", "static", "dynamic"):
            raise ConfigError(f"shape={self.shape!r}: expected best_first, static or dynamic")
        if (self.branching is not None) != (self.shape == "dynamic") or (self.rank_paths and self.shape != "static"):
            raise ConfigError(
                f"shape={self.shape} with branching={self.branching!r} and rank_paths={self.rank_paths!r}: expected "
                "branching for dynamic trees, and for those alone, and rank_paths for none but static ones"
            )
        if self.branching is not None and (isinstance(self.branching, bool) or self.branching < 1):
            raise ConfigError(f"branching={self.branching!r}: expected an integer >= 1")
        expected = self.num_nodes if self.rank_paths is None else RankTree.of(self.rank_paths).num_nodes
        if expected != self.num_nodes:
            raise ConfigError(f"num_nodes={self.num_nodes!r}: expected {expected}, the nodes of rank_paths")
        plain = self.num_nodes != "auto" and self.tree_temperature == 1.0 and self.lookup_tokens == 0
        if self.shape != "best_first" and not plain:
            raise ConfigError(
                f"shape={self.shape} with num_nodes={self.num_nodes!r}, tree_temperature={self.tree_temperature} and "
                f"lookup_tokens={self.lookup_tokens}: expected a number of nodes, 1 and 0"
            )

    def describe(self) -> dict[str, Any]:
        """The settings that count for this shape, for the fingerprint of records."""
        own = ("shape", "branching", "rank_paths")
        values = asdict(self)
        if self.shape == "best_first":
            return {name: value for name, value in values.items() if name not in own}
        return {name: values[name] for name in ("num_nodes", *own)}

    @property
    def budget(self) -> int:
        """The most nodes a tree can have."""
        return self.max_nodes if self.num_nodes == "auto" else self.num_nodes

    def check_gamma(self, gamma: int) -> None:
        """Raises ConfigError when the argmax chain of ``gamma`` positions does not fit the budget of a best-first
        tree."""
        if self.shape == "best_first":
            check_budget(self.budget, gamma, "max_nodes" if self.num_nodes == "auto" else "num_nodes")


def growth_settings(
    num_nodes: NumNodes | None,
    max_nodes: int | None = None,
    tree_temperature: float | None = None,
    lookup_tokens: int | None = None,
    lookup_ngram: int | None = None,
    shape: Shape | None = None,
    branching: int | None = None,
    rank_paths: RankPaths | None = None,
) -> GrowthSettings | None:
    """Settings from optional keys, defaults filled in; None for a sampler that draws its drafts.

    Raises:
        ConfigError: a key of grown trees without ``num_nodes``, or a value out of range.
    """
    given = {
        "max_nodes": max_nodes,
        "tree_temperature": tree_temperature,
        "lookup_tokens": lookup_tokens,
        "lookup_ngram": lookup_ngram,
        "shape": shape,
        "branching": branching,
        "rank_paths": rank_paths,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if num_nodes is None and rank_paths is not None:
        num_nodes = RankTree.of(rank_paths).num_nodes
    if num_nodes is None:
        for name, value in given.items():
            raise ConfigError(f"{name}={value!r}: this sampler draws its drafts; use sampler tree, or drop {name}")
        return None
    return GrowthSettings(num_nodes, **given)  # type: ignore[arg-type]


def check_growth(rule: AcceptanceRule, selector: Selector | None, num_drafts: int) -> None:
    """Refuse a grown tree for a sampler that could not use it, or would change the verifier's law.

    Raises:
        ConfigError: K above 1, a selector, or a rule that reads one chain only or the law of drawn drafts.
    """
    if num_drafts != 1:
        raise ConfigError(f"K={num_drafts!r} with num_nodes: a grown tree draws no drafts; drop K, or drop num_nodes")
    if selector is not None or not rule.walks_tree or rule.reads_draft_probs:
        chosen = f"rule {rule.name!r}" + ("" if selector is None else f" and selection {selector.name!r}")
        raise ConfigError(
            f"num_nodes with {chosen}: a grown tree is not drawn from the drafter's law and needs a rule that walks "
            "any tree; use sampler tree (rule tree_match, no selection), or drop num_nodes"
        )


def check_laws(settings: GrowthSettings, drafter: Drafter) -> None:
    """Refuse a tree that cannot be grown from what this drafter states.

    Raises:
        ConfigError: a tree of paths from a drafter of windows, or the reverse.
    """
    if settings.shape != "best_first" and not getattr(drafter, "offers_path_law", False):
        raise ConfigError(
            f"shape={settings.shape} (samplers eagle and eagle2) with drafter {type(drafter).__name__}, which has no "
            "law of paths; use a drafter trained with model=smollm2_eagle, or sampler tree"
        )
    if settings.shape == "best_first" and not getattr(drafter, "offers_law", True):
        raise ConfigError(
            f"sampler tree (num_nodes) with drafter {type(drafter).__name__}, whose law depends on the whole path; use "
            "sampler eagle or eagle2, or a block drafter"
        )


class TreeGrowth:
    """Grows the tree of each round."""

    def __init__(self, settings: GrowthSettings, costs: CostTable | None = None) -> None:
        """``costs`` are needed for ``num_nodes=auto`` only.

        Raises:
            ConfigError: they are missing then.
        """
        if settings.num_nodes == "auto" and costs is None:
            raise ConfigError("num_nodes='auto' needs a cost table; use samplers.make_decoder, or give num_nodes")
        self.settings = settings
        self.costs = costs
        self._round_s = costs.round_s(settings.max_nodes) if costs is not None else None
        self._ranks = None if settings.rank_paths is None else RankTree.of(settings.rank_paths)

    def along_paths(self, session: PathLawSession, root: int, gamma: int) -> TokenTree:
        """The static or dynamic tree after the committed token ``root``, at most ``gamma`` deep."""
        settings = self.settings
        if settings.branching is not None:
            return grow_dynamic(session, root, gamma, settings.branching, settings.budget)
        ranks = RankTree.likely(settings.budget, gamma) if self._ranks is None else self._ranks
        return grow_static(session, root, ranks, gamma)

    def start(self, prompt: Sequence[int]) -> Grower:
        """The growth of one generation."""
        return Grower(self, prompt)

    def __call__(self, law: DraftLaw, root: int, copy: Copy | None = None) -> TokenTree:
        """The tree after the committed token ``root``; its chain is the argmax chain, as far as that is inside."""
        settings = self.settings
        nodes = best_first(law, root, settings.budget, settings.tree_temperature)
        if copy is not None:
            auto = settings.num_nodes == "auto"
            nodes = with_copy(nodes, copy.tokens, math.log(copy.prob), settings.budget, keep_chain=not auto)
        num_nodes = len(nodes.tokens)
        if settings.num_nodes == "auto" and self._round_s is not None:
            num_nodes = best_prefix(nodes.log_probs, self._round_s)
        return TokenTree.best_first(root, nodes.tokens[:num_nodes], nodes.parents[:num_nodes])


class Grower:
    """Grows the trees of one generation: knows the committed text, where copies are wanted."""

    def __init__(self, growth: TreeGrowth, prompt: Sequence[int]) -> None:
        settings = growth.settings
        self._growth = growth
        self._lookup = SuffixLookup(prompt, settings.lookup_ngram) if settings.lookup_tokens else None
        self._copy: Copy | None = None

    def __call__(self, law: DraftLaw, root: int) -> TokenTree:
        """The tree of this round. A copy is as long as the window at most: no more tokens fit the output."""
        if self._lookup is not None:
            self._copy = self._lookup.find(min(self._growth.settings.lookup_tokens, law.gamma))
        return self._growth(law, root, self._copy)

    def observe(self, tokens: Sequence[int]) -> None:
        """Newly committed tokens."""
        if self._lookup is None:
            return
        if self._copy is not None:
            self._lookup.learn(self._copy, tokens)
        self._lookup.extend(tokens)
        self._copy = None


def draft_law(drafter: Drafter, session: DrafterSession, gamma: int) -> DraftLaw:
    """The drafter's law of the next ``gamma`` positions.

    Raises:
        ConfigError: this drafter cannot state it.
    """
    if not isinstance(session, LawSession):
        raise ConfigError(
            f"sampler tree with drafter {type(drafter).__name__}: {type(session).__name__} has no law(gamma) to grow a "
            "tree from; use a drafter that has one (BlockDrafter), or a sampler that draws its drafts (tree_match)"
        )
    return session.law(gamma)


def path_session(drafter: Drafter, session: DrafterSession) -> PathLawSession:
    """``session`` as one that trees of paths are grown with.

    Raises:
        ConfigError: it is not one, whatever its drafter said.
    """
    if not isinstance(session, PathLawSession):
        raise ConfigError(
            f"sampler eagle with drafter {type(drafter).__name__}: {type(session).__name__} has no start_tree and "
            "expand; use an EAGLE head, or a sampler that draws its drafts"
        )
    return session
