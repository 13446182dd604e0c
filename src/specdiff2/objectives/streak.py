"""Streak-distillation: maximise the expected number of leading draft tokens that the verifier accepts."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.functional.streak import expected_streak, token_log_probs
from specdiff2.objectives.block_credit import objective_output, trainable_positions
from specdiff2.types import ObjectiveOutput


class Streak:
    """``window loss = - sum_j prod_{k<=j} q_k(x_k)``, x drawn from the verifier; in [-gamma, 0].

    Its gradient is ``- sum_i w_i grad log q_i`` with ``functional.streak.credit_weights``: block credit whose
    value is the streak itself. Positions behind one with q near 0 get no gradient, so start from a drafter
    warmed with ``ce`` or ``mdm``.

    Source: SpecDiff-2 (arXiv 2511.00606), Definition 5.1 read with q_theta (identity 5b).
    """

    name = "streak"
    needs_verifier_probs = False
    masking = "full"

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``. ``verifier_probs`` is not read."""
        log_probs = token_log_probs(logits, targets.masked_fill(~valid, -1))
        loss_sum = -expected_streak(log_probs, valid).sum()
        return objective_output(loss_sum, log_probs, valid, trainable_positions(targets, valid))

    def __repr__(self) -> str:
        return "Streak()"
