"""Where everything goes when draft windows are packed behind their rollout: columns, positions, attention.

A packed row is ``[tokens 0 .. num_tokens-1 | mask slots]``. Two attention modes, the ones the drafter decodes with:

* ``causal_prefix``: one packed row per rollout, with all of its windows behind it. Tokens see earlier tokens and
  themselves; a slot sees the tokens up to its window's anchor and every slot of its own window. No token sees a
  slot, which is why a decoder can keep the keys and values of its tokens.
* ``bidirectional``: one packed row per window. Everything up to the anchor and the whole window see each other, so
  the encoding of the prefix depends on the anchor and windows cannot share it: exact, and slower by about the
  number of windows per rollout.

Window layouts: not shifted, slot j stands at position anchor+1+j and its output predicts that position; shifted, the
output at position t predicts t+1, so the rows read are the anchor and ``gamma - 1`` slots. With ``whole_window`` a
shifted window has its last slot as well: nobody reads its output, but the other slots see it.

Pure index arithmetic, vectorised over windows and positions; knows no model. The only attention values here are
booleans: ``functional.attention_masks.additive_mask`` turns them into numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdiff2.types import ConfigError

ATTENTION_MODES = ("causal_prefix", "bidirectional")


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Index tensors of one packed batch; ``column = num_tokens + num_slot_columns`` columns per packed row.

    Attributes:
        num_tokens: token columns: the largest anchor + 1, as no window sees further.
        source_row: rollout that each packed row carries.
        position_ids: position of each column in its rollout.
        slot_index: flat index (packed row * columns + column) of each window's slots; slot j is the place of
            ``targets[:, j]``. ``num_slots(gamma, ...)`` of them.
        read_index: flat index of the column whose output predicts each drafted position.
        allowed: which columns (last axis) each column may attend to; ``query`` is 1 where all are alike.
    """

    num_tokens: int
    source_row: Int[Tensor, " row"]
    position_ids: Int[Tensor, "row column"]
    slot_index: Int[Tensor, "window slot"]
    read_index: Int[Tensor, "window gamma"]
    allowed: Bool[Tensor, "row 1 query column"]


def window_layout(
    lengths: Int[Tensor, " batch"],
    window_row: Int[Tensor, " window"],
    anchor: Int[Tensor, " window"],
    gamma: int,
    *,
    attention: str = "causal_prefix",
    shifted: bool = False,
    whole_window: bool = False,
) -> WindowLayout:
    """Lay out at least one window; see the module docstring.

    Raises:
        ConfigError: unknown attention mode, gamma < 1, no window, or an anchor outside its rollout.
    """
    _check(lengths, window_row, anchor, gamma, attention)
    slots = num_slots(gamma, shifted, whole_window)
    num_tokens = int(anchor.max()) + 1
    if attention == "causal_prefix":
        packed_row, rank = window_row, rank_in_row(window_row)
        source_row = torch.arange(lengths.shape[0], device=anchor.device)
        num_ranks = int(rank.max()) + 1
    else:
        packed_row, rank = torch.arange(anchor.shape[0], device=anchor.device), torch.zeros_like(anchor)
        source_row, num_ranks = window_row, 1
    num_rows, num_columns = source_row.shape[0], num_tokens + num_ranks * slots

    # anchors by (packed row, rank); -1 marks places without a window
    anchors = anchor.new_full((num_rows, num_ranks), -1)
    anchors[packed_row, rank] = anchor
    step = torch.arange(slots, device=anchor.device)
    slot_positions = (anchors.clamp(min=0)[..., None] + 1 + step).flatten(1)
    token_positions = torch.arange(num_tokens, device=anchor.device).expand(num_rows, -1)
    slot_index = (packed_row * num_columns + num_tokens + rank * slots)[:, None] + step
    anchor_index = (packed_row * num_columns + anchor)[:, None]
    return WindowLayout(
        num_tokens=num_tokens,
        source_row=source_row,
        position_ids=torch.cat([token_positions, slot_positions], dim=1),
        slot_index=slot_index,
        read_index=torch.cat([anchor_index, slot_index[:, : gamma - 1]], dim=1) if shifted else slot_index,
        allowed=packed_window_mask(anchors, num_tokens, slots, attention),
    )


def num_slots(gamma: int, shifted: bool, whole_window: bool = False) -> int:
    """Masked inputs of a window of ``gamma`` drafted positions."""
    return gamma - 1 if shifted and not whole_window else gamma


