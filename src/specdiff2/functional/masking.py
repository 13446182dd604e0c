"""Random masks of a draft window, for the masked-diffusion objective.

A window of L valid positions shows L - m of the teacher's tokens and masks the other m, with m uniform in
1..L and the masked subset uniform. Weighting each masked token by ``L / m`` (the inverse mask ratio) gives the
masked-diffusion bound on ``-log q(window)`` in its any-order form; divided by L, the weight is ``1 / m``.
This file draws masks and weights; it knows no model.

Source: masked diffusion language models (arXiv 2406.07524, 2502.09992), with the number of masked tokens drawn
exactly instead of each token independently.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def random_reveal(valid: Bool[Tensor, "window gamma"], generator: torch.Generator) -> Bool[Tensor, "window gamma"]:
    """True where the window shows the teacher's token instead of the mask.

    At least one valid position of every non-empty window stays masked; invalid positions stay masked.
    All draws come from ``generator`` (on the CPU), so that one seed gives one mask on every machine.
    """
    num_windows, gamma = valid.shape
    num_valid = valid.sum(-1, keepdim=True)
    uniform = torch.rand((num_windows, 1), generator=generator)
    # torch.rand lies in [0, 1): floor(u * L) is uniform on 0 .. L-1; the minimum guards rounding up to L
    num_revealed = torch.minimum((uniform * num_valid).floor().long(), (num_valid - 1).clamp(min=0))
    keys = torch.rand((num_windows, gamma), generator=generator).masked_fill(~valid, 2.0)
    rank = keys.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (rank < num_revealed) & valid


def mask_ratio_weights(masked: Bool[Tensor, "window gamma"]) -> Float[Tensor, "window gamma"]:
    """``1 / m`` at the m masked positions of each window, 0 elsewhere: inverse mask ratio over window length."""
    num_masked = masked.sum(-1, keepdim=True).clamp(min=1)
    return masked.float() / num_masked
