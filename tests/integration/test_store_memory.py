"""The size of a rollout store does not matter to the memory of training: a million rollouts against ten thousand.

Measured (MiB above the process before it opened the store): index 11 for 10 thousand rollouts, 17 for 100 thousand, 24
for a million, 102 for ten million (80 of them while the ids are compared); lists, which training had before, 23, 148
and 1311.
"""

from __future__ import annotations

import pytest
from store_memory import SHARD_ROWS, measure_apart, write_store

BOUND_MIB = 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_from_ten_thousand_to_a_million_rollouts(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    write_store(small, 10_000)
    write_store(large, 1_000_000)
    few, many = (measure_apart(folder, num_steps=400) for folder in (small, large))
    assert (few["num_rollouts"], many["num_rollouts"]) == (10_000, 1_000_000)
    assert many["store_mib"] > 3 * BOUND_MIB, "the bound is far below the store"
    assert many["peak_growth_mib"] - few["peak_growth_mib"] < BOUND_MIB
    # the bound is one that lists break, with a tenth of the rollouts already
    for shard in sorted(large.glob("shard-*"))[1:]:
        shard.unlink()
    listed = measure_apart(large, num_steps=400, lists=True)
    assert listed["num_rollouts"] == SHARD_ROWS
    assert listed["peak_growth_mib"] - few["peak_growth_mib"] > BOUND_MIB
