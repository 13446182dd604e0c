"""Additive attention masks of passes over rows of different lengths that all write behind the longest one.

Row r has ``lengths[r]`` cached tokens at its first slots; the pass writes its columns at slots ``start ..`` of every
row. The slots between are a gap that no column may see. Columns that only fill a row up see themselves at least, or
what the row's real columns see, so that they stay finite; nobody sees or reads them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import additive_mask, ancestor_mask


def ragged_tree_mask(
    parents: Int[Tensor, "row node"], lengths: Int[Tensor, " row"], start: int, dtype: torch.dtype
) -> Float[Tensor, "row 1 node key"]:
    """Trees of all rows: a node sees its row's cached tokens, its ancestors and itself; ``key = start + node``.

    ``parents`` as in ``ancestor_mask``; a node that fills up a row is its own parent.
    """
    prefix = _prefix(lengths, start)[:, None].expand(-1, parents.shape[1], -1)
    return additive_mask(torch.cat([prefix, torch.vmap(ancestor_mask)(parents)], dim=-1), dtype)[:, None]


def ragged_window_mask(
    lengths: Int[Tensor, " row"], gammas: Int[Tensor, " row"], start: int, width: int, dtype: torch.dtype
) -> Float[Tensor, "row 1 1 key"]:
    """Windows of ``gammas`` columns that all see the prefix and each other; ``key = start + width``, one row for all
    columns. A row without a window sees column 0 anyway."""
    window = _prefix(gammas.clamp(min=1), width)
    return additive_mask(torch.cat([_prefix(lengths, start), window], dim=-1), dtype)[:, None, None]


def ragged_decode_mask(
    lengths: Int[Tensor, " row"],
    num_new: Int[Tensor, " row"],
    num_slots: Int[Tensor, " row"],
    start: int,
    new_width: int,
    slot_width: int,
    dtype: torch.dtype,
) -> Float[Tensor, "row 1 query key"]:
    """``window_masks.decode_mask`` of every row: ``new_width`` columns for new tokens, then ``slot_width`` for slots.

    New token i sees the cache and the row's new tokens up to itself; a slot sees the cache, all new tokens and all
    slots of its row. ``query = new_width + slot_width``, ``key = start + query``.
    """
    num_rows, width = lengths.shape[0], new_width + slot_width
    is_new, is_slot = _prefix(num_new, new_width), _prefix(num_slots, slot_width)
    allowed = torch.zeros((num_rows, width, width), dtype=torch.bool, device=lengths.device)
    allowed[:, :new_width, :new_width] = is_new[:, None] & torch.ones_like(allowed[0, :new_width, :new_width]).tril()
    allowed[:, new_width:, :new_width] = is_new[:, None]
    allowed[:, new_width:, new_width:] = is_slot[:, None]
    allowed |= torch.eye(width, dtype=torch.bool, device=lengths.device)  # columns that fill up stay finite
    prefix = _prefix(lengths, start)[:, None].expand(-1, width, -1)
    return additive_mask(torch.cat([prefix, allowed], dim=-1), dtype)[:, None]


def _prefix(counts: Int[Tensor, " row"], width: int) -> Bool[Tensor, "row width"]:
    """Row r is True in its first ``counts[r]`` columns."""
    return torch.arange(width, device=counts.device)[None] < counts[:, None]
