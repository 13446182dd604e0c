"""Benchmarks by name: from a local file or folder where one is given, else from the hub.

One class for all of them; ``conf/benchmark/*.yaml`` holds what differs. A benchmark that is not there is refused within
seconds, with the option for a local copy and the command that fetches one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.benchmark_rows import BenchmarkMapping, Form
from specdiff2.data.fields import FieldNames, get_field
from specdiff2.data.hub_rows import BUILDERS, hub_rows
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.jsonl_prompts import file_digest
from specdiff2.data.row_prompts import Row, RowPrompts
from specdiff2.types import ConfigError

# the groups of Spec-Bench's own tables (hemingkx/Spec-Bench, evaluation/speed.py; arXiv 2401.07851)
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_GROUPS = {
    "mt_bench": MT_BENCH_CATEGORIES,
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}


class BenchmarkPrompts(RowPrompts):
    """The prompts of one benchmark; a row's number is its id where no field holds one, wherever the rows come from.

    Args:
        name: of the benchmark: names its rows in records and errors.
        hub: id of its hub data set; None where there is none to load.
        path: a local copy, JSONL (also ``.gz``), JSON, CSV, Parquet or the folder of a data set; wins over ``hub``.
        fetch: what gets a copy; None: the command for the hub data set.
        gated: the hub asks for an account that has accepted the data set's terms.
        categories: only rows whose ``category`` is one of these.
        form, choice_seed: see ``BenchmarkMapping``.

    The other arguments are those of ``HubPrompts``.
    """

    def __init__(
        self,
        name: str,
        prompt_field: FieldNames,
        hub: str | None = None,
        path: str | None = None,
        subset: str | None = None,
        split: str = "test",
        answer_field: str | None = None,
        id_field: FieldNames | None = None,
        meta_fields: Sequence[str] = (),
        template: str | None = None,
        form: Form = "text",
        choice_seed: int = 0,
        categories: Sequence[str] | None = None,
        limit: int | None = None,
        skip: int = 0,
        shuffle_seed: int | None = None,
        streaming: bool = False,
        revision: str | None = None,
        fetch: str | None = None,
        gated: bool = False,
    ) -> None:
        mapping = BenchmarkMapping(prompt_field, answer_field, id_field, template, meta_fields, form, choice_seed)
        super().__init__(mapping, limit, skip, shuffle_seed)
        self.name, self.hub, self.subset, self.split, self.revision = name, hub, subset, split, revision
        self.path = None if path is None else Path(path).expanduser()
        self.categories = None if categories is None else tuple(categories)
        self.streaming, self.fetch, self.gated = streaming, fetch, gated

    @property
    def title(self) -> str:
        return f"benchmark {self.name}" + ("" if self.categories is None else f" ({', '.join(self.categories)})")

    def describe(self) -> dict[str, Any]:
        if self.path is None:
            origin: dict[str, Any] = {"hub": self.hub, "subset": self.subset, "split": self.split,
                                      "revision": self.revision}  # fmt: skip
        else:
            digest = file_digest(self.path) if self.path.is_file() else None
            origin = {"local": self.path.name, "sha256": digest}
        chosen = {} if self.categories is None else {"categories": list(self.categories)}
        return {"source": "benchmark", "name": self.name} | origin | chosen | self.describe_choice()

    def keeps(self, row: Row) -> bool:
        return self.categories is None or get_field(row.values, "category", row.where) in self.categories

    def rows(self) -> Iterator[Row]:
        for index, (where, values) in enumerate(self._read()):
            yield Row(f"{self.title}, {where}", f"{self.name}/{index:05d}", values)

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(file and line, or number of the row; the row)."""
        if self.path is None:
            try:
                if self.hub is None:
                    raise ConfigError("it is not on the hub as a data set")
                found = hub_rows(self.hub, self.subset, self.split, streaming=self.streaming, revision=self.revision)
                for index, row in enumerate(found):
                    yield f"row {index}", row
            except ConfigError as error:
                raise ConfigError(f"benchmark {self.name}: {error}. {self._remedy()}") from error
        elif ".jsonl" in self.path.suffixes:
            for line, row in read_jsonl(self._existing()):
                yield f"{self.path}:{line}", row
        else:
            split = "train" if self._existing().suffix in BUILDERS else self.split
            for index, row in enumerate(hub_rows(str(self.path), self.subset, split, streaming=self.streaming)):
                yield f"{self.path} row {index}", row

    def _existing(self) -> Path:
        assert self.path is not None
        if not self.path.exists():
            raise ConfigError(
                f"benchmark {self.name}: path={str(self.path)!r}: not found (looked in {Path.cwd()}). {self._remedy()}"
            )
        return self.path

    def _remedy(self) -> str:
        folder = f"data/{self.name}"
        fetch, copy = self.fetch, "the file"
        if fetch is None:
            fetch, copy = f"hf download {self.hub} --repo-type dataset --local-dir {folder}", folder
        login = ""
        if self.gated:
            login = (
                f"It is gated: accept its terms at https://huggingface.co/datasets/{self.hub} and run `hf auth login` "
                "first. "
            )
        return (
            f"{login}Fetch it where there is a network: `{fetch}`, then give {copy} as benchmark.path=... (in a suite "
            f"benchmark.PART.path=...); a file of your own needs the fields {self._fields()}"
        )

    def _fields(self) -> str:
        wanted = [self.mapping.prompt_field, self.mapping.answer_field]
        return ", ".join(one if isinstance(one, str) else " or ".join(one) for one in wanted if one is not None)


def spec_bench(
    path: str | None = None, limit: int | None = None, skip: int = 0, shuffle_seed: int | None = None,
    groups: Sequence[str] | None = None,
) -> dict[str, BenchmarkPrompts]:  # fmt: skip
    """Spec-Bench: one benchmark per task group, ``limit`` and ``skip`` in each.

    Args:
        path: its ``question.jsonl``.
        groups: some of the six; None: all.

    Raises:
        ConfigError: a group of another name.
    """
    wanted = list(SPEC_BENCH_GROUPS) if groups is None else list(groups)
    unknown = [group for group in wanted if group not in SPEC_BENCH_GROUPS]
    if unknown or not wanted:
        raise ConfigError(f"groups={wanted}: expected some of {', '.join(SPEC_BENCH_GROUPS)}")
    return {
        group: BenchmarkPrompts(
            f"spec_bench_{group}", "turns", path=path, id_field="question_id", meta_fields=("category",), form="turns",
            categories=SPEC_BENCH_GROUPS[group], limit=limit, skip=skip, shuffle_seed=shuffle_seed,
            fetch="curl -LO https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        )
        for group in wanted
    }  # fmt: skip
