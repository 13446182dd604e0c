"""Unmasking orders: which masked positions a denoising pass fixes first.

The orders that masked-diffusion language models are usually decoded with (LLaDA: low-confidence remasking and random;
Dream: ``maskgit_plus``, ``entropy`` and ``origin``). Scores only; how many positions a pass fixes, and to what, is the
session's business (``models.window_session``).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.types import ConfigError

UNMASKING_ORDERS = ("confidence", "entropy", "random", "left_to_right")


def check_unmasking(order: str) -> None:
    """Raises ConfigError: not one of ``UNMASKING_ORDERS``."""
    if order not in UNMASKING_ORDERS:
        raise ConfigError(f"unmasking={order!r}: expected one of {', '.join(UNMASKING_ORDERS)}")


def unmasking_scores(
    logits: Float[Tensor, "gamma draft_vocab"], order: str, generator: torch.Generator | None = None
) -> Float[Tensor, " gamma"]:
    """float32 scores; positions with high ones are fixed first.

    ``confidence``: probability of the most probable token. ``entropy``: minus the entropy. ``random``: uniform numbers
    from ``generator`` (on the CPU). ``left_to_right``: earlier positions first.

    Raises:
        ConfigError: unknown order.
    """
    check_unmasking(order)
    num_positions, device = logits.shape[0], logits.device
    if order == "random":
        return torch.rand(num_positions, generator=generator).to(device)
    if order == "left_to_right":
        return -torch.arange(num_positions, device=device, dtype=torch.float32)
    log_probs = logits.float().log_softmax(-1)
    if order == "confidence":
        return log_probs.amax(-1).exp()
    # a forbidden token has probability 0 and adds nothing; 0 * -inf would be NaN
    return (log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
