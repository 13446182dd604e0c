"""Packed layouts against a naive reference that loops over every window and position."""

from __future__ import annotations

import pytest
import torch

from specdiff2.functional.window_masks import (
    context_layout,
    decode_mask,
    packed_window_mask,
    rank_in_row,
    window_layout,
)
from specdiff2.types import ConfigError

LENGTHS = torch.tensor([9, 6])
WINDOW_ROW = torch.tensor([0, 1, 0, 1, 0])
ANCHOR = torch.tensor([3, 0, 7, 5, 3])
NONE = torch.zeros(0, dtype=torch.long)


def naive_causal_mask(num_tokens: int, anchors: list[int], num_slots: int) -> list[list[bool]]:
    """One packed row: every query against every key, from the definition."""
    columns = [(t, None) for t in range(num_tokens)]
    columns += [(a + 1 + j, w) for w, a in enumerate(anchors) for j in range(num_slots)]

    def allowed(query: tuple[int, int | None], key: tuple[int, int | None]) -> bool:
        (q_pos, q_win), (k_pos, k_win) = query, key
        if k_win is not None:
            return q_win == k_win
        return k_pos <= (q_pos if q_win is None else anchors[q_win])

    return [[allowed(q, k) for k in columns] for q in columns]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("gamma", [1, 3])
def test_causal_layout_equals_naive(gamma: int, shifted: bool) -> None:
    layout = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, gamma, shifted=shifted)
    num_slots = gamma - shifted
    assert layout.num_tokens == 8
    anchors = {0: [3, 7, 3], 1: [0, 5, -1]}  # row 1 has a place without a window
    for row, row_anchors in anchors.items():
        expected = torch.tensor(naive_causal_mask(8, row_anchors, num_slots))
        assert torch.equal(layout.allowed[row, 0], expected)
        positions = list(range(8)) + [max(a, 0) + 1 + j for a in row_anchors for j in range(num_slots)]
        assert layout.position_ids[row].tolist() == positions
    assert layout.allowed.any(-1).all(), "an empty softmax row would be NaN"


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("attention", ["causal_prefix", "bidirectional"])
def test_slots_and_reads_stand_at_their_positions(attention: str, shifted: bool) -> None:
    gamma = 3
    layout = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, gamma, attention=attention, shifted=shifted)
    positions = layout.position_ids.flatten()
    rows = torch.arange(layout.position_ids.numel()) // layout.position_ids.shape[1]
    first_slot, first_read = ANCHOR + 1, ANCHOR + (0 if shifted else 1)
    assert torch.equal(positions[layout.slot_index], first_slot[:, None] + torch.arange(gamma - shifted))
    assert torch.equal(positions[layout.read_index], first_read[:, None] + torch.arange(gamma))
    assert torch.equal(layout.source_row[rows[layout.read_index]], WINDOW_ROW[:, None].expand(-1, gamma))
    assert layout.slot_index.unique().numel() == layout.slot_index.numel(), "no two slots share a column"


@pytest.mark.parametrize("attention", ["causal_prefix", "bidirectional"])
def test_a_whole_window_has_its_last_slot_and_reads_as_before(attention: str) -> None:
    gamma = 3
    whole = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, gamma, attention=attention, shifted=True, whole_window=True)
    positions = whole.position_ids.flatten()
    assert torch.equal(positions[whole.slot_index], ANCHOR[:, None] + 1 + torch.arange(gamma))
    assert torch.equal(positions[whole.read_index], ANCHOR[:, None] + torch.arange(gamma))
    assert torch.equal(whole.read_index[:, 1:], whole.slot_index[:, :-1]), "the last slot is seen, not read"
    unshifted = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, gamma, attention=attention)
    assert torch.equal(whole.allowed, unshifted.allowed) and torch.equal(whole.position_ids, unshifted.position_ids)
    same = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, gamma, attention=attention, whole_window=True)
    assert torch.equal(same.read_index, unshifted.read_index), "without a shift every window is whole"


def test_bidirectional_mask_shows_prefix_and_window_only() -> None:
    layout = window_layout(LENGTHS, WINDOW_ROW, ANCHOR, 2, attention="bidirectional")
    for window, anchor in enumerate(ANCHOR.tolist()):
        expected = [t <= anchor for t in range(8)] + [True, True]
        assert layout.allowed[window, 0, 0].tolist() == expected


