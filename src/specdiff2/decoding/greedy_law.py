"""The verifier's law at temperature 0: one token per node instead of a row of probabilities.

A one-hot row over 50k tokens for each node of a tree is megabytes that say a few integers. It behaves like the tensor
of those rows where a rule or a selector reads it (``protocols.NodeProbs``); ``draw`` is the short way. It knows no
rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.protocols import NodeProbs, RandomSource


class GreedyLaw:
    """``probs[node] = one_hot(tokens[node])``.

    Args:
        tokens: the verifier's token after each node.
        vocab_size, device, dtype: of the rows that are asked for.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens = list(tokens)
        self.device = device
        self._vocab_size = vocab_size
        self.dtype = dtype

    @property
    def shape(self) -> torch.Size:
        """(nodes, vocabulary)."""
        return torch.Size((len(self.tokens), self._vocab_size))

    def __getitem__(self, index: int | tuple[Int[Tensor, " pick"], Int[Tensor, " pick"]]) -> Float[Tensor, "..."]:
        """The row of one node, or the probabilities of (nodes, tokens)."""
        if isinstance(index, tuple):
            nodes, tokens = index
            return (torch.tensor(self.tokens, device=self.device)[nodes] == tokens).to(self.dtype)
        row = torch.zeros(self._vocab_size, dtype=self.dtype, device=self.device)
        row[self.tokens[index]] = 1.0
        return row


def draw(verifier_probs: NodeProbs, node: int, rng: RandomSource) -> int:
    """One token from the law after ``node``. Temperature 0 leaves nothing to chance: no random number is used."""
    if isinstance(verifier_probs, GreedyLaw):
        return verifier_probs.tokens[node]
    return rng.categorical(verifier_probs[node])
