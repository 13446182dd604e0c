"""Distribution matching for T > 0: bring the drafter's law to the verifier's, position by position.

    a_i = sum_v min(q_i(v), p(v | s, x_<i))      the chance that the ratio rules accept a token drawn from q_i

``tv`` lowers the expected number of rejections ``1 - a_i``, ``lk`` is the likelihood of acceptance ``- log a_i``.
A drafter that cannot propose a token cannot match its mass, and ``1 - a_i`` never falls below the mass outside the
draft vocabulary. Teacher tokens only set the path here.
"""

from __future__ import annotations

from abc import abstractmethod

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import log_overlap, reach
from specdiff2.objectives.base import LawObjective


class Matching(LawObjective):
    """Losses of the log overlap ``log a_i``; subclasses give the loss of one position.

    Args:
        survival: weigh position i by the detached ``prod_{k<i} a_k``, the chance that decoding reaches it.
    """

    def __init__(self, survival: bool = False) -> None:
        self.survival = survival

    @abstractmethod
    def position_loss(
        self, log_accept: Float[Tensor, "window gamma"], matchable: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        """Loss of each position; ``matchable``: the draft vocabulary holds some of the verifier's mass there."""

    def law_loss(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"],
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Sum over the valid positions of all windows; ``log_probs`` are not read."""
        log_accept = log_overlap(logits, verifier_probs)
        losses = self.position_loss(log_accept, verifier_probs.sum(-1) > 0)
        if self.survival:
            losses = losses * reach(log_accept.detach(), valid)
        return losses.masked_fill(~valid, 0.0).sum()


class TotalVariation(Matching):
    """``window loss = sum_i (1 - a_i)``: the rejections expected if every position were tried; in [0, gamma].

    With ``survival=True`` its value is the chance that a window is not accepted whole, and its gradient that of each
    rejection given that decoding gets there. The gradient vanishes where the two laws have little in common, so start
    from a warmed drafter, or mix it with ``lk``.

    Source: Leviathan et al. (arXiv 2211.17192), Definition 3.2; as a training loss DistillSpec (arXiv 2310.08461).
    """

    name = "tv"

    def position_loss(
        self, log_accept: Float[Tensor, "window gamma"], matchable: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        return -log_accept.expm1()


class AcceptanceLikelihood(Matching):
    """``window loss = - sum_i log a_i / gamma``: cross-entropy of the event that a drafted token is accepted.

    At T = 0 it is the uniform cross-entropy. Unlike ``tv`` its gradient does not vanish for a cold drafter. Positions
    where the draft vocabulary holds none of the verifier's mass are left out, as undraftable tokens are there.
    """

    name = "lk"

    def position_loss(
        self, log_accept: Float[Tensor, "window gamma"], matchable: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        return -log_accept.masked_fill(~matchable, 0.0) / log_accept.shape[-1]
