"""What stands in a verifier where its weights were."""

from __future__ import annotations

from typing import Any

from specdiff2.types import ConfigError


class ReleasedModel:
    """Raises ConfigError at any use. ``name``: of the verifier."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked for by copy, pickle and the like
            raise AttributeError(attribute)
        raise ConfigError(f"{self._name}: its weights are not here, they were released; load the verifier again")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.forward(*arguments, **options)
