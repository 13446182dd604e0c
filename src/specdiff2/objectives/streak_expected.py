"""Streak-distillation with the verifier's probabilities in place of its sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from specdiff2.functional.streak import LOG_ZERO, leading_valid, survival, token_log_probs
from specdiff2.objectives.block_credit import objective_output
from specdiff2.types import ConfigError, ObjectiveOutput

Factors = Literal["all", "last"]


class StreakExpected:
    """Streak loss with ``a_k = sum_v q_k(v) p(v | s, x_<k)`` along the teacher's path x.

    ``factors="all"`` (the paper's Eq. 4): ``- sum_j prod_{k<=j} a_k``. Lowest variance; as x_<j is drawn from the
    verifier and not from accepted drafts, its mean over paths differs a little from the expected streak.
    ``factors="last"``: ``- sum_j a_j prod_{k<j} q_k(x_k)``. The mean over paths is exactly that of ``streak``, with
    the noise of each product's last token removed.

    With one-hot verifier probabilities (T = 0) both are ``streak``. A teacher token outside the draft vocabulary
    gives that position no special role under ``all``: other tokens may still be accepted there.

    Raises:
        ConfigError: unknown ``factors``; ``verifier_probs`` missing in a call.

    Source: SpecDiff-2 (arXiv 2511.00606), Eq. 4.
    """

    name = "streak_expected"
    needs_verifier_probs = True
    masking = "full"

    def __init__(self, factors: Factors = "all") -> None:
        if factors not in ("all", "last"):
            raise ConfigError(f"objective streak_expected: factors={factors!r}: expected 'all' or 'last'")
        self.factors = factors

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``; ``verifier_probs`` are the probabilities of the draft vocabulary's tokens."""
        if verifier_probs is None:
            raise ConfigError("objective streak_expected: verifier_probs=None: give the training module a verifier")
        log_accept = log_inner_product(logits, verifier_probs)
        log_probs = token_log_probs(logits, targets.masked_fill(~valid, -1))
        if self.factors == "all":
            survived = survival(log_accept, valid)
        else:
            path = survival(log_probs, valid)
            reached = torch.cat([torch.ones_like(path[:, :1]), path[:, :-1]], dim=-1)
            survived = reached * log_accept.exp() * leading_valid(valid)
        return objective_output(-survived.sum(), log_probs, valid, valid)

    def __repr__(self) -> str:
        return f"StreakExpected(factors={self.factors!r})"


def log_inner_product(
    logits: Float[Tensor, "window gamma draft_vocab"], verifier_probs: Float[Tensor, "window gamma draft_vocab"]
) -> Float[Tensor, "window gamma"]:
    """``log sum_v softmax(logits)_v p_v`` in float32 or wider, at least about ``LOG_ZERO``, gradient finite.

    ``p`` need not sum to 1: mass outside the draft vocabulary can never be accepted.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_verifier = verifier_probs.to(wide.dtype).log().clamp(min=LOG_ZERO)
    return torch.logsumexp(functional.log_softmax(wide, dim=-1) + log_verifier, dim=-1)
