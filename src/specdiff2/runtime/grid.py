"""``grid``: every combination of some settings of the sampler as a method of its own, in one interleaved run.

A sweep (``-m``) starts a job per combination, each with a baseline of its own; a grid decodes every prompt with all of
them back to back, so that slow drift of the machine hits every combination alike and prompts stay paired. It knows no
model and no Hydra.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from specdiff2.runtime.config_schema import unknown_key
from specdiff2.types import ConfigError

Node = Mapping[str, Any]


def grid_methods(sampler: Node, grid: Mapping[str, Sequence[Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Method name -> (its sampler node, its values by key), the last key changing fastest.

    Raises:
        ConfigError: a key that the sampler does not have, a value that is not a list, an empty list, or two
            combinations of the same name.
    """
    for key, values in grid.items():
        if key not in sampler:
            raise unknown_key(f"grid.{key}", [f"grid.{name}" for name in sampler if not name.startswith("_")])
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"grid.{key}={values!r}: expected a list of values, as in 'grid={{{key}: [...]}}'")
    methods: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        name = "_".join([str(sampler["name"]), *(f"{key}-{short_value(value)}" for key, value in settings.items())])
        if name in methods:
            raise ConfigError(f"grid: two combinations are called {name!r}: expected distinct values")
        methods[name] = ({**sampler, **settings, "name": name}, settings)
    return methods


def short_value(value: Any) -> str:
    """A value as part of a name: a path by its last part, ``best`` and ``last`` with the folder they lie in."""
    text = str(value)
    if "/" not in text:
        return text
    path = PurePath(text)
    return f"{path.parent.name}-{path.name}" if path.name in ("best", "last") else path.name


def all_methods(config: Node) -> dict[str, Any]:
    """Sampler nodes by method name: ``methods``, then the grid's; the sampler alone where there is neither.

    Raises:
        ConfigError: see ``grid_methods``, or a method that is called like one of the grid.
    """
    grid = grid_methods(config["sampler"], config["grid"]) if config["grid"] else {}
    named = dict(config["methods"] or {})
    doubled = sorted(named.keys() & grid.keys())
    if doubled:
        raise ConfigError(f"methods.{doubled[0]}: the grid has a method of that name; choose another one")
    return {**named, **{name: node for name, (node, _) in grid.items()}} or {
        config["sampler"]["name"]: config["sampler"]
    }
