"""Several drafters in one round: each draws its own share of the K drafts, and all of them end up in one token tree.

A draft of an ensemble is no draw from one law: different drafters, or one drafter at different temperatures, have
different ones. Rules that divide by q would need to know which chain came from which law, and in which order; rules
that never read q (greedy acceptance, tree match) do not care, and neither does self-selection before them. So those
are the rules an ensemble works with, and with them it is lossless whatever the members are.

Source: SpecDiff-2 (arXiv 2511.00606) names several drafters as future work.

Knows no particular drafter, and not where drafters come from (``decoding.drafter_entries``). Two members may share one
drafter; each has its own session, and its own denoising pass in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from specdiff2.decoding.engine import shorten_windows, start_drafter
from specdiff2.protocols import AcceptanceRule, Drafter, DrafterSession, RandomSource, VerifierSession
from specdiff2.types import ConfigError, Draft, NotLosslessError, SamplingParams


@dataclass(frozen=True, slots=True)
class Member:
    """One drafter of an ensemble.

    Attributes:
        name: how tables call it; no other member has it.
        num_drafts: its share of the K drafts.
        sampling: the law its drafts are drawn from.
    """

    name: str
    drafter: Drafter
    num_drafts: int
    sampling: SamplingParams


class DrafterEnsemble:
    """See ``protocols.Drafter`` and ``protocols.ConditionedDrafter``. Drafts as far as every member can."""

    def __init__(self, members: Sequence[Member]) -> None:
        """
        Raises:
            ConfigError: no members, one that drafts nothing, or two of one name.
        """
        if not members:
            raise ConfigError("an ensemble of no drafters: expected at least one member")
        names = [member.name for member in members]
        for member in members:
            if names.count(member.name) > 1:
                raise ConfigError(f"two drafters named {member.name!r}: expected a name of its own for each member")
            if member.num_drafts < 1:
                raise ConfigError(f"drafter {member.name!r} with {member.num_drafts} drafts: expected at least 1")
        self.members = tuple(members)
        self.gamma = min(member.drafter.gamma for member in members)
        self.num_drafts = sum(member.num_drafts for member in members)
        self.needs_verifier_session = any(
            getattr(member.drafter, "needs_verifier_session", False) for member in members
        )

    def start(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: VerifierSession | None = None,
    ) -> EnsembleSession:
        """A session of every member. ``sampling`` must be the default: each member has its own.

        Raises:
            ConfigError: another ``sampling``.
        """
        if sampling != SamplingParams():
            raise ConfigError(
                f"draft sampling {sampling} for an ensemble: each of its drafters has its own; give the temperatures "
                "in `drafters`"
            )
        return EnsembleSession(
            self,
            [
                start_drafter(member.drafter, prompt, member.sampling, max_new_tokens, verifier_session)
                for member in self.members
            ],
        )


def single_drafters(drafter: Drafter) -> list[Drafter]:
    """The drafters of an ensemble, each once; else ``drafter`` alone."""
    if not isinstance(drafter, DrafterEnsemble):
        return [drafter]
    return list({id(member.drafter): member.drafter for member in drafter.members}.values())


class EnsembleSession:
    """See ``protocols.DrafterSession``."""

    def __init__(self, ensemble: DrafterEnsemble, sessions: Sequence[DrafterSession]) -> None:
        self._ensemble = ensemble
        self._sessions = list(sessions)
        self._sources = tuple(index for index, member in enumerate(ensemble.members) for _ in range(member.num_drafts))
        self._min_confidence = 0.0

    @property
    def min_confidence(self) -> float:
        """Every member ends its own drafts there."""
        return self._min_confidence

    @min_confidence.setter
    def min_confidence(self, value: float) -> None:
        """Raises ConfigError: a member cannot shorten its window."""
        for member, session in zip(self._ensemble.members, self._sessions, strict=True):
            shorten_windows(session, member.drafter, value)
        self._min_confidence = value

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """The drafts of all members, in their order; shorter ones filled up with -1.

        Raises:
            ConfigError: ``num_drafts`` is not the sum of the members' shares.
            NotLosslessError: ``needs_probs``: there is no one law.
        """
        ensemble = self._ensemble
        if needs_probs:
            raise NotLosslessError(_NO_LAW.format(rule="that reads draft_probs"))
        check_num_drafts(num_drafts, ensemble.num_drafts)
        drafts = [
            session.propose(gamma, member.num_drafts, rng, needs_probs=False).tokens.cpu()
            for member, session in zip(ensemble.members, self._sessions, strict=True)
        ]
        width = max(tokens.shape[1] for tokens in drafts)
        padded = [pad(tokens, (0, width - tokens.shape[1]), value=-1) for tokens in drafts]
        return Draft(torch.cat(padded), sources=self._sources)

    def observe(self, tokens: Sequence[int], features: Float[Tensor, "token hidden"] | None = None) -> None:
        """Every member sees what was committed, whoever drafted it."""
        for session in self._sessions:
            session.observe(tokens, features)


_NO_LAW = (
    "several drafters with a rule {rule}: their drafts are draws of different laws, and the rule would divide by one "
    "of them, which changes the output law; use rule greedy with selection self_selection, or rule tree_match"
)


def check_num_drafts(num_drafts: int | None, expected: int) -> None:
    """Raises ConfigError: another K, if any, than the members' drafts add up to."""
    if num_drafts is not None and num_drafts != expected:
        raise ConfigError(
            f"K={num_drafts!r} with several drafters that draft {expected} in all: expected that number, or no K; "
            "each entry of drafters has its own"
        )


def check_ensemble(rule: AcceptanceRule, num_nodes: object) -> None:
    """Refuse what several drafters cannot be combined with; known before any model is there.

    Args:
        num_nodes: of a grown tree; None where drafts are drawn.

    Raises:
        NotLosslessError: the rule reads the law of the drafts.
        ConfigError: a grown tree.
    """
    if rule.reads_draft_probs:
        raise NotLosslessError(_NO_LAW.format(rule=f"{rule.name!r} that reads draft_probs"))
    if num_nodes is not None:
        raise ConfigError(
            f"several drafters with num_nodes={num_nodes!r}: a tree is grown from the law of one drafter; drop "
            "num_nodes (rule tree_match merges drawn drafts into one tree), or name one drafter"
        )
