"""The forward passes of decoding with fixed shapes: what ``models.compiled`` compiles.

Both passes write their keys and values into a preallocated cache at the slots behind the committed tokens and attend
to the whole cache under a mask, so that no shape depends on how much is committed. All numbers that change from round
to round come in as one small integer tensor. The layers are walked here (``run_layers``) because transformers' own
forward makes masks and caches in Python; the modules inside a layer are its own. ``test_compiled`` holds both to the
eager passes.

They know no buckets and nothing of compilation: called directly they compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from specdiff2.functional.attention_masks import ancestor_mask, static_tree_mask, static_window_mask
from specdiff2.models.layer_stack import PLAIN_TYPES, Stack
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter
    from specdiff2.models.verifier import HFVerifier

FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # the others change with the length, on the host


def check_compilable(config: PreTrainedConfig) -> None:
    """Raises ConfigError for a model whose layers are not known to be plain, or whose positions need the host."""
    if config.model_type not in PLAIN_TYPES:
        raise ConfigError(
            f"runtime.compile=true with a {config.model_type!r} model: expected one of "
            f"{', '.join(sorted(PLAIN_TYPES))}, whose layers are known; set runtime.compile=false"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPE:
        raise ConfigError(
            f"runtime.compile=true with rope_type={rope!r}: expected one of {', '.join(sorted(FIXED_ROPE))}; "
            "its positions depend on the text length; set runtime.compile=false"
        )


def run_layers(
    stack: Stack,
    hidden: Float[Tensor, "1 column hidden"],
    positions: Int[Tensor, " column"],
    mask: Float[Tensor, "column capacity"],
    slots: Int[Tensor, " column"],
    keys: Sequence[Float[Tensor, "1 head capacity head_dim"]],
    values: Sequence[Float[Tensor, "1 head capacity head_dim"]],
) -> list[Float[Tensor, "1 column hidden"]]:
    """Hidden states as transformers numbers them: the input of each layer, then the normalised output of the last.

    Keys and values of the columns are written at ``slots`` first; ``mask`` (additive) covers the whole cache.
    """
    cos, sin = stack.rotary_emb(hidden, positions[None])
    groups = stack.layers[0].self_attn.num_key_value_groups
    # the query heads of one key head go side by side as more columns: no repeated keys, each key is read once
    grouped_mask = mask[None, None].repeat(1, 1, groups, 1)
    states = []
    for layer, layer_keys, layer_values in zip(stack.layers, keys, values, strict=True):
        states.append(hidden)
        attention: Any = layer.self_attn
        normed = layer.input_layernorm(hidden)
        queries, new_keys, new_values = _heads(attention, normed, cos[:, None], sin[:, None])
        layer_keys.index_copy_(2, slots, new_keys)
        layer_values.index_copy_(2, slots, new_values)
        batch, num_heads, num_columns, head_dim = queries.shape
        queries = queries.reshape(batch, num_heads // groups, groups * num_columns, head_dim)
        mixed = F.scaled_dot_product_attention(
            queries, layer_keys, layer_values, attn_mask=grouped_mask, scale=attention.scaling
        )
        mixed = mixed.reshape(batch, num_heads, num_columns, head_dim).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return [*states, stack.norm(hidden)]


def _heads(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, rotated keys and values of the columns, ``[1, head, column, head_dim]``."""
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    queries, keys = attention.q_proj(normed).view(shape), attention.k_proj(normed).view(shape)
    if hasattr(attention, "q_norm"):  # qwen3
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    values = attention.v_proj(normed).view(shape).transpose(1, 2)
    return _rotate(queries.transpose(1, 2), cos, sin), _rotate(keys.transpose(1, 2), cos, sin), values


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves of head_dim paired up."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class VerifyPass(nn.Module):
    """Score a token tree; ``numbers`` are the tokens, the parents (root: -1) and the number of cached tokens.

    Nodes that only fill the shape up are children of the root: no real node sees them, and their rows mean nothing.
    """

    def __init__(self, verifier: HFVerifier, num_nodes: int, output_features: bool) -> None:
        super().__init__()
        self.model: Any = verifier.model
        self.base: Any = verifier.model.base_model
        self.vocab_size = verifier.vocab_size
        self.num_nodes = num_nodes
        self.output_features = output_features

    def forward(
        self, numbers: Int[Tensor, " 2*node+1"], keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Float[Tensor, "node vocab"], tuple[Float[Tensor, "1 node hidden"], ...]]:
        """Logits of real tokens, and the hidden states by layer (none without ``output_features``)."""
        (tokens, parents), num_cached = numbers[:-1].view(2, self.num_nodes), numbers[-1]
        visible = ancestor_mask(parents)
        hidden = self.base.embed_tokens(tokens[None])
        mask = static_tree_mask(visible, num_cached, keys[0].shape[2], hidden.dtype)
        slots = num_cached + torch.arange(self.num_nodes, device=numbers.device)
        positions = num_cached + visible.sum(-1) - 1  # prefix + depth
        states = run_layers(self.base, hidden, positions, mask, slots, keys, values)
        logits = self.model.lm_head(states[-1])[0, :, : self.vocab_size]
        return logits, tuple(states) if self.output_features else ()


class DraftPass(nn.Module):
    """One window of a conditioned drafter, from its inputs to its logits.

    ``numbers`` are the last committed token, the columns in use (at most gamma) and the number of cached tokens. The
    columns beyond are hidden from the others, so that a shorter window has the law that it was trained with.
    """

    def __init__(self, drafter: BlockDrafter, verifier: HFVerifier) -> None:
        super().__init__()
        self.stack = drafter.stack
        self.context_input = drafter.context_input
        self.embedding: Any = verifier.model.get_input_embeddings()
        self.gamma = drafter.gamma
        weight, bias = drafter.embeddings.rows(drafter.dtype, drafter.device)
        # parameters, not plain tensors: only those are packed when the graph is frozen
        self.head_weight = nn.Parameter(weight, requires_grad=False)
        self.head_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(
        self,
        numbers: Int[Tensor, " 3"],
        features: Float[Tensor, " feature_width"],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Float[Tensor, "gamma hidden"], Float[Tensor, "gamma draft_vocab"]]:
        """Normalised states of all columns and their float32 logits (float64 for float64 states)."""
        assert self.context_input is not None  # conditioned
        num_columns, num_cached = numbers[1], numbers[2]
        # one row, not a vector: inductor (torch 2.13) fails on a packed product of a vector
        embedding = self.embedding(numbers[:1]).to(features.dtype)
        inputs = self.context_input(self.context_input.fuse(embedding, features[None]), self.gamma)
        mask = static_window_mask(num_columns, num_cached, keys[0].shape[2], inputs.dtype)
        slots = num_cached + torch.arange(self.gamma, device=numbers.device)
        states = run_layers(self.stack, inputs, slots, mask.expand(self.gamma, -1), slots, keys, values)[-1][0]
        logits = F.linear(states, self.head_weight, self.head_bias)
        return states, logits if logits.dtype == torch.float64 else logits.float()
