"""Named samplers: which acceptance rule goes with which selector. Used by Python, Hydra and transformers alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdiff2.decoding.acceptance import check_combination, make_rule
from specdiff2.decoding.engine import SpeculativeDecoder
from specdiff2.decoding.selection import SelfSelection
from specdiff2.protocols import AcceptanceRule, Drafter, Verifier
from specdiff2.types import ConfigError, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampler:
    """``num_drafts`` is the K that is meant when none is given."""

    rule: str
    self_selection: bool
    num_drafts: int


SAMPLERS = {
    "specdiff": Sampler("greedy", self_selection=False, num_drafts=1),  # SpecDiff: one draft
    "specdiff2": Sampler("greedy", self_selection=True, num_drafts=8),  # SpecDiff-2: K drafts, best one verified
    "tree_match": Sampler("tree_match", self_selection=False, num_drafts=8),
    "leviathan": Sampler("leviathan", self_selection=False, num_drafts=1),
    "block": Sampler("block", self_selection=False, num_drafts=1),
    "specinfer": Sampler("specinfer", self_selection=False, num_drafts=8),
}


def check_sampler(sampler: str, num_drafts: int | None = None) -> Sampler:
    """The sampler of that name, able to work with ``num_drafts``: known before any model is there.

    Raises:
        ConfigError: unknown sampler, or a K its rule cannot use.
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"sampler={sampler!r}: expected one of {', '.join(SAMPLERS)}")
    settings = SAMPLERS[sampler]
    selector = SelfSelection() if settings.self_selection else None
    check_combination(make_rule(settings.rule), selector, settings.num_drafts if num_drafts is None else num_drafts)
    return settings


def default_draft_temperature(rule: AcceptanceRule, num_drafts: int) -> float:
    """0 (the most probable window) for one draft of a rule that does not read draft probabilities, else 1."""
    return 0.0 if num_drafts == 1 and not rule.reads_draft_probs else 1.0


def make_decoder(
    verifier: Verifier,
    drafter: Drafter,
    *,
    sampler: str = "specdiff2",
    num_drafts: int | None = None,
    verifier_sampling: SamplingParams | None = None,
    draft_sampling: SamplingParams | None = None,
    name: str | None = None,
    **options: Any,
) -> SpeculativeDecoder:
    """A decoder by the name of its sampler.

    ``draft_sampling`` None: one draft of a rule that does not read draft probabilities is the drafter's most
    probable window (temperature 0); everything else draws from the drafter's untempered law.

    Raises:
        ConfigError: unknown sampler; see ``SpeculativeDecoder`` for the rest.
    """
    settings = check_sampler(sampler, num_drafts)
    rule = make_rule(settings.rule)
    num_drafts = settings.num_drafts if num_drafts is None else num_drafts
    if draft_sampling is None:
        draft_sampling = SamplingParams(temperature=default_draft_temperature(rule, num_drafts))
    return SpeculativeDecoder(
        verifier,
        drafter,
        rule=rule,
        selector=SelfSelection() if settings.self_selection else None,
        num_drafts=num_drafts,
        verifier_sampling=verifier_sampling,
        draft_sampling=draft_sampling,
        name=sampler if name is None else name,
        **options,
    )
