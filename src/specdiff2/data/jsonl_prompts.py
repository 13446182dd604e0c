"""Prompts from a local JSONL file with a field mapping. Errors name file and line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.fields import FieldMapping, FieldNames
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.row_prompts import Row, RowPrompts
from specdiff2.types import ConfigError


class JsonlPrompts(RowPrompts):
    """One prompt per line.

    Args:
        path: a ``.jsonl`` or ``.jsonl.gz`` file, one JSON object a line.
        prompt_field: field path of the prompt, for instance ``question`` or ``turns.0`` (see ``data.fields``).
        answer_field: field path of the reference answer; after ``####`` where that occurs.
        id_field: field path of the id; file name and line number when None.
        limit: at most this many prompts, after leaving out the first ``skip`` rows.
        template: wraps the prompt, ``{prompt}`` stands for it.
        meta_fields: field paths copied into ``Prompt.meta``.
        shuffle_seed: see ``RowPrompts``.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_field: FieldNames,
        answer_field: str | None = None,
        id_field: FieldNames | None = None,
        limit: int | None = None,
        skip: int = 0,
        template: str | None = None,
        meta_fields: Sequence[str] = (),
        shuffle_seed: int | None = None,
    ) -> None:
        mapping = FieldMapping(prompt_field, answer_field, id_field, template, tuple(meta_fields))
        super().__init__(mapping, limit, skip, shuffle_seed)
        self.path = Path(path).expanduser()

    @property
    def title(self) -> str:
        return str(self.path)

    def describe(self) -> dict[str, Any]:
        """The file counts by name and content, not by folder, so that a moved file is still the same source."""
        return {"source": "jsonl", "file": self.path.name, "sha256": file_digest(self.path)} | self.describe_choice()

    def rows(self) -> Iterator[Row]:
        for line, values in read_jsonl(self.path):
            yield Row(f"{self.path}:{line}", f"{self.path.stem}/{line:05d}", values)


def file_digest(path: Path) -> str:
    """Hash of a file's content.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"prompt file {str(path)!r}: not found (looked in {Path.cwd()})")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
