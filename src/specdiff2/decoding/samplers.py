"""Named samplers: which acceptance rule goes with which selector, and whether drafts are drawn or a tree is grown.

Used by Python, Hydra and transformers alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specdiff2.decoding.acceptance import check_combination, make_rule
from specdiff2.decoding.cost_measure import cost_key, measure_costs
from specdiff2.decoding.cost_table import load_or_measure
from specdiff2.decoding.ensemble import DrafterEnsemble, check_ensemble, check_num_drafts
from specdiff2.decoding.selection import SelfSelection
from specdiff2.decoding.speculative import SpeculativeDecoder, is_unlimited, own_sampling, window_length
from specdiff2.decoding.tree_growth import (
    GrowthSettings,
    NumNodes,
    RankPaths,
    Shape,
    TreeGrowth,
    check_growth,
    check_laws,
    growth_settings,
)
from specdiff2.protocols import AcceptanceRule, Drafter, Verifier
from specdiff2.types import ConfigError, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampler:
    """``num_drafts`` is the K, and ``num_nodes`` the size of a grown tree, that is meant when none is given.

    ``num_nodes`` None: the sampler draws its drafts; ``follows_verifier``: by the verifier's own temperature, top-k and
    top-p. ``gamma``: depth of a tree for drafters that can draft any number of positions.
    """

    rule: str
    self_selection: bool
    num_drafts: int
    num_nodes: NumNodes | None = None
    lookup_tokens: int | None = None
    shape: Shape | None = None
    branching: int | None = None
    gamma: int | None = None
    follows_verifier: bool = False

    def growth(
        self,
        num_nodes: NumNodes | None,
        max_nodes: int | None,
        tree_temperature: float | None,
        lookup_tokens: int | None,
        lookup_ngram: int | None,
        branching: int | None = None,
        rank_paths: RankPaths | None = None,
    ) -> GrowthSettings | None:
        """``growth_settings`` with this sampler's own values where None is given."""
        return growth_settings(
            self.num_nodes if num_nodes is None and rank_paths is None else num_nodes,
            max_nodes,
            tree_temperature,
            self.lookup_tokens if lookup_tokens is None else lookup_tokens,
            lookup_ngram,
            self.shape,
            self.branching if branching is None else branching,
            rank_paths,
        )

    def window(self, gamma: int | None, drafter: Drafter) -> int | None:
        """``gamma``, or this sampler's own where none is given and the drafter has no limit."""
        return self.gamma if gamma is None and is_unlimited(drafter) else gamma


SAMPLERS = {
    "specdiff": Sampler("greedy", self_selection=False, num_drafts=1),  # SpecDiff: one draft
    "specdiff2": Sampler("greedy", self_selection=True, num_drafts=8),  # SpecDiff-2: K drafts, best one verified
    "tree_match": Sampler("tree_match", self_selection=False, num_drafts=8),
    "tree": Sampler("tree_match", self_selection=False, num_drafts=1, num_nodes=32),  # grown from the drafter's law
    # the same with a chain copied from the text, as large as pays on this machine
    "tree_lookup": Sampler("tree_match", self_selection=False, num_drafts=1, num_nodes="auto", lookup_tokens=8),
    # EAGLE's trees of a head's paths: always the same ranks, or the most confident nodes of each level, reranked
    "eagle": Sampler("tree_match", self_selection=False, num_drafts=1, num_nodes=25, shape="static", gamma=5),
    "eagle2": Sampler(
        "tree_match", self_selection=False, num_drafts=1, num_nodes=32, shape="dynamic", branching=8, gamma=5
    ),
    "sps": Sampler("leviathan", self_selection=False, num_drafts=1, follows_verifier=True),  # autoregressive drafter
    "prompt_lookup": Sampler(
        "greedy", self_selection=False, num_drafts=1
    ),  # copies what followed the last tokens before
    "leviathan": Sampler("leviathan", self_selection=False, num_drafts=1),
    "block": Sampler("block", self_selection=False, num_drafts=1),
    "specinfer": Sampler("specinfer", self_selection=False, num_drafts=8),
    "traversal": Sampler("traversal", self_selection=False, num_drafts=4),
}


