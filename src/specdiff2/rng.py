"""Randomness of decoding: one seeded source that every random decision goes through.

``categorical`` and ``bernoulli`` use float64 so that no rounding of a 50k-way cumulative sum can pick
a token of probability zero. See ``protocols.RandomSource`` for the contract.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class TorchRandomSource:
    """Seeded by one integer; the same seed and call order give the same draws on every machine."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def bernoulli(self, prob: float) -> bool:
        # strict: torch.rand can return exactly 0.0 and probability 0 must never be accepted
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < prob

    def categorical(self, probs: Float[Tensor, " vocab"]) -> int:
        return int(self._draw(probs[None], 1)[0, 0])

    def chains(self, probs: Float[Tensor, "gamma draft_vocab"], num_chains: int) -> Int[Tensor, "K gamma"]:
        return self._draw(probs, num_chains).T.contiguous()

    def _draw(self, probs: Tensor, num_draws: int) -> Tensor:
        """Inverse-CDF draws per row, ``[row, num_draws]``, on the CPU."""
        cumulative = probs.detach().to(device="cpu", dtype=torch.float64).cumsum(-1)
        total = cumulative[:, -1:]
        if not bool(((total > 0) & torch.isfinite(total)).all()):
            sums = total.flatten().tolist()
            raise ValueError(f"cannot draw from probabilities with sums {sums}: expected > 0 and finite")
        uniform = torch.rand((probs.shape[0], num_draws), generator=self._generator, dtype=torch.float64) * total
        # right=True finds the first index with cumulative > u, which always has probability > 0; the
        # minimum guards u == total after rounding, by falling back to the last token with mass
        last = (cumulative < total).sum(-1, keepdim=True)
        return torch.minimum(torch.searchsorted(cumulative, uniform, right=True), last)
