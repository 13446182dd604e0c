"""Streak-distillation: maximise the expected number of leading draft tokens that the verifier accepts."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import expected_streak
from specdiff2.objectives.base import PathObjective


class Streak(PathObjective):
    """``window loss = - sum_j prod_{k<=j} q_k(x_k)``, x drawn from the verifier; in [-gamma, 0].

    Its gradient is ``- sum_i w_i grad log q_i`` with ``functional.streak.credit_weights``: block credit whose
    value is the streak itself. Positions behind one with q near 0 get no gradient, so start from a drafter
    warmed with ``ce`` or ``mdm``.

    Source: SpecDiff-2 (arXiv 2511.00606), Definition 5.1 read with q_theta (identity 5b).
    """

    name = "streak"

    def path_loss(
        self,
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        trainable: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Minus the expected streaks, summed over windows."""
        return -expected_streak(log_probs, valid).sum()
