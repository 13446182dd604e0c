"""What a verifier knows about committed tokens, lent to a drafter: keys and values of some of its layers, and hidden
states of some layers.

A conditioned drafter computes nothing for the prefix: its queries read the keys and values that the verifier has
computed for its own layers anyway. In decoding they are read from the verifier's live cache; in training they come
from one forward pass of the frozen verifier over each rollout, which always gives the same numbers and may be kept
(``ContextSource.memory``). Both are the verifier's own numbers, so there is no second prefix cache that could go stale.

It knows no windows and no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.types import WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

Memory = Callable[[list[int], Callable[[list[int]], Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Which layers' keys and values, which hidden states (0: embeddings, L: after the final norm), and their sizes."""

    layer_indices: tuple[int, ...]
    feature_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    hidden_size: int

    @property
    def width(self) -> int:
        """Numbers per token."""
        per_layer = 2 * self.num_heads * self.head_dim
        return len(self.layer_indices) * per_layer + len(self.feature_layers) * self.hidden_size


@dataclass(frozen=True, slots=True)
class VerifierContext:
    """Context of a batch of rollouts, ``packed[row, token]`` holding keys and values by layer, then hidden states."""

    packed: Float[Tensor, "batch length width"]
    shape: ContextShape

    def cache(self) -> Cache:
        """Keys and values as the cache of a layer stack: what the stack computes itself comes behind them."""
        shape = self.shape
        num_layers = len(shape.layer_indices)
        end = 2 * num_layers * shape.num_heads * shape.head_dim
        parts = self.packed[..., :end].unflatten(-1, (2 * num_layers, shape.num_heads, shape.head_dim))
        parts = parts.permute(2, 0, 3, 1, 4)  # [2 * layer, batch, head, length, head_dim]
        return prefix_cache([(parts[2 * i], parts[2 * i + 1]) for i in range(num_layers)])

    def features(self) -> Float[Tensor, "batch length feature_width"]:
        return self.packed[..., self.shape.width - len(self.shape.feature_layers) * self.shape.hidden_size :]


def prefix_cache(layers: Sequence[tuple[Tensor, Tensor]]) -> Cache:
    """A stack's cache of fixed (keys, values) per layer, read in whatever dtype the stack computes in."""
    return Cache(layers=[_PrefixLayer(keys, values) for keys, values in layers])


class _PrefixLayer(CacheLayerMixin):
    """Fixed keys and values of a prefix, in front of what a layer adds; nothing is stored."""

    is_sliding = False
    keys: Tensor  # [batch, head, length, head_dim]
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys = torch.cat([self.keys.to(key_states.dtype), key_states], dim=2)
        return keys, torch.cat([self.values.to(value_states.dtype), value_states], dim=2)

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the prefix exists from the start."""


class ContextSource:
    """Reads contexts of rollouts from a verifier. A plain object: held by a drafter it adds nothing to its state.

    ``memory(ids, compute)`` may answer from what it kept; None computes each time.
    """

    def __init__(self, verifier: HFVerifier, shape: ContextShape) -> None:
        self.verifier = verifier
        self.shape = shape
        self.memory: Memory | None = None

    def read(self, batch: WindowBatch) -> VerifierContext:
        """The contexts of all rows, zero behind their ends."""
        lengths = batch.lengths.tolist()
        rows = [row[:length] for row, length in zip(batch.input_ids.tolist(), lengths, strict=True)]
        packed: Tensor | None = None
        for index, ids in enumerate(rows):
            found = self.compute(ids) if self.memory is None else self.memory(ids, self.compute)
            if packed is None:
                packed = found.new_zeros((len(rows), max(lengths), self.shape.width))
            packed[index, : len(ids)] = found
        assert packed is not None  # a batch has rows
        return VerifierContext(packed.to(batch.input_ids.device), self.shape)

    def compute(self, ids: list[int]) -> Float[Tensor, "length width"]:
        """One forward pass of the verifier, in its own dtype."""
        verifier = self.verifier
        # the verifier keeps its own dtype under autocast; no_grad, not inference_mode: training reads these numbers
        with torch.no_grad(), torch.autocast(verifier.device.type, enabled=False):
            cache = PreallocatedCache.allocate(verifier.config, 1, len(ids), verifier.dtype, verifier.device)
            tokens = torch.tensor([ids], device=verifier.device)
            _, hidden = verifier.forward(tokens, cache=cache, logits_to_keep=1, output_hidden_states=True)
            assert hidden is not None  # just asked for
            parts: list[Any] = []
            for index in self.shape.layer_indices:
                parts += [part[0].transpose(0, 1).flatten(1) for part in cache.keys_values(index)]
            parts += [hidden[index][0] for index in self.shape.feature_layers]
            return torch.cat(parts, dim=-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextSource:
        """A copied drafter still reads from the same verifier."""
        return self


def context_shape(verifier: HFVerifier, layer_indices: Sequence[int], feature_layers: Sequence[int]) -> ContextShape:
    """Sizes from the verifier's config."""
    config: Any = verifier.config
    heads = config.num_attention_heads
    return ContextShape(
        layer_indices=tuple(layer_indices),
        feature_layers=tuple(feature_layers),
        num_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
    )
