"""Streak-distillation with the verifier's probabilities in place of its sampled tokens."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import leading_valid, log_inner_product, log_overlap, reach, survival
from specdiff2.objectives.base import LawObjective
from specdiff2.types import ConfigError

Factors = Literal["all", "last", "min"]


class StreakExpected(LawObjective):
    """Streak loss with acceptance probabilities ``a_k`` along the teacher's path x, averaged over the token at k.

    ``factors="all"`` (the paper's Eq. 4): ``- sum_j prod_{k<=j} a_k`` with ``a_k = sum_v q_k(v) p(v | s, x_<k)``, the
    factor of greedy acceptance. Lowest variance; as x_<j is drawn from the verifier and not from accepted drafts, its
    mean over paths differs a little from the expected streak.
    ``factors="last"``: ``- sum_j a_j prod_{k<j} q_k(x_k)``. The mean over paths is exactly that of ``streak``, with
    the noise of each product's last token removed.
    ``factors="min"``: as ``all`` with ``a_k = sum_v min(q_k(v), p(v | s, x_<k))``, the factor of token-level ratio
    acceptance, ``min(1, p/q)``. Exactly its expected streak where the laws do not depend on the path; otherwise off by
    a little for the reason given for ``all``.

    With one-hot verifier probabilities (T = 0) all three are ``streak``. A teacher token outside the draft vocabulary
    gives that position no special role under ``all`` and ``min``: other tokens may still be accepted there.

    Raises:
        ConfigError: unknown ``factors``; ``verifier_probs`` missing in a call.

    Source: SpecDiff-2 (arXiv 2511.00606), Eq. 4; Leviathan et al. (arXiv 2211.17192), Theorem 3.5 for ``min``.
    """

    name = "streak_expected"

    def __init__(self, factors: Factors = "all") -> None:
        if factors not in ("all", "last", "min"):
            raise ConfigError(f"objective streak_expected: factors={factors!r}: expected 'all', 'last' or 'min'")
        self.factors = factors

    @property
    def trains_path(self) -> bool:
        """Only ``last`` has factors ``q_k(x_k)``."""
        return self.factors == "last"

    def law_loss(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"],
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Minus the expected streaks, summed over windows."""
        log_factor = log_overlap if self.factors == "min" else log_inner_product
        log_accept = log_factor(logits, verifier_probs)
        if self.factors == "last":
            return -(reach(log_probs, valid) * log_accept.exp() * leading_valid(valid)).sum()
        return -survival(log_accept, valid).sum()