def context_layout(
    window_row: Int[Tensor, " window"], anchor: Int[Tensor, " window"], gamma: int, num_rows: int, num_tokens: int
) -> WindowLayout:
    """Windows alone, behind prefix keys that are given (``num_tokens`` per row) and not computed.

    A window has ``gamma`` columns, the anchor first: column j stands at position anchor + j and predicts the token
    after it. Every column of a window sees the given keys *before* its anchor and its own window. ``source_row`` is
    the identity; ``allowed`` has ``num_tokens + column`` keys.

    Raises:
        ConfigError: no window, gamma < 1, or an anchor outside the given keys.
    """
    _check(torch.full((num_rows,), num_tokens, device=anchor.device), window_row, anchor, gamma, "causal_prefix")
    rank = rank_in_row(window_row)
    num_ranks = int(rank.max()) + 1
    anchors = anchor.new_full((num_rows, num_ranks), -1)
    anchors[window_row, rank] = anchor
    step = torch.arange(gamma, device=anchor.device)
    column = torch.arange(num_ranks, device=anchor.device).repeat_interleave(gamma)
    token = torch.arange(num_tokens, device=anchor.device)
    before = token < anchors.repeat_interleave(gamma, dim=1)[..., None]
    same = (column[:, None] == column).expand(num_rows, -1, -1)
    index = (window_row * (num_ranks * gamma) + rank * gamma)[:, None] + step
    return WindowLayout(
        num_tokens=num_tokens,
        source_row=torch.arange(num_rows, device=anchor.device),
        position_ids=(anchors.clamp(min=0)[..., None] + step).flatten(1),
        slot_index=index,
        read_index=index,
        allowed=torch.cat([before, same], dim=-1)[:, None],
    )


def prefix_rows(
    layout: WindowLayout,
    lengths: Int[Tensor, " batch"],
    completion_start: Int[Tensor, " batch"],
    last_anchor: Int[Tensor, " batch"],
) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"], Int[Tensor, " token"]]:
    """Token columns of a causal-prefix batch whose successor was sampled by the verifier: (flat index, row, column).

    Up to each row's own last anchor (-1: it has no window), though longer rows beside it have more columns: what a row
    is trained on must not depend on the rows of its batch. A shifted drafter predicts the next token at each of them,
    exactly as it does at an anchor.
    """
    column = torch.arange(layout.num_tokens, device=lengths.device)
    known = (column + 1 >= completion_start[:, None]) & (column + 1 < lengths[:, None])
    known &= column <= last_anchor[:, None]
    row, column = known.nonzero(as_tuple=True)
    return row * layout.position_ids.shape[1] + column, row, column


def packed_window_mask(
    anchors: Int[Tensor, "row rank"], num_tokens: int, num_slots: int, attention: str
) -> Bool[Tensor, "row 1 query column"]:
    """Which columns may be seen, for windows with the given anchors (-1: no window) behind each packed row.

    Every query sees at least one column (unused slots see their own group), so no softmax row is empty. Tokens
    behind ``lengths`` need no mask: they come after every anchor and after every token that matters.
    """
    num_rows, num_ranks = anchors.shape
    token = torch.arange(num_tokens, device=anchors.device)
    if attention == "bidirectional":
        slots = torch.ones((num_rows, num_slots), dtype=torch.bool, device=anchors.device)
        return torch.cat([token <= anchors, slots], dim=1)[:, None, None, :]
    # the last token each query may see: itself for tokens, the anchor for slots
    reach = torch.cat([token.expand(num_rows, -1), anchors.repeat_interleave(num_slots, dim=1)], dim=1)
    sees_token = token <= reach[..., None]
    # windows are numbered within their row; tokens belong to none (-1) and see no slot
    rank = torch.arange(num_ranks, device=anchors.device).repeat_interleave(num_slots)
    window_of = torch.cat([rank.new_full((num_tokens,), -1), rank])
    sees_slot = (window_of[:, None] == rank).expand(num_rows, -1, -1)
    return torch.cat([sees_token, sees_slot], dim=-1)[:, None]


def rank_in_row(window_row: Int[Tensor, " window"]) -> Int[Tensor, " window"]:
    """How many earlier windows of the list lie in the same row: ``[0, 0, 1, 0] -> [0, 1, 0, 2]``."""
    order = torch.argsort(window_row, stable=True)
    in_order = window_row[order]
    rank = torch.empty_like(window_row)
    # searchsorted finds where each row's group starts, so the distance from there is the rank
    rank[order] = torch.arange(len(in_order), device=in_order.device) - torch.searchsorted(in_order, in_order)
    return rank


def decode_mask(
    num_cached: int, num_new: int, num_slots: int, device: torch.device | None = None
) -> Bool[Tensor, "1 1 query column"]:
    """The causal-prefix mask of one decoding step: ``num_new`` tokens and one window behind a cached prefix.

    The same law as ``packed_window_mask`` restricted to the rows that are computed: token i sees the cache and the
    new tokens up to itself, a slot sees everything.
    """
    num_rows = num_new + num_slots
    allowed = torch.ones((num_rows, num_cached + num_rows), dtype=torch.bool, device=device)
    if num_new:
        allowed[:num_new, num_cached:].tril_()
    return allowed[None, None]


def _check(lengths: Tensor, window_row: Tensor, anchor: Tensor, gamma: int, attention: str) -> None:
    if attention not in ATTENTION_MODES:
        raise ConfigError(f"attention={attention!r}: expected one of {', '.join(ATTENTION_MODES)}")
    if gamma < 1:
        raise ConfigError(f"gamma={gamma!r}: expected an integer >= 1")
    if anchor.numel() == 0:
        raise ConfigError("0 windows: expected at least one; drop batches without a window beforehand")
    last = lengths[window_row] - 1
    if bool(((anchor < 0) | (anchor > last)).any()):
        bad = int(((anchor < 0) | (anchor > last)).nonzero()[0])
        raise ConfigError(
            f"anchor={int(anchor[bad])} of window {bad}: expected 0..{int(last[bad])}, an index of a token of "
            f"rollout row {int(window_row[bad])}"
        )
