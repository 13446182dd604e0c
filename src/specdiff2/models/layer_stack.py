"""Some of a causal language model's transformer layers, run on given embeddings, attention mask and positions.

Two ways to the same numbers. ``run_generic`` calls the transformers model as it is. ``run_plain`` walks layers whose
structure is known and, in the last one, computes the feed-forward part only where an output is read: a training
batch has about three times as many prefix rows as window rows, and nobody reads those. The test
``test_plain_equals_generic`` holds them together.

It knows nothing of windows, embeddings or heads.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdiff2.models.kv_cache import check_full_attention
from specdiff2.types import ConfigError

Stack: TypeAlias = Any  # a PreTrainedModel with layers, norm and rotary_emb, which transformers does not type

# model types whose layer is x += attention(norm(x)); x += mlp(norm(x)), with position embeddings computed once
PLAIN_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def base_of(model: PreTrainedModel) -> Stack:
    """The decoder below the head.

    Raises:
        ConfigError: it does not have the usual parts (``layers``, ``norm``, ``rotary_emb``).
    """
    base = getattr(model, model.base_model_prefix, None)
    if base is None or any(not hasattr(base, part) for part in ("layers", "norm", "rotary_emb")):
        raise ConfigError(
            f"a block drafter cannot be made from {type(model).__name__}: expected a decoder with layers, norm and "
            "rotary_emb (Llama, Qwen2, Qwen3, Mistral and their like); use such a verifier or another kind of drafter"
        )
    return base


def stack_config(config: PreTrainedConfig, indices: list[int]) -> PreTrainedConfig:
    """``config`` with only the layers ``indices``, without embedding and without dropout.

    Every per-layer list (``layer_types``, ``no_rope_layers``, ...) is cut to the same layers.

    Raises:
        ConfigError: a kept layer is not full attention.
    """
    config = copy.deepcopy(config)
    num_layers = config.num_hidden_layers
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, list) and len(value) == num_layers:
            setattr(config, key, [value[i] for i in indices])
        if key.endswith(("dropout", "pdrop")) and value:
            setattr(config, key, 0.0)  # training and decoding must compute the same function
    config.num_hidden_layers = len(indices)
    config.use_cache = False
    # the drafter borrows the verifier's embedding: none of its own, and no special ids that would need one
    config.vocab_size = 1
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    check_full_attention(config)
    return config


def build_stack(config: PreTrainedConfig, attn_implementation: str) -> Stack:
    """Untrained float32 layers for ``config``, to be overwritten. Leaves the global RNG untouched."""
    with torch.random.fork_rng(devices=[]):
        stack = AutoModel.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    stack.set_input_embeddings(nn.Identity())
    return stack


def copy_layers(source: Stack, target: Stack, indices: list[int]) -> None:
    """Start ``target``'s layers from ``source``'s layers ``indices``, and its final norm from the source's."""
    for layer, index in zip(target.layers, indices, strict=True):
        layer.load_state_dict(source.layers[index].state_dict())
    target.norm.load_state_dict(source.norm.state_dict())


def run_stack(
    stack: Stack,
    embeddings: Float[Tensor, "row column hidden"],
    mask: Tensor,
    position_ids: Int[Tensor, "row column"],
    read_index: Int[Tensor, "..."],
    cache: Cache | None = None,
) -> Float[Tensor, "... hidden"]:
    """Normalised outputs at the flat indices (row * columns + column) ``read_index``; keys and values go to ``cache``.

    ``mask`` is additive and 4D: with None or a 2D mask transformers would make the attention causal.
    """
    run = run_plain if stack.config.model_type in PLAIN_TYPES else run_generic
    return run(stack, embeddings, mask, position_ids, read_index, cache)


def run_generic(
    stack: Stack,
    embeddings: Tensor,
    mask: Tensor,
    position_ids: Tensor,
    read_index: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    output = stack(
        inputs_embeds=embeddings,
        attention_mask=mask,
        position_ids=position_ids,
        use_cache=cache is not None,
        **_cache_argument(stack, cache),
    )
    return output.last_hidden_state.flatten(0, 1)[read_index]


def run_plain(
    stack: Stack,
    embeddings: Tensor,
    mask: Tensor,
    position_ids: Tensor,
    read_index: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    rotary = stack.rotary_emb(embeddings, position_ids)
    shared: dict[str, Any] = dict(
        attention_mask=mask,
        position_embeddings=rotary,
        position_ids=position_ids,
        **_cache_argument(stack.layers[0], cache),
    )
    hidden = embeddings
    *layers, last = stack.layers
    for layer in layers:
        hidden = layer(hidden, **shared)
    attended, _ = last.self_attn(hidden_states=last.input_layernorm(hidden), **shared)
    hidden = (hidden + attended).flatten(0, 1)[read_index]
    hidden = hidden + last.mlp(last.post_attention_layernorm(hidden))
    return stack.norm(hidden)


def _cache_argument(module: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """The keyword the cache goes by: renamed during transformers 5.x, and unknown keywords are silently ignored."""
    if cache is None:
        return {}
    name = _CACHE_NAMES.get(type(module))
    if name is None:
        parameters = inspect.signature(type(module).forward).parameters
        name = _CACHE_NAMES[type(module)] = "cache" if "cache" in parameters else "past_key_values"
    return {name: cache}


_CACHE_NAMES: dict[type, str] = {}
