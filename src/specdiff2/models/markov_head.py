"""A low-rank bias on drafted logits from the token right before the position.

One denoising pass gives every position the law it has without knowing its neighbours, so two plausible continuations
mix into implausible pairs. This head adds what the previous token says: ``bias(v | u, h) = out_v . (in_u * gate(h))``
with ``rank`` numbers per token. The gate lets the state of the position choose which of them matter. Cost per parent
token: one ``rank x draft_vocab`` product, so token trees can ask for the children of many parents at once.

Starts as exactly no bias (``out`` is zero). Knows neither windows nor trees.

Source: the Markov head of DSpark; the gate is ours.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """``rank`` numbers for each draft-vocabulary token, and one more row for every token outside it."""

    def __init__(self, rank: int, hidden_size: int, draft_vocab: int) -> None:
        super().__init__()
        self.token_in = nn.Parameter(torch.empty(draft_vocab + 1, rank))
        self.token_out = nn.Parameter(torch.zeros(draft_vocab, rank))
        self.gate_weight = nn.Parameter(torch.zeros(rank, hidden_size))
        self.gate_bias = nn.Parameter(torch.ones(rank))
        generator = torch.Generator().manual_seed(0)  # leaves the global generator untouched
        with torch.no_grad():
            self.token_in.normal_(std=0.1, generator=generator)

    def gate(self, states: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape rank"]:
        return nn.functional.linear(states, self.gate_weight.to(states.dtype), self.gate_bias.to(states.dtype))

    def forward(
        self, gate: Float[Tensor, "*shape rank"], previous: Int[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape draft_vocab"]:
        """float32 bias (float64 for float64 states); ``previous`` are draft-vocabulary indices, -1 outside it."""
        bias = nn.functional.linear(self.inputs(gate, previous).to(gate.dtype), self.token_out.to(gate.dtype))
        return bias if bias.dtype == torch.float64 else bias.float()

    def inputs(
        self, gate: Float[Tensor, "*shape rank"], previous: Int[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape rank"]:
        """What the previous token says, gated; float32 or wider. Its product with ``token_out`` is the bias."""
        row = torch.where(previous < 0, self.token_out.shape[0], previous)
        gated = self.token_in[row].to(gate.dtype) * gate
        return gated if gated.dtype == torch.float64 else gated.float()
