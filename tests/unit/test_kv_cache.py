"""PreallocatedCache against plain tensor operations."""

from collections.abc import Callable

import pytest
import torch
from helpers import tiny_llama
from transformers import MistralConfig, Qwen2Config

from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.types import ConfigError


def filled(batch: int = 2, length: int = 10, capacity: int = 16) -> tuple[PreallocatedCache, list[torch.Tensor]]:
    cache = PreallocatedCache(3, batch, 2, capacity, 4, torch.float32, "cpu")
    keys = [torch.randn(batch, 2, length, 4) for _ in range(3)]
    for layer, key in enumerate(keys):
        cache.update(key, -key, layer)
    return cache, keys


def contents(cache: PreallocatedCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    stored = cache.layers[layer]
    return stored.keys[:, :, : cache.length], stored.values[:, :, : cache.length]


def assert_holds(cache: PreallocatedCache, expected: list[torch.Tensor]) -> None:
    for layer, want in enumerate(expected):
        keys, values = contents(cache, layer)
        assert torch.equal(keys, want)
        assert torch.equal(values, -want)


def test_update_writes_in_place_and_returns_views():
    cache, keys = filled()
    storage = cache._storages[0].data_ptr()
    more = torch.randn(2, 2, 3, 4)
    got, _ = cache.update(more, -more, 0)
    assert torch.equal(got, torch.cat([keys[0], more], dim=2))
    assert cache._storages[0].data_ptr() == storage
    assert got.data_ptr() == cache.layers[0].keys.data_ptr()


def test_overflow_raises_naming_the_size():
    cache, _ = filled(capacity=11)
    with pytest.raises(ValueError, match="holds 11 tokens, got 12"):
        cache.update(torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, 2, 4), 0)


def test_reserve_keeps_content():
    cache, keys = filled()
    cache.reserve(8)
    assert cache.capacity == 16
    cache.reserve(40)
    assert cache.capacity >= 40
    assert_holds(cache, keys)


def test_truncate():
    cache, keys = filled()
    cache.truncate(4)
    assert cache.length == 4
    assert_holds(cache, [key[:, :, :4] for key in keys])
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(5)


@pytest.mark.parametrize("slots", [[], [4], [4, 5], [9], [4, 6, 9], [5, 7], [4, 5, 6, 7, 8, 9]])
def test_gather_keeps_prefix_and_slots(slots: list[int]):
    cache, keys = filled()
    cache.gather(4, slots)
    assert cache.length == 4 + len(slots)
    assert_holds(cache, [key[:, :, [0, 1, 2, 3, *slots]] for key in keys])


@pytest.mark.parametrize(("prefix", "slots"), [(4, [3]), (4, [6, 5]), (4, [5, 5]), (4, [10]), (-1, [])])
def test_gather_refuses_bad_slots(prefix: int, slots: list[int]):
    cache, _ = filled()
    with pytest.raises(ValueError, match="gather"):
        cache.gather(prefix, slots)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 3, 2], [3, 1], [2], [1, 0, 3]])
def test_keep_rows(rows: list[int]):
    cache, keys = filled(batch=4)
    cache.keep_rows(rows)
    assert cache.batch == len(rows)
    assert_holds(cache, [key[rows] for key in keys])


def test_repeat_rows_may_grow_the_batch():
    cache, keys = filled(batch=2)
    cache.repeat_rows([1, 0, 1])
    assert_holds(cache, [key[[1, 0, 1]] for key in keys])
    assert cache.capacity == 16


def test_allocate_takes_shapes_from_the_config():
    model = tiny_llama()
    cache = PreallocatedCache.allocate(model.config, 3, 20, torch.float32)
    assert (len(cache), cache.batch, cache.capacity, cache.length) == (2, 3, 20, 0)
    assert cache.layers[0].keys.shape == (3, 2, 20, 8)
    with torch.no_grad():
        model(torch.zeros(3, 5, dtype=torch.long), past_key_values=cache)
    assert cache.length == 5


