"""A preallocated key/value cache that can keep an arbitrary accepted path.

All layers live in one tensor, ``[2 * layer, batch, head, capacity, head_dim]``: a forward pass writes in place and
gets views back (no ``torch.cat``), and moving an accepted tree path or dropping finished rows is one indexing
operation for the whole model. It knows nothing of trees or sampling.

transformers (5.x) offers growing caches with ``crop`` and beam reordering, but nothing that keeps chosen positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from specdiff2.models.transfer import to_device
from specdiff2.types import ConfigError


def check_full_attention(config: PreTrainedConfig) -> None:
    """Only plain full attention can be cached by absolute slot.

    Raises:
        ConfigError: the model has sliding-window, chunked or linear-attention layers.
    """
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        found = f"sliding_window={window}"
    else:
        others = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
        if not others:
            return
        found = f"layer types {others}"
    raise ConfigError(
        f"PreallocatedCache cannot serve a {config.model_type!r} model with {found}: expected full attention in every "
        "layer; choose a model without it, or set sliding_window=None in its config if the context is never longer"
    )


class _Layer(CacheLayerMixin):
    """One layer's view of the shared storage."""

    is_sliding = False
    keys: Tensor  # [batch, head, capacity, head_dim]
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.num_filled = 0
        self.set_storage(keys, values)

    def set_storage(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start, end = self.num_filled, self.num_filled + key_states.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache holds {self.keys.shape[2]} tokens, got {end}: call reserve({end}) first")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.num_filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.num_filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_filled + query_length, 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists from the start."""


class PreallocatedCache(Cache):
    """Keys and values of ``batch`` sequences, up to ``capacity`` tokens each.

    Args:
        num_layers, batch, num_heads, capacity, head_dim: shape of the storage (``num_heads`` key/value heads).
        round_up: capacity to allocate when the cache has to grow to at least its argument; compiled passes are made
            for certain capacities only.

    Use ``allocate`` to take the shapes from a model config.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        round_up: Callable[[int], int] = int,
    ) -> None:
        self._round_up = round_up
        shape = (2 * num_layers, batch, num_heads, capacity, head_dim)
        # zeros, not empty: masked slots are multiplied by weight 0, and 0 * NaN from old memory is NaN
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self._own = [_Layer(self._storage[2 * i], self._storage[2 * i + 1]) for i in range(num_layers)]
        super().__init__(layers=list(self._own))

    @classmethod
    def allocate(
        cls,
        config: PreTrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        round_up: Callable[[int], int] = int,
    ) -> PreallocatedCache:
        """Raises ConfigError for models whose layers are not all full attention."""
        check_full_attention(config)
        heads = config.num_attention_heads
        num_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, batch, num_heads, capacity, head_dim, dtype, device, round_up)

    @property
    def length(self) -> int:
        """Tokens stored per row."""
        return self._own[0].num_filled

    @property
    def capacity(self) -> int:
        return int(self._storage.shape[3])

    @property
    def batch(self) -> int:
        return int(self._storage.shape[1])

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is stored of one layer, as views ``[batch, head, length, head_dim]``."""
        own = self._own[layer]
        return own.keys[:, :, : own.num_filled], own.values[:, :, : own.num_filled]

    def slots(self, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the given layers (None: all), whole capacity, ``[batch, head, capacity, head_dim]``.

        The same tensors until the cache grows: a compiled pass writes into them, then ``filled`` tells how far.
        """
        own = self._own if layers is None else [self._own[layer] for layer in layers]
        return [layer.keys for layer in own], [layer.values for layer in own]

    def filled(self, length: int) -> None:
        """The first ``length`` slots hold tokens now: somebody wrote into ``slots``.

        Raises:
            ValueError: ``length`` is beyond the capacity.
        """
        if not 0 <= length <= self.capacity:
            raise ValueError(f"filled({length}): expected 0 <= length <= {self.capacity}")
        self._set_length(length)

    def clear(self) -> None:
        """Empty, and zero as when new: what an earlier user left cannot reach the next one, not even as NaN."""
        self._storage.zero_()
        self._set_length(0)

    def lend(self, layers: Sequence[int]) -> Cache:
        """The given layers as a cache of their own that shares storage and fill level: a forward pass writes behind
        what is stored, and ``truncate`` takes it back."""
        return Cache(layers=[self._own[layer] for layer in layers])

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens; existing content stays. Grows by half at least, so it is rare."""
        if capacity <= self.capacity:
            return
        old, length = self._storage, self.length
        shape = list(old.shape)
        shape[3] = self._round_up(max(capacity, old.shape[3] * 3 // 2))
        new = torch.zeros(shape, dtype=old.dtype, device=old.device)
        new[:, :, :, :length] = old[:, :, :, :length]
        self._set_storage(new)

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens.

        Raises:
            ValueError: ``length`` is negative or beyond what is stored.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate({length}): expected 0 <= length <= {self.length}")
        self._set_length(length)

    def gather(self, prefix_length: int, indices: Sequence[int], index: Tensor | None = None) -> None:
        """Keep the first ``prefix_length`` tokens, then the slots ``indices`` (absolute, increasing), contiguously.

        ``index``: ``indices`` as a tensor on the cache's device, where there is one already.

        Raises:
            ValueError: the indices are not increasing inside [prefix_length, length).
        """
        bounds = [prefix_length - 1, *indices, self.length]
        if prefix_length < 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"gather({prefix_length}, {list(indices)}): expected increasing slots, each below {self.length}"
            )
        end = prefix_length + len(indices)
        # slots that are already in place (a leading run) need no copy: often the whole path of a single chain
        moved = next((i for i, slot in enumerate(indices) if slot != prefix_length + i), len(indices))
        if moved < len(indices):
            index = to_device(indices, self._storage.device) if index is None else index
            self._storage[:, :, :, prefix_length + moved : end] = self._storage.index_select(3, index[moved:])
        self._set_length(end)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order. Rows that stay where they are cost nothing."""
        moved = [i for i, row in enumerate(rows) if row != i]
        storage = self._storage[:, : len(rows)]
        if moved:
            length = self.length
            target = torch.tensor(moved, device=self._storage.device)
            source = torch.tensor([rows[i] for i in moved], device=self._storage.device)
            # index_select copies before anything is written, so overlapping source and target rows are safe
            storage[:, target, :, :length] = self._storage[:, :, :, :length].index_select(1, source)
        self._set_storage(storage)

    def repeat_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``; the batch may grow (several completions of one prompt)."""
        old, length = self._storage, self.length
        new = torch.zeros((old.shape[0], len(rows), *old.shape[2:]), dtype=old.dtype, device=old.device)
        new[:, :, :, :length] = old[:, :, :, :length].index_select(1, torch.tensor(rows, device=old.device))
        self._set_storage(new)

    def _set_length(self, length: int) -> None:
        for layer in self._own:
            layer.num_filled = length

    def _set_storage(self, storage: Tensor) -> None:
        self._storage = storage
        for i, layer in enumerate(self._own):
            layer.set_storage(storage[2 * i], storage[2 * i + 1])
