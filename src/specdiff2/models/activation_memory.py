"""Bytes that autograd keeps between the forward and the backward pass of decoder layers.

For layers of the Llama kind (Llama, Qwen2, Qwen3: RMSNorm, attention through scaled_dot_product_attention with an
additive mask, gated MLP), as transformers 5 writes them. Nothing is run: the counts below are those of the tensors
that each operation saves, and ``tests/unit/test_preflight.py`` holds them against the tensors that real layers save.
On a GPU dropout keeps one byte per number instead of one number, so adapters need a little less there. It knows no
windows, no optimizer and no devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdiff2.models.model_shapes import ModelShape, dtype_bytes

_FLOAT32 = 4.0
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """How the layers are run.

    Attributes:
        weights: dtype of the layers' weights, which is that of the residual stream too.
        compute: dtype of matrix products: another one than ``weights`` under autocast.
        lora: None where all weights train; else rank, dropout and targets of float32 adapters on frozen weights.
        gradient_checkpointing: keep only the input of each layer and compute it again in the backward pass.
    """

    weights: str
    compute: str
    lora: Mapping[str, Any] | None = None
    gradient_checkpointing: bool = False


def saved_per_token(shape: ModelShape, how: TrainingPass) -> tuple[float, float]:
    """Bytes that (attention, feed-forward) of one layer keep of one token until the backward pass, norms included."""
    weights, compute = dtype_bytes(how.weights), dtype_bytes(how.compute)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norm = _FLOAT32 * hidden + _FLOAT32  # its float32 input and its scale
    # queries, keys and values (repeated to all heads, as masks keep grouped attention away), output, logsumexp
    attention = norm + 4 * compute * queries + _FLOAT32 * shape.num_heads
    has_head_norms = shape.config.model_type == "qwen3"  # on queries and keys
    if has_head_norms:
        attention += _FLOAT32 * (queries + keys) + _FLOAT32 * (shape.num_heads + shape.num_kv_heads)
    if how.lora is not None:  # frozen linears and norms keep no input
        return (
            attention + _adapters(shape, how, ATTENTION_LINEARS),
            norm + 3 * compute * inner + _adapters(shape, how, MLP_LINEARS),
        )
    attention += compute * (queries + keys) if has_head_norms else 0.0
    # what the norm gives, and the input of the linears: autocast casts it anew for each of them
    copies = (1, 1) if how.weights == how.compute else (3, 2)
    attention += (weights + copies[0] * compute) * hidden
    return attention, norm + (weights + copies[1] * compute) * hidden + 4 * compute * inner


def _adapters(shape: ModelShape, how: TrainingPass, linears: tuple[str, ...]) -> float:
    """Bytes that the adapters beside ``linears`` keep of one token: dropout's noise, its output, the rank's numbers."""
    assert how.lora is not None
    compute = dtype_bytes(how.compute)
    per_input = compute + (_FLOAT32 if how.lora["dropout"] else 0.0)
    targets = [shape.linears[name] for name in linears if name in how.lora["targets"]]
    return sum(inputs * per_input + how.lora["rank"] * compute for _, inputs, _ in targets)


def saved_bytes(shape: ModelShape, how: TrainingPass, num_tokens: int, num_read: int) -> float:
    """Bytes kept by all layers for ``num_tokens`` tokens, of which ``num_read`` outputs are read.

    ``models.layer_stack.run_plain`` computes the last feed-forward part for those alone and never checkpoints the last
    layer. With checkpointing: every layer's input, and everything of the one that is being computed again.
    """
    attention, mlp = saved_per_token(shape, how)
    layer, last = (attention + mlp) * num_tokens, attention * num_tokens + mlp * num_read
    if not how.gradient_checkpointing:
        return (shape.num_layers - 1) * layer + last
    inputs = shape.num_layers * num_tokens * shape.hidden_size * dtype_bytes(how.weights)
    return inputs + (layer if shape.num_layers > 1 else last)


def cast_weight_bytes(shape: ModelShape, how: TrainingPass) -> float:
    """Copies of the layers' weights in the compute dtype that autocast makes and backward reads; 0 without autocast."""
    return 0.0 if how.weights == how.compute else shape.num_linear * dtype_bytes(how.compute)
