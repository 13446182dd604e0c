"""Prompts from a hub data set or a local file or folder, through the library ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specdiff2.data.fields import FieldMapping, FieldNames
from specdiff2.data.hub_rows import hub_rows
from specdiff2.data.row_prompts import Row, RowPrompts
from specdiff2.types import ConfigError


class HubPrompts(RowPrompts):
    """One prompt per row.

    Args:
        name: hub id (``openai/gsm8k``), or a local folder, ``.jsonl``, ``.parquet`` or ``.csv`` file.
        subset: the data set's configuration, where it has several.
        split: its split; a single local file has only ``train``.
        streaming: read rows as needed instead of downloading the whole set first (with ``shuffle_seed`` all are read).
        revision: commit or tag on the hub.

    The other arguments are those of ``JsonlPrompts``.
    """

    def __init__(
        self,
        name: str,
        subset: str | None = None,
        split: str = "train",
        prompt_field: FieldNames = "prompt",
        answer_field: str | None = None,
        id_field: FieldNames | None = None,
        limit: int | None = None,
        skip: int = 0,
        template: str | None = None,
        meta_fields: Sequence[str] = (),
        streaming: bool = False,
        revision: str | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
        mapping = FieldMapping(prompt_field, answer_field, id_field, template, tuple(meta_fields))
        super().__init__(mapping, limit, skip, shuffle_seed)
        if not name:
            raise ConfigError(f"name={name!r}: expected a hub data set id or a local path")
        self.name, self.subset, self.split = str(name), subset, split
        self.streaming, self.revision = streaming, revision

    @property
    def title(self) -> str:
        return f"{self.name}[{self.split}]"

    def describe(self) -> dict[str, Any]:
        return {
            "source": "hub",
            "name": self.name,
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
        } | self.describe_choice()

    def rows(self) -> Iterator[Row]:
        found = hub_rows(self.name, self.subset, self.split, streaming=self.streaming, revision=self.revision)
        for index, values in enumerate(found):
            yield Row(f"{self.title} row {index}", f"{self.name}/{self.split}/{index:05d}", values)
