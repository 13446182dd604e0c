"""What a conditioned drafter feeds into its first layer: an anchor and ``gamma - 1`` slots made from the last
committed token and the verifier's hidden states right before it.

    fused   = [unit(e_t), unit(h_(t-1)^a), unit(h_(t-1)^b), ...]      unit(x) = x / rms(x)
    anchor  = A fused + a
    slot_j  = S fused + s_j                                            j = 1 .. gamma - 1

The hidden state of the last committed token itself does not exist yet when a draft is made (the verifier computes it
together with the draft), that of the token before always does. ``models.projection_fit`` starts A, a, S and s from a
linear regression onto what the verifier's own layers would see there. It knows no attention and no windows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdiff2.types import ConfigError

EPSILON = 1e-6


class ContextInput(nn.Module):
    """Inputs of one window; ``num_features`` hidden states of size ``hidden_size`` per token."""

    def __init__(self, hidden_size: int, num_features: int, gamma: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        width = hidden_size * (1 + num_features)
        self.anchor = nn.Linear(width, hidden_size)
        self.slot = nn.Linear(width, hidden_size, bias=False)
        self.slot_bias = nn.Parameter(torch.zeros(gamma - 1, hidden_size))
        with torch.no_grad():  # to be overwritten by the fit or a saved state
            for weight in (self.anchor.weight, self.slot.weight, self.anchor.bias):
                weight.zero_()

    def fuse(
        self, embedding: Float[Tensor, "*shape hidden"], features: Float[Tensor, "*shape feature_width"]
    ) -> Float[Tensor, "*shape fused"]:
        """Every part scaled to unit root mean square, in float32 or wider inside."""
        parts = [embedding.unsqueeze(-2), features.unflatten(-1, (-1, self.hidden_size)).to(embedding.dtype)]
        stacked = torch.cat(parts, dim=-2)
        wide = stacked if stacked.dtype == torch.float64 else stacked.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return unit.flatten(-2).to(embedding.dtype)

    def forward(self, fused: Float[Tensor, "*shape fused"], gamma: int) -> Float[Tensor, "*shape gamma hidden"]:
        """Inputs of the anchor and of the first ``gamma - 1`` slots.

        Raises:
            ConfigError: a longer window than the drafter's own, which has no inputs for it.
        """
        longest = len(self.slot_bias) + 1
        if gamma > longest:
            raise ConfigError(
                f"gamma={gamma}: expected at most {longest}, the window this drafter was made for; draft fewer "
                "positions or train a drafter with a larger model.gamma"
            )
        slots = self.slot(fused)[..., None, :] + self.slot_bias[: gamma - 1]
        anchor = self.anchor(fused)[..., None, :]
        return torch.cat([anchor, slots.to(anchor.dtype)], dim=-2)