def check_sampler(
    sampler: str,
    num_drafts: int | None = None,
    num_nodes: NumNodes | None = None,
    *,
    several_drafters: bool = False,
) -> Sampler:
    """The sampler of that name, able to work with ``num_drafts`` and ``num_nodes``: known before any model is there.

    Raises:
        ConfigError: unknown sampler, a K its rule cannot use, nodes for a sampler that draws its drafts, or several
            drafters for one that grows a tree.
        NotLosslessError: several drafters for a rule that reads the law of the drafts.
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"sampler={sampler!r}: expected one of {', '.join(SAMPLERS)}")
    settings = SAMPLERS[sampler]
    rule, selector = make_rule(settings.rule), SelfSelection() if settings.self_selection else None
    if several_drafters:
        check_ensemble(rule, settings.num_nodes)
    num_drafts = settings.num_drafts if num_drafts is None else num_drafts
    check_combination(rule, selector, num_drafts)
    if settings.num_nodes is not None:
        check_growth(rule, selector, num_drafts)
    elif num_nodes is not None:
        grown = ", ".join(name for name, known in SAMPLERS.items() if known.num_nodes is not None)
        raise ConfigError(
            f"num_nodes={num_nodes!r} with sampler {sampler!r}: it draws its drafts, expected num_drafts; "
            f"use a sampler that grows a tree ({grown})"
        )
    return settings


def default_draft_temperature(rule: AcceptanceRule, num_drafts: int) -> float:
    """0 (the most probable window) for one draft of a rule that does not read draft probabilities, else 1."""
    return 0.0 if num_drafts == 1 and not rule.reads_draft_probs else 1.0


def make_growth(
    settings: GrowthSettings | None,
    verifier: Verifier,
    drafter: Drafter,
    *,
    gamma: int | None = None,
    verifier_sampling: SamplingParams | None = None,
    cost_folder: str | Path | None = None,
) -> TreeGrowth | None:
    """The growth of ``settings`` for this pair; with ``num_nodes=auto`` its costs are looked up, or measured now.

    Args:
        settings: None gives None: drafts are drawn.
        gamma: positions drafted in a round; None means the drafter's own.
        verifier_sampling: None means the verifier's own.
        cost_folder: where cost tables are kept; None measures each time and keeps nothing.

    Raises:
        ConfigError: the budget has no room for ``gamma`` nodes, or see ``check_laws`` and ``measure_costs``.
    """
    if settings is None:
        return None
    check_laws(settings, drafter)
    gamma = window_length(gamma, drafter.gamma, unlimited=is_unlimited(drafter))
    settings.check_gamma(gamma)
    if settings.num_nodes != "auto":
        return TreeGrowth(settings)
    sampling = own_sampling(verifier) if verifier_sampling is None else verifier_sampling
    measure = partial(measure_costs, verifier, drafter, gamma, sampling=sampling)
    folder = None if cost_folder is None else Path(cost_folder)
    return TreeGrowth(settings, load_or_measure(folder, cost_key(verifier, drafter, gamma), measure))


def make_decoder(
    verifier: Verifier,
    drafter: Drafter,
    *,
    sampler: str = "specdiff2",
    num_drafts: int | None = None,
    gamma: int | None = None,
    num_nodes: NumNodes | None = None,
    max_nodes: int | None = None,
    tree_temperature: float | None = None,
    lookup_tokens: int | None = None,
    lookup_ngram: int | None = None,
    branching: int | None = None,
    rank_paths: RankPaths | None = None,
    cost_folder: str | Path | None = None,
    min_confidence: float = 0.0,
    denoising_steps: int | None = None,
    verifier_sampling: SamplingParams | None = None,
    draft_sampling: SamplingParams | None = None,
    name: str | None = None,
) -> SpeculativeDecoder:
    """A decoder by the name of its sampler.

    Args:
        drafter: a ``DrafterEnsemble`` brings its own K and the laws of its drafts.
        draft_sampling: None: one draft of a rule that does not read draft probabilities is the drafter's most
            probable window (temperature 0); everything else draws from the drafter's untempered law, and a tree is
            grown from it (``tree_temperature`` tempers that).
        num_nodes, max_nodes, tree_temperature, lookup_tokens, lookup_ngram, branching, rank_paths: of a grown tree;
            see ``tree_growth.GrowthSettings``.
        cost_folder: for ``num_nodes="auto"``; see ``make_growth``.
        min_confidence, denoising_steps: see ``SpeculativeDecoder``.

    Raises:
        ConfigError: unknown sampler, or a setting that it has no use for; see ``SpeculativeDecoder`` for the rest.
    """
    several = isinstance(drafter, DrafterEnsemble)
    if isinstance(drafter, DrafterEnsemble):
        check_num_drafts(num_drafts, drafter.num_drafts)
        num_drafts = drafter.num_drafts
    settings = check_sampler(sampler, num_drafts, num_nodes, several_drafters=several)
    rule = make_rule(settings.rule)
    num_drafts = settings.num_drafts if num_drafts is None else num_drafts
    grown = settings.growth(num_nodes, max_nodes, tree_temperature, lookup_tokens, lookup_ngram, branching, rank_paths)
    gamma = settings.window(gamma, drafter)
    if grown is not None:
        check_grown_sampling(draft_sampling)
    elif draft_sampling is None and settings.follows_verifier:
        draft_sampling = own_sampling(verifier) if verifier_sampling is None else verifier_sampling
    elif draft_sampling is None and not several:
        draft_sampling = SamplingParams(temperature=default_draft_temperature(rule, num_drafts))
    return SpeculativeDecoder(
        verifier,
        drafter,
        rule=rule,
        selector=SelfSelection() if settings.self_selection else None,
        num_drafts=num_drafts,
        draft_sampling=draft_sampling,
        growth=make_growth(
            grown, verifier, drafter, gamma=gamma, verifier_sampling=verifier_sampling, cost_folder=cost_folder
        ),
        gamma=gamma,
        min_confidence=min_confidence,
        denoising_steps=denoising_steps,
        verifier_sampling=verifier_sampling,
        name=sampler if name is None else name,
    )


def check_grown_sampling(draft_sampling: SamplingParams | None) -> None:
    """A grown tree reads the untempered law: a draft temperature, top-k or top-p would be ignored.

    Raises:
        ConfigError: one is given.
    """
    if draft_sampling is not None and draft_sampling != SamplingParams():
        raise ConfigError(
            f"draft sampling {draft_sampling} with a grown tree: it draws no drafts; use tree_temperature instead"
        )
