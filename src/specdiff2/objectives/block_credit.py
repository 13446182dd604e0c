"""The block-credit family: cross-entropy on the teacher's tokens, weighted per position.

    window loss = - sum_i  c_i  log q_i(x_i)          c = credit, detached, >= 0

The members differ only in ``credit``: constant (uniform, exponential decay, ``chain``), how likely position i is to be
reached (``streak_ce``) or to be the first to fail (``first_error``), or how much of the expected streak depends on it
(``dpace``). The gradient of the streak itself has this form too, with ``functional.streak.credit_weights`` (see
``objectives.streak``).
"""

from __future__ import annotations

from abc import abstractmethod

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.objectives.base import PathObjective


class BlockCredit(PathObjective):
    """A weighted cross-entropy; subclasses say how much credit each position gets."""

    @abstractmethod
    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        """Weights >= 0 from detached ``log q_i(x_i)``; values at positions that are not trained do not matter."""

    def path_loss(
        self,
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        trainable: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """``- sum c_i log q_i`` over the trainable positions."""
        weights = self.credit(log_probs.detach(), valid).masked_fill(~trainable, 0.0)
        # masked_fill on both factors: weight 0 times LOG_ZERO is 0, and no gradient reaches untrained positions
        return -(weights * log_probs.masked_fill(~trainable, 0.0)).sum()
