"""A grid makes a method of every combination, named so that none hides another."""

from __future__ import annotations

import pytest

from specdiff2.runtime.grid import all_methods, grid_methods
from specdiff2.types import ConfigError

SAMPLER = {"_target_": "x", "name": "specdiff2", "K": 8, "temperature": None, "drafter": "shipped"}


def test_every_combination_is_a_method_with_its_settings() -> None:
    methods = grid_methods(SAMPLER, {"K": [1, 4], "temperature": [0.5, None]})
    assert list(methods) == [f"specdiff2_K-{k}_temperature-{t}" for k in (1, 4) for t in (0.5, None)]
    node, settings = methods["specdiff2_K-4_temperature-0.5"]
    assert settings == {"K": 4, "temperature": 0.5}
    assert node == SAMPLER | settings | {"name": "specdiff2_K-4_temperature-0.5"}
    assert SAMPLER["K"] == 8  # the sampler itself stays as it is


def test_folders_are_named_by_their_last_part() -> None:
    folders = ["outputs/drafters/a/best", "outputs/drafters/b/best", "outputs/drafters/a/step-50"]
    assert list(grid_methods(SAMPLER, {"drafter": folders})) == [
        "specdiff2_drafter-a-best", "specdiff2_drafter-b-best", "specdiff2_drafter-step-50",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        ({"k": [1]}, "did you mean 'grid.K'"),
        ({"K": 4}, r"grid.K=4: expected a list"),
        ({"K": []}, r"grid.K=\[\]"),
        ({"K": [1, 1]}, "two combinations are called 'specdiff2_K-1'"),
    ],
)
def test_wrong_grids_are_refused_by_name(grid: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        grid_methods(SAMPLER, grid)


def test_methods_and_grid_are_measured_together() -> None:
    other = {"name": "tree"}
    config = {"sampler": SAMPLER, "methods": {"tree": other}, "grid": {"K": [1, 2]}}
    assert list(all_methods(config)) == ["tree", "specdiff2_K-1", "specdiff2_K-2"]
    assert all_methods({**config, "grid": None}) == {"tree": other}
    assert all_methods({"sampler": SAMPLER, "methods": None, "grid": None}) == {"specdiff2": SAMPLER}
    with pytest.raises(ConfigError, match=r"methods.specdiff2_K-1"):
        all_methods({**config, "methods": {"specdiff2_K-1": other}})
