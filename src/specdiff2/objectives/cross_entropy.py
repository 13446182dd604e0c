"""Cross-entropy over the fully masked window, uniform or decaying with the position."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.objectives.block_credit import BlockCredit
from specdiff2.types import ConfigError


class CrossEntropy(BlockCredit):
    """``c_i = decay^(i-1) / sum_k decay^(k-1)``; ``decay=1`` is the plain mean over the gamma positions.

    The divisor is that of a whole window, so a token of a window cut short by the end of the rollout weighs
    the same as any other. Warms up a cold drafter, which the streak loss cannot: its credit there is near zero.

    Args:
        decay: weight of a position relative to the one before it, 0 < decay <= 1.

    Raises:
        ConfigError: ``decay`` outside its range.
    """

    name = "ce"

    def __init__(self, decay: float = 1.0) -> None:
        if not 0.0 < decay <= 1.0:
            raise ConfigError(f"objective ce: decay={decay!r}: expected 0 < decay <= 1; use 1.0 for uniform weights")
        self.decay = decay

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        positions = torch.arange(log_probs.shape[-1], device=log_probs.device, dtype=log_probs.dtype)
        weights = self.decay**positions
        return (weights / weights.sum()).expand_as(log_probs)
