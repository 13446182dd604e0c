"""Prompts from a local JSONL file with a field mapping. Errors name file and line."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.fields import FieldMapping
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.prompt import Prompt, check_count, require_unique_ids, take
from specdiff2.types import ConfigError


class JsonlPrompts:
    """One prompt per line.

    Args:
        path: a ``.jsonl`` or ``.jsonl.gz`` file, one JSON object a line.
        prompt_field: field path of the prompt, for instance ``question`` or ``turns.0`` (see ``data.fields``).
        answer_field: field path of the reference answer; after ``####`` where that occurs.
        id_field: field path of the id; file name and line number when None.
        limit: at most this many prompts, after leaving out the first ``skip`` rows.
        template: wraps the prompt, ``{prompt}`` stands for it.
        meta_fields: field paths copied into ``Prompt.meta``.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_field: str,
        answer_field: str | None = None,
        id_field: str | None = None,
        limit: int | None = None,
        skip: int = 0,
        template: str | None = None,
        meta_fields: Sequence[str] = (),
    ) -> None:
        check_count("limit", limit, 1)
        check_count("skip", skip, 0)
        self.path = Path(path).expanduser()
        self.limit, self.skip = limit, skip
        self.mapping = FieldMapping(prompt_field, answer_field, id_field, template, tuple(meta_fields))

    def describe(self) -> dict[str, Any]:
        """The file counts by name and content, not by folder, so that a moved file is still the same source."""
        if not self.path.is_file():
            raise ConfigError(f"prompt file {str(self.path)!r}: not found (looked in {Path.cwd()})")
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]
        source = {"source": "jsonl", "file": self.path.name, "sha256": digest, "limit": self.limit, "skip": self.skip}
        return source | self.mapping.describe()

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: no such file, a field is missing, a prompt is empty, an id occurs twice.
        CorruptFileError: a line is not a JSON object.
        """
        rows = take(read_jsonl(self.path), self.skip, self.limit)
        prompts = [
            self.mapping.to_prompt(row, where=f"{self.path}:{line}", default_id=f"{self.path.stem}/{line:05d}")
            for line, row in rows
        ]
        require_unique_ids(prompts, str(self.path))
        return prompts
