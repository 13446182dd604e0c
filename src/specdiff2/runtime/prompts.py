"""Prompts of a training run, loaded once and checked before any model loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdiff2.data.prompt import Prompt, PromptSource, require_unique_ids
from specdiff2.types import ConfigError


@dataclass(frozen=True)
class LoadedPrompts:
    """Prompts and what identifies them: the source's description and a digest of what it really gave."""

    prompts: list[Prompt]
    origin: dict[str, Any]


def load_prompts(source: PromptSource) -> LoadedPrompts:
    """Raises:
    ConfigError, CorruptFileError: from the source; no prompt, or an id twice.
    """
    prompts = source.load()
    described = source.describe()
    require_unique_ids(prompts, str(described.get("source", "prompts")))
    return LoadedPrompts(prompts, described | {"content": content_digest(prompts)})


def content_digest(prompts: Sequence[Prompt]) -> str:
    """Of ids and messages: a data set that changed under its name is another one."""
    content = [[prompt.prompt_id, prompt.messages] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_disjoint(train: Sequence[Prompt], val: Sequence[Prompt]) -> None:
    """Held-out numbers on prompts that were trained on mean nothing.

    Compares texts: ids only count within their source (two files may both count from 0).

    Raises:
        ConfigError: a held-out prompt is a training prompt too.
    """
    texts = {_text(prompt): prompt.prompt_id for prompt in train}
    shared = [(prompt.prompt_id, texts[_text(prompt)]) for prompt in val if _text(prompt) in texts]
    if shared:
        held_out, trained = shared[0]
        raise ConfigError(
            f"data.val_prompts: {len(shared)} of {len(val)} prompts are in data.train_prompts too (the first: "
            f"{held_out!r}, there {trained!r}); expected none: choose other rows, e.g. data.train_prompts.skip >= "
            "data.val_prompts.limit, another split, or delete repeated rows"
        )


def _text(prompt: Prompt) -> str:
    return json.dumps([[message["role"], " ".join(message["content"].split())] for message in prompt.messages])
