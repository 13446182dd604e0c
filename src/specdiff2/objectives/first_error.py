"""First-error focal loss: cross-entropy where the draft is likely to fail for the first time."""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import reach
from specdiff2.objectives.block_credit import BlockCredit
from specdiff2.types import ConfigError


class FirstError(BlockCredit):
    """``c_i = prod_{k<i} q_k(x_k) * (1 - q_i(x_i))^focus / gamma``, detached.

    With ``focus=1`` the credit is the probability that the streak ends exactly at position i, over gamma. ``focus=0``
    is ``streak_ce``; larger values leave positions that already work alone, as the focal loss does with easy
    examples. Unlike the streak's own credit, the first position that fails is never starved, so a cold drafter
    learns from this objective too; positions behind it wait for their turn.

    Args:
        focus: exponent, >= 0 and finite.

    Raises:
        ConfigError: ``focus`` outside its range.

    Source: the modulating factor of Lin et al., Focal Loss (arXiv 1708.02002), put on the first error of a draft.
    """

    name = "first_error"

    def __init__(self, focus: float = 1.0) -> None:
        if not (math.isfinite(focus) and focus >= 0.0):
            raise ConfigError(
                f"objective first_error: focus={focus!r}: expected a finite number >= 0; 0 gives streak_ce"
            )
        self.focus = focus

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        # -expm1: 1 - q without cancellation where q is near 1
        fails = -log_probs.expm1()
        return reach(log_probs, valid) * fails**self.focus / log_probs.shape[-1]