# ---------------------------------------------------------------- windows behind given keys
def naive_context_mask(num_tokens: int, anchors: list[int], gamma: int) -> list[list[bool]]:
    """One packed row: every column of every window against the given keys, then against all columns."""
    columns = [(anchor, window) for window, anchor in enumerate(anchors) for _ in range(gamma)]
    return [
        [token < anchor for token in range(num_tokens)] + [window == other for _, other in columns]
        for anchor, window in columns
    ]


@pytest.mark.parametrize("gamma", [1, 3])
def test_context_layout_equals_naive(gamma: int) -> None:
    layout = context_layout(WINDOW_ROW, ANCHOR, gamma, num_rows=2, num_tokens=9)
    assert layout.num_tokens == 9 and layout.source_row.tolist() == [0, 1]
    anchors = {0: [3, 7, 3], 1: [0, 5, -1]}  # row 1 has a place without a window; anchor 0 sees its own window only
    for row, row_anchors in anchors.items():
        assert layout.allowed[row, 0].tolist() == naive_context_mask(9, row_anchors, gamma)
        assert layout.position_ids[row].tolist() == [max(a, 0) + j for a in row_anchors for j in range(gamma)]
    assert layout.allowed.any(-1).all(), "an empty softmax row would be NaN"


def test_context_windows_are_read_where_they_stand() -> None:
    gamma = 3
    layout = context_layout(WINDOW_ROW, ANCHOR, gamma, num_rows=2, num_tokens=9)
    assert torch.equal(layout.read_index, layout.slot_index), "every column predicts the token after it"
    positions, num_columns = layout.position_ids.flatten(), layout.position_ids.shape[1]
    assert torch.equal(positions[layout.read_index], ANCHOR[:, None] + torch.arange(gamma))
    assert torch.equal(layout.read_index // num_columns, WINDOW_ROW[:, None].expand(-1, gamma))
    assert layout.read_index.unique().numel() == layout.read_index.numel(), "no two windows share a column"


def test_a_row_without_windows_keeps_its_place() -> None:
    layout = context_layout(torch.tensor([2, 2]), torch.tensor([1, 4]), 2, num_rows=3, num_tokens=5)
    assert layout.position_ids.shape == (3, 4) and layout.allowed.shape == (3, 1, 4, 9)
    assert layout.read_index.tolist() == [[8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"gamma": 0}, "gamma=0"),
        ({"anchor": torch.tensor([3, 0, 7, 9, 3])}, "anchor=9 of window 3"),
        ({"anchor": torch.tensor([3, 0, 7, 5, -1])}, "anchor=-1 of window 4"),
        ({"window_row": NONE, "anchor": NONE}, "0 windows"),
    ],
)
def test_bad_context_windows_are_refused(changes: dict, names: str) -> None:
    values = {"window_row": WINDOW_ROW, "anchor": ANCHOR, "gamma": 2, "num_rows": 2, "num_tokens": 9, **changes}
    with pytest.raises(ConfigError, match=names):
        context_layout(**values)


def test_rank_in_row() -> None:
    assert rank_in_row(torch.tensor([0, 0, 1, 0, 3, 1])).tolist() == [0, 1, 0, 2, 0, 1]


@pytest.mark.parametrize(("num_new", "num_slots"), [(0, 3), (1, 3), (4, 2), (3, 0)])
def test_decode_mask_is_the_tail_of_the_packed_mask(num_new: int, num_slots: int) -> None:
    num_tokens = 6
    full = packed_window_mask(torch.tensor([[num_tokens - 1]]), num_tokens, num_slots, "causal_prefix")
    num_cached = num_tokens - num_new
    assert torch.equal(decode_mask(num_cached, num_new, num_slots), full[:, :, num_cached:])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"attention": "causal"}, "attention='causal'"),
        ({"gamma": 0}, "gamma=0"),
        ({"anchor": torch.tensor([3, 6, 7, 5, 3])}, "anchor=6 of window 1"),
        ({"anchor": torch.tensor([3, 0, -1, 5, 3])}, "anchor=-1 of window 2"),
    ],
)
def test_bad_input_is_refused(changes: dict, names: str) -> None:
    values = {"lengths": LENGTHS, "window_row": WINDOW_ROW, "anchor": ANCHOR, "gamma": 2, **changes}
    with pytest.raises(ConfigError, match=names):
        window_layout(**values)


def test_no_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 windows"):
        window_layout(LENGTHS, NONE, NONE, 2)
