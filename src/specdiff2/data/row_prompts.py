"""What all sources of rows share: mapping to prompts, filter, order, ``skip`` and ``limit``. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specdiff2.data.fields import FieldMapping
from specdiff2.data.prompt import Prompt, check_count, require_unique_ids, take


class Row(NamedTuple):
    """``where`` names it in errors; ``default_id`` is its prompt's id where no field holds one."""

    where: str
    default_id: str
    values: Mapping[str, Any]


class RowPrompts:
    """One prompt per row that is kept: the rows, shuffled if asked for, then ``skip`` of them left out, then ``limit``.

    Args:
        shuffle_seed: None keeps the order of the rows; the same seed gives the same order everywhere.
    """

    def __init__(self, mapping: FieldMapping, limit: int | None, skip: int, shuffle_seed: int | None) -> None:
        check_count("limit", limit, 1)
        check_count("skip", skip, 0)
        check_count("shuffle_seed", shuffle_seed, 0)
        self.mapping, self.limit, self.skip, self.shuffle_seed = mapping, limit, skip, shuffle_seed

    @property
    def title(self) -> str:
        """What errors about the whole source call it."""
        raise NotImplementedError

    def rows(self) -> Iterator[Row]:
        """All rows in the order of the source, read as they are asked for."""
        raise NotImplementedError

    def keeps(self, row: Row) -> bool:
        """Whether the row is one of this source at all."""
        return True

    def describe_choice(self) -> dict[str, Any]:
        """Which rows, read how. ``shuffle_seed`` is a key only where it is set: older stores keep their fingerprint."""
        choice: dict[str, Any] = {"limit": self.limit, "skip": self.skip}
        if self.shuffle_seed is not None:
            choice["shuffle_seed"] = self.shuffle_seed
        return choice | self.mapping.describe()

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the source or a field is missing, a prompt is empty, an id occurs twice, no row is left.
        CorruptFileError: a file cannot be read.
        """
        chosen = take(filter(self.keeps, self.rows()), self.skip, self.limit, self.shuffle_seed)
        prompts = [self.mapping.to_prompt(row.values, where=row.where, default_id=row.default_id) for row in chosen]
        require_unique_ids(prompts, self.title)
        return prompts
