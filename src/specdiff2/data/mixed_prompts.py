"""Several prompt sources as one. Knows nothing of what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from specdiff2.data.prompt import Prompt, PromptSource, require_unique_ids
from specdiff2.types import ConfigError


class MixedPrompts:
    """The prompts of all sources in turn: one of each, then the next of each; a source that is used up is passed over.

    Args:
        sources: the sources, or a mapping to them. The names of a mapping only make keys for the command line
            (``data.train_prompts.sources.code.num_prompts=64``); they change neither ids nor order.

    Raises:
        ConfigError: no source.
    """

    def __init__(self, sources: Sequence[PromptSource] | Mapping[str, PromptSource]) -> None:
        self.sources = list(sources.values() if isinstance(sources, Mapping) else sources)
        if not self.sources:
            raise ConfigError("sources=[]: expected at least one prompt source")

    def describe(self) -> dict[str, Any]:
        return {"source": "mixed", "parts": [source.describe() for source in self.sources]}

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: two prompts with one id, or an error of a source.
        """
        return self.mix([source.load() for source in self.sources])

    @staticmethod
    def mix(parts: Sequence[Sequence[Prompt]]) -> list[Prompt]:
        """The prompts of all parts in turn. Raises ConfigError: two prompts with one id."""
        rounds = zip_longest(*parts)
        prompts = [prompt for prompt in chain.from_iterable(rounds) if prompt is not None]
        require_unique_ids(prompts, "mixed prompts")
        return prompts
