"""One packed training pass of a drafter that computes its own prefix: rollouts with their windows behind them.

Where everything goes is ``functional.window_masks.window_layout``; ``models.block_drafter_session`` computes the same
function one window at a time with a cache. It knows no losses and no heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.window_masks import WindowLayout, window_layout
from specdiff2.models.layer_stack import run_stack
from specdiff2.types import WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.window_drafter import WindowDrafter


def layout_of(drafter: WindowDrafter, batch: WindowBatch) -> WindowLayout:
    """Where everything goes in the packed batch; the window length is that of ``batch.targets``."""
    return window_layout(
        batch.lengths,
        batch.window_row,
        batch.anchor,
        batch.targets.shape[1],
        attention=drafter.config.attention,
        shifted=drafter.config.shifted,
        whole_window=drafter.whole_window,
    )


def packed_states(
    drafter: WindowDrafter, batch: WindowBatch, layout: WindowLayout, read_index: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape hidden"]:
    """Normalised outputs of the columns ``read_index`` (flat: packed row * columns + column), in its shape."""
    mask = additive_mask(layout.allowed, drafter.compute_dtype).expand(-1, -1, layout.position_ids.shape[1], -1)
    embeddings = packed_embeddings(drafter, batch, layout)
    return run_stack(drafter.stack, embeddings, mask, layout.position_ids, read_index)


def packed_embeddings(
    drafter: WindowDrafter, batch: WindowBatch, layout: WindowLayout
) -> Float[Tensor, "row column hidden"]:
    """Token embeddings, then per slot the mask embedding or, where revealed, the teacher's token."""
    num_rows, num_columns = layout.position_ids.shape
    num_slots = layout.slot_index.shape[1]
    device = batch.input_ids.device
    inside = torch.arange(layout.num_tokens, device=device) < batch.lengths[:, None]
    ids = batch.input_ids.new_zeros((num_rows, num_columns))
    # padding ids may be anything (-100 too), so they are not looked up
    ids[:, : layout.num_tokens] = torch.where(inside, batch.input_ids[:, : layout.num_tokens], 0)[layout.source_row]
    masked = torch.zeros((num_rows, num_columns), dtype=torch.bool, device=device)
    masked[:, layout.num_tokens :] = True
    revealed = (batch.revealed & batch.valid)[:, :num_slots]
    slots = layout.slot_index[revealed]
    ids.view(-1)[slots] = batch.targets[:, :num_slots][revealed]
    masked.view(-1)[slots] = False
    assert drafter.mask_embedding is not None  # not conditioned
    return torch.where(masked[..., None], drafter.mask_embedding, drafter.embeddings.embed(ids, drafter.dtype))
