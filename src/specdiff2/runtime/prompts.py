"""Prompts of a training run, loaded once and checked before any model loads: against held-out prompts, and against
benchmarks that must never be trained on (``data.never``)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff2.data.mixed_prompts import MixedPrompts
from specdiff2.data.overlap import check_no_overlap, leave_out
from specdiff2.data.prompt import Prompt, PromptSource, require_unique_ids
from specdiff2.data.prompts import BenchmarkPrompts
from specdiff2.runtime.build import instantiate
from specdiff2.types import ConfigError

_REMEDY = (
    "benchmarks are never trained on: choose other rows (skip, limit) or drop the source, or leave these prompts out "
    "with data.drop_overlap=true"
)


# fields that hold the prompt in well-known files: what `data.never: [FILE.jsonl]` looks for
PROMPT_FIELDS = ("turns", "question", "problem", "instruction", "prompt", "question_content", "Question", "text")


@dataclass(frozen=True)
class LoadedPrompts:
    """Prompts and what identifies them: the source's description and a digest of what it really gave.

    ``parts``: description and prompt ids of each source they come from.
    """

    prompts: list[Prompt]
    origin: dict[str, Any]
    parts: Sequence[tuple[dict[str, Any], frozenset[str]]] = ()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Description and number of prompts of each source."""
        counts = [sum(prompt.prompt_id in ids for prompt in self.prompts) for _, ids in self.parts]
        return [{**part, "num_prompts": count} for (part, _), count in zip(self.parts, counts, strict=True)]


def load_prompts(source: PromptSource) -> LoadedPrompts:
    """Raises:
    ConfigError, CorruptFileError: from the source; no prompt, or an id twice.
    """
    sources = source.sources if isinstance(source, MixedPrompts) else [source]
    loaded = [part.load() for part in sources]
    prompts = MixedPrompts.mix(loaded)
    described = source.describe()
    require_unique_ids(prompts, str(described.get("source", "prompts")))
    ids = [frozenset(prompt.prompt_id for prompt in part) for part in loaded]
    parts = list(zip([part.describe() for part in sources], ids, strict=True))
    return LoadedPrompts(prompts, described | {"content": content_digest(prompts)}, parts)


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


def keep_apart(train: LoadedPrompts, data: Mapping[str, Any]) -> LoadedPrompts:
    """The training prompts, none of them in a benchmark of ``data.never`` (see ``data.overlap``).

    ``data.never``: null; or benchmarks by name, as in ``conf/benchmark``; or a list of those and of JSONL files.
    ``data.drop_overlap``: leave such prompts out, counted in the log, instead of refusing.

    Raises:
        ConfigError: a training prompt is in one of them, exactly or nearly; or a benchmark cannot be read.
    """
    forbidden = {f"data.never: {name}": prompts for name, prompts in never_prompts(data.get("never")).items()}
    if not data.get("drop_overlap"):
        check_no_overlap(forbidden, {"data.train_prompts": train.prompts}, _REMEDY)
        return train
    kept = train.prompts
    for name, prompts in forbidden.items():
        kept = leave_out(prompts, name, kept, "data.train_prompts")
    if not kept:
        raise ConfigError("data.drop_overlap: no training prompt is left; choose other prompts")
    return dataclasses.replace(train, prompts=kept, origin=train.origin | {"content": content_digest(kept)})


def never_prompts(never: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, list[Prompt]]:
    """Prompts of the benchmarks of ``data.never`` by name."""
    if not never:
        return {}
    if not isinstance(never, Mapping):
        never = {Path(item).stem if isinstance(item, str) else f"{index}": item for index, item in enumerate(never)}
    named: dict[str, list[Prompt]] = {}
    for name, item in never.items():
        source = file_source(item) if isinstance(item, str) else instantiate(item)
        parts = source if isinstance(source, Mapping) else {"": source}
        named |= {f"{name}.{part}".rstrip("."): one.load() for part, one in parts.items()}
    return named


def file_source(path: str) -> PromptSource:
    """A file of a benchmark, its prompts in one of ``PROMPT_FIELDS``."""
    return BenchmarkPrompts(Path(path).stem, PROMPT_FIELDS, path=path, form="turns", split="train")


def _text(prompt: Prompt) -> str:
    return json.dumps([[message["role"], " ".join(message["content"].split())] for message in prompt.messages])
