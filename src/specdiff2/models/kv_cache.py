"""A preallocated key/value cache that can keep an arbitrary accepted path.

All layers live in one tensor, ``[2 * layer, batch, head, capacity, head_dim]``: a forward pass writes in place and
gets views back (no ``torch.cat``), and moving an accepted tree path or dropping finished rows is one indexing
operation for the whole model. A model spread over several devices gets one such tensor per run of consecutive layers
on one device. It knows nothing of trees or sampling, nor how layers came to where they are (``models.placement``).

transformers (5.x) offers growing caches with ``crop`` and beam reordering, but nothing that keeps chosen positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from specdiff2.models.transfer import to_device
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from typing import Self

Devices: TypeAlias = torch.device | str | Sequence[torch.device | str]


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
        device: of all layers, or one per layer: where each layer computes.
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
        device: Devices,
        round_up: Callable[[int], int] = int,
    ) -> None:
        self._round_up = round_up
        devices = [device] * num_layers if isinstance(device, str | torch.device) else list(device)
        if len(devices) != num_layers:
            raise ValueError(f"got {len(devices)} devices for {num_layers} layers: expected one per layer")
        shape = (batch, num_heads, capacity, head_dim)
        # zeros, not empty: masked slots are multiplied by weight 0, and 0 * NaN from old memory is NaN
        storages = [
            torch.zeros((2 * len(list(run)), *shape), dtype=dtype, device=place)
            for place, run in itertools.groupby(map(torch.device, devices))
        ]
        self._adopt(storages)

    def _adopt(self, storages: list[Tensor]) -> None:
        """Be an empty cache in this memory."""
        self._storages = storages
        self._own = [_Layer(keys, values) for keys, values in self._views()]
        super().__init__(layers=list(self._own))

    @classmethod
    def allocate(
        cls,
        config: PreTrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: Devices = "cpu",
        round_up: Callable[[int], int] = int,
        num_heads: int | None = None,
    ) -> Self:
        """``num_heads``: key/value heads in this process; None means all of them.

        Raises:
            ConfigError: a model whose layers are not all full attention.
        """
        check_full_attention(config)
        heads = config.num_attention_heads
        num_heads = num_heads or getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, batch, num_heads, capacity, head_dim, dtype, device, round_up)

    @property
    def length(self) -> int:
        """Tokens stored per row."""
        return self._own[0].num_filled

    @property
    def capacity(self) -> int:
        return int(self._storages[0].shape[3])

    @property
    def batch(self) -> int:
        return int(self._storages[0].shape[1])

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
        for storage in self._storages:
            storage.zero_()
        self._set_length(0)

    def lend(self, layers: Sequence[int]) -> Cache:
        """The given layers as a cache of their own that shares storage and fill level: a forward pass writes behind
        what is stored, and ``truncate`` takes it back.

        Raises:
            ConfigError: the layers lie on several devices, and who borrows them computes on one.
        """
        places = sorted({str(self._own[layer].keys.device) for layer in layers})
        if len(places) > 1:
            raise ConfigError(
                f"keys and values of layers {list(layers)} lie on {', '.join(places)}: a drafter that reads them needs "
                "them on one device; load the verifier on one (verifier.device_map=null) or use another drafter"
            )
        return Cache(layers=[self._own[layer] for layer in layers])

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens; existing content stays. Grows by half at least, so it is rare."""
        if capacity <= self.capacity:
            return
        capacity = self._round_up(max(capacity, self.capacity * 3 // 2))
        storages = []
        for old in self._storages:
            new = old.new_zeros((*old.shape[:3], capacity, old.shape[4]))
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
            storages.append(new)
        self._set_storages(storages)

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

        ``index``: ``indices`` as a tensor on the (first) device of the cache, where there is one already.

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
            index = to_device(indices, self._storages[0].device) if index is None else index
            for storage in self._storages:
                source = index[moved:].to(storage.device)  # where it is already but for a model on several devices
                storage[:, :, :, prefix_length + moved : end] = storage.index_select(3, source)
        self._set_length(end)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order. Rows that stay where they are cost nothing."""
        moved = [i for i, row in enumerate(rows) if row != i]
        storages = []
        for old in self._storages:
            storage = old[:, : len(rows)]
            if moved:
                target = torch.tensor(moved, device=old.device)
                source = torch.tensor([rows[i] for i in moved], device=old.device)
                # index_select copies before anything is written, so overlapping source and target rows are safe
                storage[:, target, :, : self.length] = old[:, :, :, : self.length].index_select(1, source)
            storages.append(storage)
        self._set_storages(storages)

    def repeat_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``; the batch may grow (several completions of one prompt)."""
        storages = []
        for old in self._storages:
            new = old.new_zeros((old.shape[0], len(rows), *old.shape[2:]))
            source = torch.tensor(rows, device=old.device)
            new[:, :, :, : self.length] = old[:, :, :, : self.length].index_select(1, source)
            storages.append(new)
        self._set_storages(storages)

    def _set_length(self, length: int) -> None:
        for layer in self._own:
            layer.num_filled = length

    def _set_storages(self, storages: list[Tensor]) -> None:
        self._storages = storages
        for layer, (keys, values) in zip(self._own, self._views(), strict=True):
            layer.set_storage(keys, values)

    def _views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, in order."""
        for storage in self._storages:
            for i in range(0, storage.shape[0], 2):
                yield storage[i], storage[i + 1]


AnyCache = TypeVar("AnyCache", bound=PreallocatedCache)
