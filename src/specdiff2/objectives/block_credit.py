"""The block-credit family: cross-entropy on the teacher's tokens, weighted per position.

    window loss = - sum_i  c_i  log q_i(x_i)          c = credit, detached, >= 0

The members differ only in ``credit``: constant (uniform, exponential decay), how likely position i is to be
reached (``streak_ce``), or how much of the expected streak depends on it (``dpace``). The gradient of the streak
itself has this form too, with ``functional.streak.credit_weights`` (see ``objectives.streak``).

Targets that the drafter cannot propose (-1) have q = 0: they are not trained on and end every product of
probabilities. Losses are *summed* over windows; the training module divides once by the number of trainable
windows of all accumulated batches and ranks, so that 3 and 30 masked tokens in two batches weigh as in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.functional.streak import expected_streak, token_log_probs
from specdiff2.types import ObjectiveOutput


def trainable_positions(
    targets: Int[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Bool[Tensor, "window gamma"]:
    """Masked positions with a teacher token that the drafter is able to propose."""
    return valid & (targets >= 0)


def objective_output(
    loss_sum: Tensor, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"], trainable: Tensor
) -> ObjectiveOutput:
    """Loss with the two numbers that every objective reports: trainable windows and the streak."""
    return ObjectiveOutput(
        loss_sum=loss_sum,
        num_windows=trainable.any(-1).sum(),
        streak=expected_streak(log_probs.detach(), valid),
    )


class BlockCredit(ABC):
    """A weighted cross-entropy; subclasses say how much credit each position gets."""

    name: str
    needs_verifier_probs = False
    masking = "full"

    @abstractmethod
    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        """Weights >= 0 from detached ``log q_i(x_i)``; values at positions that are not trained do not matter."""

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``. ``verifier_probs`` is not read."""
        trainable = trainable_positions(targets, valid)
        log_probs = token_log_probs(logits, targets.masked_fill(~valid, -1))
        weights = self.credit(log_probs.detach(), valid).masked_fill(~trainable, 0.0)
        # masked_fill on both factors: weight 0 times LOG_ZERO is 0, and no gradient reaches untrained positions
        loss_sum = -(weights * log_probs.masked_fill(~trainable, 0.0)).sum()
        return objective_output(loss_sum, log_probs, valid, trainable)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"
