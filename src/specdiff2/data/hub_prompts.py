"""Prompts from a hub data set or a local file or folder, through the library ``datasets``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.fields import FieldMapping
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.prompt import Prompt, check_count, require_unique_ids, take
from specdiff2.types import ConfigError, CorruptFileError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class HubPrompts:
    """One prompt per row.

    Args:
        name: hub id (``openai/gsm8k``), or a local folder, ``.jsonl``, ``.parquet`` or ``.csv`` file.
        subset: the data set's configuration, where it has several.
        split: its split; a single local file has only ``train``.
        streaming: read rows as needed instead of downloading the whole set first.
        revision: commit or tag on the hub.

    The other arguments are those of ``JsonlPrompts``.
    """

    def __init__(
        self,
        name: str,
        subset: str | None = None,
        split: str = "train",
        prompt_field: str = "prompt",
        answer_field: str | None = None,
        id_field: str | None = None,
        limit: int | None = None,
        skip: int = 0,
        template: str | None = None,
        meta_fields: Sequence[str] = (),
        streaming: bool = False,
        revision: str | None = None,
    ) -> None:
        check_count("limit", limit, 1)
        check_count("skip", skip, 0)
        if not name:
            raise ConfigError(f"name={name!r}: expected a hub data set id or a local path")
        self.name, self.subset, self.split = str(name), subset, split
        self.limit, self.skip, self.streaming, self.revision = limit, skip, streaming, revision
        self.mapping = FieldMapping(prompt_field, answer_field, id_field, template, tuple(meta_fields))

    def describe(self) -> dict[str, Any]:
        return {
            "source": "hub",
            "name": self.name,
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
            "limit": self.limit,
            "skip": self.skip,
        } | self.mapping.describe()

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the data set, subset, split or a field is missing (or cannot be reached offline).
        CorruptFileError: a local file cannot be read.
        """
        rows = self._rows()
        prompts = [
            self.mapping.to_prompt(
                row, where=f"{self.name}[{self.split}] row {index}", default_id=f"{self.name}/{self.split}/{index:05d}"
            )
            for index, row in enumerate(rows, start=self.skip)
        ]
        require_unique_ids(prompts, f"{self.name}[{self.split}]")
        return prompts

    def _rows(self) -> list[Any]:
        """With ``streaming`` most errors appear while rows are read, so reading them is inside the ``try``."""
        import datasets  # imported here: takes a second
        import httpx  # what huggingface_hub talks to the network with; its errors are no OSError

        builder = _BUILDERS.get(Path(self.name).suffix)
        local = Path(self.name).expanduser()
        if builder is not None and not local.is_file():
            raise ConfigError(f"data set {self.name!r}: no such file (looked in {Path.cwd()})")
        is_local = local.exists()
        try:
            if builder is not None:
                rows = datasets.load_dataset(builder, data_files=str(local), split=self.split, streaming=self.streaming)
            else:
                rows = datasets.load_dataset(
                    str(local) if is_local else self.name,
                    self.subset,
                    split=self.split,
                    streaming=self.streaming,
                    revision=None if is_local else self.revision,
                )
            return take(rows, self.skip, self.limit)
        except datasets.exceptions.DatasetGenerationError as error:
            if builder == "json":
                for _ in read_jsonl(local):  # raises with file and line where a line is broken
                    pass
            raise CorruptFileError(f"data set {self.name!r}: {error}; fetch or write the file again") from error
        except (OSError, ValueError, httpx.HTTPError) as error:  # unreachable, offline, unknown subset or split
            if local.is_file() and local.suffix == ".jsonl":
                for _ in read_jsonl(local):  # a broken line met while streaming is a ValueError
                    pass
            raise ConfigError(
                f"data set {self.name!r} (subset {self.subset!r}, split {self.split!r}) cannot be loaded: {error}. "
                "Check the name; without network use a local folder or file, or fill the cache once while online "
                "(HF_HUB_OFFLINE=1 then reads it)"
            ) from error
