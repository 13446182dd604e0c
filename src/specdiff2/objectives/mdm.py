"""Masked-diffusion objective: a random part of the window is masked, the rest shows the teacher's tokens."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.functional.masking import mask_ratio_weights
from specdiff2.objectives.block_credit import BlockCredit


class Mdm(BlockCredit):
    """``c_i = 1 / m`` over the m masked positions: the inverse mask ratio ``L / m``, per token of the window.

    ``valid`` must leave out the revealed positions (the training module sees to that). The reported streak is
    that of the partly revealed window, not of decoding; the module does not log it.

    Source: masked diffusion language models (arXiv 2406.07524, 2502.09992).
    """

    name = "mdm"
    masking = "random"

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        return mask_ratio_weights(valid)
