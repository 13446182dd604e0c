"""Cross-entropy weighted by how likely decoding is to reach each position."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.streak import reach
from specdiff2.objectives.block_credit import BlockCredit


class StreakCE(BlockCredit):
    """``c_i = prod_{k<i} q_k(x_k) / gamma``, detached: position i matters as often as it is reached.

    Unlike the streak's own credit, the first position that fails always keeps its full weight, so a cold
    drafter learns from this objective too.
    """

    name = "streak_ce"

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        return reach(log_probs, valid) / log_probs.shape[-1]
