"""Distillation as for an autoregressive drafter: cross-entropy on the first drafted position alone."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.objectives.block_credit import BlockCredit


class ARDistill(BlockCredit):
    """``window loss = - log q_1(x_1)``: next-token distillation; positions 2 .. gamma get no credit.

    A drafter that fills a whole window learns from it what an autoregressive one would: the token right after the
    anchor. The baseline that shows what the later positions gain from a loss over the window.
    """

    name = "ar_distill"

    def credit(
        self, log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma"]:
        first = torch.zeros_like(log_probs)
        first[:, 0] = 1.0
        return first
