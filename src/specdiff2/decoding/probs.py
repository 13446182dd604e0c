"""Verifier logits to the law tokens are drawn from, in memory that is used again every round.

A tree of 65 nodes over 50k tokens needs 13 MB: touching fresh memory of that size takes longer than the softmax. At
temperature 0 there is nothing to hold but one token per node.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.decoding.greedy_law import GreedyLaw
from specdiff2.functional.sampling import logits_to_probs, refuse_logits
from specdiff2.protocols import NodeProbs
from specdiff2.types import SamplingParams


class ProbsBuffer:
    """``logits_to_probs`` of one prompt's rounds; a result is valid until the next call."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._memory: Tensor | None = None

    def __call__(self, logits: Float[Tensor, "node vocab"]) -> NodeProbs:
        """Raises SpecDiffError for logits that are no law (see ``logits_to_probs``)."""
        num_nodes, vocab = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if self._sampling.temperature == 0.0:
            return GreedyLaw(_argmax(logits), vocab, logits.device, dtype)
        if self._memory is None or self._memory.shape[0] < num_nodes:
            self._memory = torch.empty((num_nodes, vocab), dtype=dtype, device=logits.device)
        return logits_to_probs(logits, self._sampling, out=self._memory[:num_nodes])


def _argmax(logits: Float[Tensor, "node vocab"]) -> list[int]:
    """The first largest token of each row, checked, in one transfer to the host."""
    peaks, tokens = logits.max(dim=-1)  # not argmax: on a CPU it is four times slower for bfloat16
    # float64 holds every token id and every value of the narrower types exactly
    values, ids = torch.stack([peaks.double(), tokens.double()]).tolist()
    for value in values:
        if not math.isfinite(value):
            raise refuse_logits(value)
    return [int(token) for token in ids]
