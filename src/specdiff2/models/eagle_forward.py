"""The training pass of an EAGLE head: the rollouts once on true features, then every window unrolled step by step.

Pass 1 runs the steps of all tokens on the verifier's own hidden states and reads the anchors' outputs: position 1 of
every window. Pass j > 1 runs one step per window, on the teacher's token and on the hidden state that the window has
just predicted; it sees the true steps up to its anchor and the window's own steps. That is what
``models.eagle_session`` computes along one path of a tree.

The step of the first token would need a hidden state before it: it reads zeros, and only windows anchored there see
it (published heads begin with the second token).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.functional.window_masks import rank_in_row
from specdiff2.models.layer_stack import run_stack
from specdiff2.types import WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.eagle_drafter import EagleDrafter


def unrolled_states(drafter: EagleDrafter, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]:
    """Outputs of gamma steps of at least one window; the gradient flows through all of them."""
    gamma, row = batch.targets.shape[1], batch.window_row
    num_tokens = int(batch.anchor.max()) + 1
    tokens, features = batch.input_ids[:, :num_tokens], drafter.true_features(batch)
    num_rows = tokens.shape[0]
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, : num_tokens - 1]], dim=1)
    positions = torch.arange(num_tokens, device=tokens.device).expand(num_rows, -1)
    cache = DynamicCache()
    mask = additive_mask(sees_tokens(positions, num_tokens)[:, None], drafter.compute_dtype)
    read_index = row * num_tokens + batch.anchor
    states = [run_stack(drafter.stack, drafter.head_input(tokens, before), mask, positions, read_index, cache)]

    rank = rank_in_row(row)
    num_ranks = int(rank.max()) + 1
    anchors = batch.anchor.new_zeros((num_rows, num_ranks)).index_put((row, rank), batch.anchor)
    prefix = sees_tokens(anchors, num_tokens)
    own = torch.eye(num_ranks, dtype=torch.bool, device=tokens.device).expand(num_rows, -1, -1)
    previous, slot = previous_tokens(batch), row * num_ranks + rank
    for step in range(1, gamma):
        inputs = drafter.head_input(previous[:, step], states[-1])
        packed = inputs.new_zeros((num_rows * num_ranks, inputs.shape[-1])).index_put((slot,), inputs)
        packed = packed.unflatten(0, (num_rows, num_ranks))
        mask = additive_mask(torch.cat([prefix, *[own] * step], dim=-1)[:, None], drafter.compute_dtype)
        states.append(run_stack(drafter.stack, packed, mask, anchors + step, slot, cache))
    return torch.stack(states, dim=1)


def sees_tokens(last: Int[Tensor, "row query"], num_tokens: int) -> Bool[Tensor, "row query token"]:
    """The steps that a query sees whose last known token is ``last``: those of the tokens 1 .. last, or of token 0."""
    token = torch.arange(num_tokens, device=last.device)
    return (token <= last[..., None]) & ((token > 0) | (last == 0)[..., None])
