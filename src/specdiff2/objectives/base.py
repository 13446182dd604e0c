"""What all objectives share: the teacher's path, the numbers they report, and the two kinds of losses on windows.

Targets that the drafter cannot propose (-1) have q = 0: they are not trained on and end every product of
probabilities. Losses are *summed* over windows; the training module divides once by the number of trainable
windows of all accumulated batches and ranks, so that 3 and 30 masked tokens in two batches weigh as in one.

The kinds differ in what they read, which lets ``objectives.weighted`` compute the costly part, a softmax over the
vocabulary, once for all of its parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.functional.streak import expected_streak, token_log_probs
from specdiff2.types import ConfigError, ObjectiveOutput


def trainable_positions(
    targets: Int[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Bool[Tensor, "window gamma"]:
    """Masked positions with a teacher token that the drafter is able to propose."""
    return valid & (targets >= 0)


def path_log_probs(
    logits: Float[Tensor, "window gamma draft_vocab"],
    targets: Int[Tensor, "window gamma"],
    valid: Bool[Tensor, "window gamma"],
    *,
    differentiable: bool = True,
) -> Float[Tensor, "window gamma"]:
    """``log q_i(x_i)`` of the teacher's tokens; ``LOG_ZERO`` where there is none to draft."""
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        return token_log_probs(logits, targets.masked_fill(~valid, -1))


def objective_output(
    loss_sum: Tensor, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"], trainable: Tensor
) -> ObjectiveOutput:
    """Loss with the two numbers that every objective reports: trainable windows and the streak."""
    return ObjectiveOutput(
        loss_sum=loss_sum,
        num_windows=trainable.any(-1).sum(),
        streak=expected_streak(log_probs.detach(), valid),
    )


class PathObjective(ABC):
    """A loss of the drafter's probabilities of the teacher's tokens."""

    name: str
    needs_verifier_probs = False
    masking = "full"

    @abstractmethod
    def path_loss(
        self,
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        trainable: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Sum of the window losses, from ``path_log_probs`` and ``trainable_positions``."""

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``. ``verifier_probs`` is not read."""
        log_probs = path_log_probs(logits, targets, valid)
        trainable = trainable_positions(targets, valid)
        return objective_output(self.path_loss(log_probs, valid, trainable), log_probs, valid, trainable)

    def __repr__(self) -> str:
        return _call(self)


class LawObjective(ABC):
    """A loss of the drafter's whole law and the verifier's, along the teacher's path.

    Verifier probabilities are restricted to the draft vocabulary and not renormalised: mass outside it can never be
    accepted. Every valid position is trained on, whether the teacher's own token is draftable or not.

    Raises:
        ConfigError: ``verifier_probs`` missing in a call.
    """

    name: str
    needs_verifier_probs = True
    masking = "full"

    @property
    def trains_path(self) -> bool:
        """Whether the loss differentiates ``log_probs`` too; else they only tell the streak."""
        return False

    @abstractmethod
    def law_loss(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"],
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Sum of the window losses; ``log_probs`` from ``path_log_probs``."""

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``; ``verifier_probs`` are the probabilities of the draft vocabulary's tokens."""
        log_probs = path_log_probs(logits, targets, valid, differentiable=self.trains_path)
        loss_sum = self.law_loss(logits, self.require(verifier_probs), log_probs, valid)
        return objective_output(loss_sum, log_probs, valid, valid)

    def require(self, verifier_probs: Tensor | None) -> Tensor:
        """The probabilities, or the error that says who needs them."""
        if verifier_probs is None:
            raise ConfigError(f"objective {self.name}: verifier_probs=None: give the training module a verifier")
        return verifier_probs

    def __repr__(self) -> str:
        return _call(self)


def _call(objective: object) -> str:
    """The constructor call; resumed runs compare it with the one in their checkpoint."""
    settings = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(objective).items()))
    return f"{type(objective).__name__}({settings})"