def test_sliding_window_is_refused_naming_the_cache():
    """Case 15."""
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    for config in (
        MistralConfig(**sizes, sliding_window=8),
        Qwen2Config(
            **sizes,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
    ):
        with pytest.raises(ConfigError, match=r"PreallocatedCache cannot serve.*sliding"):
            PreallocatedCache.allocate(config, 1, 8, torch.float32)
    full = Qwen2Config(
        **sizes,
        num_key_value_heads=2,
        use_sliding_window=False,
        sliding_window=8,
    )
    PreallocatedCache.allocate(full, 1, 8, torch.float32)


SPLIT = ["cpu:0", "cpu", "cpu"]  # torch tells these two names apart, so a machine without a GPU has two groups


def test_layers_on_one_device_share_one_tensor():
    one = PreallocatedCache(3, 2, 2, 16, 4, torch.float32, "cpu")
    assert [tuple(s.shape) for s in one._storages] == [(6, 2, 2, 16, 4)]
    same = PreallocatedCache(3, 2, 2, 16, 4, torch.float32, [torch.device("cpu")] * 3)
    assert len(same._storages) == 1
    split = PreallocatedCache(4, 2, 2, 16, 4, torch.float32, ["cpu", "meta", "meta", "cpu"])
    assert [(s.device.type, s.shape[0]) for s in split._storages] == [("cpu", 2), ("meta", 4), ("cpu", 2)]
    assert [layer.keys.device.type for layer in split.layers] == ["cpu", "meta", "meta", "cpu"]
    with pytest.raises(ValueError, match="2 devices for 3 layers"):
        PreallocatedCache(3, 2, 2, 16, 4, torch.float32, ["cpu", "cpu"])


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.gather(4, [4, 6, 9]),
        lambda cache: cache.gather(4, [5, 7], torch.tensor([5, 7])),
        lambda cache: cache.keep_rows([3, 1]),
        lambda cache: cache.repeat_rows([1, 0, 1, 3, 2]),
        lambda cache: cache.reserve(40),
        lambda cache: cache.truncate(4),
        lambda cache: (cache.keep_rows([0, 3, 2]), cache.reserve(20), cache.gather(2, [7]), cache.repeat_rows([2, 0])),
        lambda cache: (cache.clear(), cache.filled(7)),
    ],
)
def test_two_groups_equal_one(change: Callable[[PreallocatedCache], object]):
    states = [torch.randn(4, 2, 10, 4) for _ in range(3)]
    found = []
    for devices in ("cpu", SPLIT):
        cache = PreallocatedCache(3, 4, 2, 16, 4, torch.float32, devices)
        for layer, state in enumerate(states):
            cache.update(state, -state, layer)
        change(cache)
        more = torch.ones(cache.batch, 2, 2, 4)
        cache.reserve(cache.length + 2)
        for layer in range(3):  # views must point into the storage that is kept
            cache.update(more * layer, -more * layer, layer)
        found.append((len(cache._storages), cache.length, cache.capacity, [cache.keys_values(i) for i in range(3)]))
    (num_one, *one), (num_two, *two) = found
    assert (num_one, num_two) == (1, 2) and one[:2] == two[:2]
    for first, second in zip(one[2], two[2], strict=True):
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_lending_wants_one_device():
    cache = PreallocatedCache(3, 1, 2, 16, 4, torch.float32, ["cpu", "cpu", "meta"])
    cache.lend([0, 1])
    with pytest.raises(ConfigError, match=r"layers \[1, 2\] lie on cpu, meta.*device_map=null"):
        cache.lend([1, 2])


def test_allocate_for_a_share_of_the_heads():
    cache = PreallocatedCache.allocate(tiny_llama().config, 1, 20, torch.float32, num_heads=1)
    assert cache.layers[0].keys.shape == (1, 1, 20, 8)
