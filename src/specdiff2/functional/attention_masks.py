"""Additive attention masks of token trees and left-padded batches.

One convention everywhere: a 4D mask ``[batch, 1, query, key]`` that is *added* to the attention scores, 0 where a
query may look and the most negative finite number where it may not. (A boolean 4D mask is right under sdpa and
silently wrong under eager attention.) Finite, not -inf: a fully masked row must not become NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def additive_mask(allowed: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """0 where ``allowed``, ``finfo(dtype).min`` elsewhere; same shape and device."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def ancestor_mask(parents: Int[Tensor, " node"]) -> Bool[Tensor, "node node"]:
    """``mask[i, j]``: node i may attend to node j (j is i itself or one of its ancestors).

    Pointer doubling: each step adds the ancestors of the nodes reached so far, so log2(node) steps reach the root of
    any tree; no loop over nodes and no look at values, so that it runs on a GPU and inside a compiled graph.
    ``TokenTree.ancestor_mask`` says the same node by node.

    Args:
        parents: parent of each node, below the node itself; the root's may be anything below 1.
    """
    num_nodes = parents.shape[0]
    jump = parents.clamp(min=0)  # the root is its own parent
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
    for _ in range((num_nodes - 1).bit_length()):
        mask = mask | mask[jump]
        jump = jump[jump]
    return mask


def tree_attention_mask(
    parents: Int[Tensor, " node"], num_cached: int, dtype: torch.dtype
) -> Float[Tensor, "1 1 node key"]:
    """Mask of a tree behind ``num_cached`` cached tokens, ``key = num_cached + node``, on the device of ``parents``.

    Every node sees all cached tokens, its ancestors and itself.
    """
    num_nodes = parents.shape[0]
    mask = torch.zeros((1, 1, num_nodes, num_cached + num_nodes), dtype=dtype, device=parents.device)
    mask[0, 0, :, num_cached:].masked_fill_(~ancestor_mask(parents), torch.finfo(dtype).min)
    return mask


def static_tree_mask(
    visible: Bool[Tensor, "node node"], num_cached: Int[Tensor, ""], capacity: int, dtype: torch.dtype
) -> Float[Tensor, "node capacity"]:
    """The same mask over a whole cache of ``capacity`` slots: its shape does not depend on ``num_cached``.

    Args:
        visible: ``ancestor_mask``.
        num_cached: a tensor, so that nothing waits for its value.
    """
    num_nodes = visible.shape[0]
    node = torch.arange(capacity, device=visible.device) - num_cached  # which node a slot belongs to
    in_tree = (node >= 0) & (node < num_nodes)
    return additive_mask((node < 0) | (in_tree & visible[:, node.clamp(0, num_nodes - 1)]), dtype)


def static_window_mask(
    num_columns: Int[Tensor, ""], num_cached: Int[Tensor, ""], capacity: int, dtype: torch.dtype
) -> Float[Tensor, " capacity"]:
    """Mask of a window whose columns all see the prefix and each other, over a whole cache; one row for all columns."""
    column = torch.arange(capacity, device=num_cached.device) - num_cached
    return additive_mask(column < num_columns, dtype)


def left_padding_mask(
    padding: Int[Tensor, " batch"], length: int, dtype: torch.dtype
) -> Float[Tensor, "batch 1 1 length"]:
    """Row r hides its first ``padding[r]`` keys. One row of queries: for steps after the prefill."""
    allowed = torch.arange(length, device=padding.device)[None, :] >= padding[:, None]
    return additive_mask(allowed, dtype)[:, None, None, :]


def left_padded_causal_mask(
    padding: Int[Tensor, " batch"], length: int, dtype: torch.dtype
) -> Float[Tensor, "batch 1 length length"]:
    """Causal mask of a left-padded batch: query i of row r sees keys ``padding[r] .. i``.

    Padding queries see only themselves, so that their rows are finite; nothing ever reads them.
    """
    index = torch.arange(length, device=padding.device)
    causal = index[None, :] <= index[:, None]
    real = index[None, :] >= padding[:, None]
    allowed = (causal[None] & real[:, None, :]) | torch.eye(length, dtype=torch.bool, device=padding.device)
    return additive_mask(allowed, dtype)[:, None]
