"""Verifier logits to probabilities, in memory that is used again every round.

A tree of 65 nodes over 50k tokens needs 13 MB: touching fresh memory of that size takes longer than the softmax.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs
from specdiff2.types import SamplingParams


class ProbsBuffer:
    """``logits_to_probs`` of one prompt's rounds; a result is valid until the next call."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._memory: Tensor | None = None

    def __call__(self, logits: Float[Tensor, "node vocab"]) -> Float[Tensor, "node vocab"]:
        """Raises SpecDiffError for logits that are no law (see ``logits_to_probs``)."""
        num_nodes, vocab = logits.shape
        if self._memory is None or self._memory.shape[0] < num_nodes:
            dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
            self._memory = torch.empty((num_nodes, vocab), dtype=dtype, device=logits.device)
        return logits_to_probs(logits, self._sampling, out=self._memory[:num_nodes])
