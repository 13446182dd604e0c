"""D-PACE: streak credit computed from smoothed probabilities, as detached weights of a cross-entropy."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import LOG_ZERO, credit_weights
from specdiff2.objectives.block_credit import BlockCredit
from specdiff2.types import ConfigError


class DPace(BlockCredit):
    """``c_i = sum_{j>=i} prod_{k<=j} s_k / gamma`` with ``s_k = (1 - alpha) q_k(x_k) + alpha``, detached.

    ``alpha=0`` gives the gradient of the streak loss (over gamma); ``alpha=1`` ignores the drafter and gives the
    fixed linear weights ``(gamma - i + 1) / gamma``. In between, a cold position never starves those behind it.

    Args:
        alpha: smoothing, 0 <= alpha <= 1.

    Raises:
        ConfigError: ``alpha`` outside its range.

    Source: D-PACE (arXiv 2605.18810).
    """

    name = "dpace"

    def __init__(self, alpha: float = 0.5) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"objective dpace: alpha={alpha!r}: expected 0 <= alpha <= 1; the paper uses 0.5")
        self.alpha = alpha

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        smoothed = (1.0 - self.alpha) * log_probs.exp() + self.alpha
        return credit_weights(smoothed.log().clamp(min=LOG_ZERO), valid) / log_probs.shape[-1]
