"""Additive attention masks of token trees and left-padded batches.

One convention everywhere: a 4D mask ``[batch, 1, query, key]`` that is *added* to the attention scores, 0 where a
query may look and the most negative finite number where it may not. (A boolean 4D mask is right under sdpa and
silently wrong under eager attention.) Finite, not -inf: a fully masked row must not become NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.tree import TokenTree


def additive_mask(allowed: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """0 where ``allowed``, ``finfo(dtype).min`` elsewhere; same shape and device."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def tree_attention_mask(
    tree: TokenTree, num_cached: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Float[Tensor, "1 1 node key"]:
    """Mask of a tree behind ``num_cached`` cached tokens, ``key = num_cached + node``.

    Every node sees all cached tokens, its ancestors and itself.
    """
    num_nodes = tree.num_nodes
    mask = torch.zeros((1, 1, num_nodes, num_cached + num_nodes), dtype=dtype)
    # filled on the host, where the tree lives: one transfer instead of two
    mask[0, 0, :, num_cached:].masked_fill_(~tree.ancestor_mask(), torch.finfo(dtype).min)
    return mask.to(device)


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
