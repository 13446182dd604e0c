"""One packed training pass of a conditioned drafter: windows alone, behind the verifier's own keys and values.

What a row of the pass holds is ``functional.window_masks.context_layout``; what stands in a window is
``models.context_input``. ``models.context_drafter_session`` computes the same function one window at a time. It knows
no losses and no heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.window_masks import context_layout
from specdiff2.models.layer_stack import run_stack
from specdiff2.models.verifier_context import VerifierContext
from specdiff2.types import WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter


def context_states(drafter: BlockDrafter, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]:
    """Normalised outputs of every column of at least one window, for a drafter that has a context."""
    assert drafter.context is not None  # conditioned
    context = drafter.context.read(batch)
    inputs = _window_inputs(drafter, batch, context)
    num_rows, num_tokens = context.packed.shape[:2]
    layout = context_layout(batch.window_row, batch.anchor, batch.targets.shape[1], num_rows, num_tokens)
    num_columns = layout.position_ids.shape[1]
    packed = inputs.new_zeros((num_rows * num_columns, inputs.shape[-1]))
    packed = packed.index_put((layout.slot_index,), inputs).view(num_rows, num_columns, -1)
    mask = additive_mask(layout.allowed, drafter.compute_dtype)
    return run_stack(drafter.stack, packed, mask, layout.position_ids, layout.read_index, context.cache())


def _window_inputs(
    drafter: BlockDrafter, batch: WindowBatch, context: VerifierContext
) -> Float[Tensor, "window gamma hidden"]:
    """The anchor's column and ``gamma - 1`` slots; where revealed, slot j + 1 shows the token at drafted position j."""
    make = drafter.context_input
    assert make is not None  # conditioned
    gamma = batch.targets.shape[1]
    features = context.features()[batch.window_row, (batch.anchor - 1).clamp(min=0)]
    features = features.masked_fill((batch.anchor == 0)[:, None], 0.0)  # no token before the first one
    embedding = drafter.embeddings.embed(batch.input_ids[batch.window_row, batch.anchor], drafter.dtype)
    inputs = make(make.fuse(embedding, features), gamma)
    revealed = (batch.revealed & batch.valid)[:, : gamma - 1]
    if not bool(revealed.any()):
        return inputs
    shown = drafter.embeddings.embed(torch.where(revealed, batch.targets[:, : gamma - 1], 0), drafter.dtype)
    fused = make.fuse(shown, features[:, None].expand(-1, gamma - 1, -1))
    slots = torch.where(revealed[..., None], make.anchor(fused), inputs[:, 1:])
    return torch.cat([inputs[:, :1], slots], dim=1)
