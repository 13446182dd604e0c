"""One side of a comparison: the records of one method of one run, and what has to be equal before two are paired.

Two arms may come from different run folders. They are paired by (benchmark, prompt id), so they must have been decoded
from the same prompt tokens by the same verifier in the same dtype, with the same sampling, seed, stop rules and
length. Speeds must come from the same machine, threads and runtime as well, and are best read against each run's own
baseline, which was interleaved with the method. Reads files only; knows no statistic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.records import RECORDS_FILE, Record, read_records
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

Key = tuple[str, str]  # benchmark, prompt id
Facts = dict[str, Any]
LAW_FACTS = ("verifier", "verifier_dtype", "temperature", "top_k", "top_p",
             "max_new_tokens", "seed", "stop_ids", "stop_strings")  # fmt: skip
TIME_FACTS = ("machine", "threads", "verifier_device", "verifier_runtime_mode")
_REMEDY = "what eval.py wrote; delete it and measure again"


@dataclass(frozen=True, slots=True)
class Arm:
    """``facts`` are the settings behind the records, by benchmark; ``baseline`` holds the same run's baseline."""

    label: str
    records: dict[Key, Record]
    baseline: dict[Key, Record]
    facts: dict[str, Facts]


@dataclass(frozen=True, slots=True)
class Run:
    """All measured records of a run folder, by method, and the settings of every (benchmark, method)."""

    folder: Path
    records: dict[str, dict[Key, Record]]
    facts: dict[tuple[str, str], Facts]

    def arm(self, method: str, benchmark: str | None = None) -> Arm:
        """The records of ``method``, of one benchmark or of all that the run has measured.

        Raises:
            ConfigError: the run has no such method or benchmark.
        """
        kept, base = (
            {key: record for key, record in self.records.get(name, {}).items() if benchmark in (None, key[0])}
            for name in (method, BASELINE)
        )
        if not kept:
            names = sorted({key[0] for records in self.records.values() for key in records})
            raise ConfigError(
                f"{self.folder}: no records of method {method!r} on benchmark {benchmark or 'any'!r}: expected one of "
                f"the methods {sorted(self.records)} and the benchmarks {names}"
            )
        facts = {name: self.facts[name, method] for name in dict.fromkeys(key[0] for key in kept)}
        return Arm(f"{self.folder.name}:{method}", kept, base, facts)


def read_run(folder: Path | str) -> Run:
    """Everything that comparisons need of one evaluation folder; warm-up is left out.

    Raises:
        ConfigError: a file of a finished evaluation is missing.
        CorruptFileError: a file is damaged, or a prompt occurs twice under one method.
    """
    folder = Path(folder)
    # a suite measures each benchmark in a folder of its own
    paths = [*folder.glob("benchmark.json"), *sorted(folder.glob("benchmarks/*/benchmark.json"))]
    manifests = [read_json(path, _REMEDY) for path in paths]
    if not (folder / RECORDS_FILE).is_file() or not manifests:
        raise ConfigError(f"{folder}: expected the run folder of an evaluation, with {RECORDS_FILE} and benchmark.json")
    machine = (read_json(folder / "run.json", _REMEDY) or {}).get("machine")
    facts = {
        (one["benchmark"], method): {**one, **settings, "machine": machine}
        for one in manifests
        for method, settings in one["decoders"].items()
    }
    records: dict[str, dict[Key, Record]] = {}
    for record in read_records(folder / RECORDS_FILE):
        if record.warmup:
            continue
        if (record.benchmark, record.method) not in facts:
            raise CorruptFileError(f"{folder}: method {record.method!r} on {record.benchmark!r} has records, but "
                                   f"benchmark.json does not tell its settings: expected {_REMEDY}")  # fmt: skip
        key, kept = (record.benchmark, record.prompt_id), records.setdefault(record.method, {})
        if key in kept:
            raise CorruptFileError(
                f"{folder}: prompt {record.prompt_id!r} occurs twice under {record.method!r}: expected one record per "
                "prompt; compare runs of different settings apart"
            )
        kept[key] = record
    return Run(folder, records, facts)


def check_pairs(arms: Sequence[Arm], *, timed: bool) -> None:
    """Refuse arms that must not be paired; ``timed`` asks for the same machine and runtime too.

    Raises:
        MismatchError: names the two arms, what differs, and both values.
    """
    first = arms[0]
    for arm in arms[1:]:
        for what, mine, theirs in _differences(first, arm, LAW_FACTS + (TIME_FACTS if timed else ())):
            raise MismatchError(
                f"{first.label} and {arm.label} cannot be paired: {what} is {mine!r} and {theirs!r}; expected the same "
                "prompts, verifier and settings on both sides: measure one of them again"
            )


def _differences(first: Arm, second: Arm, names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(what, value of the first, value of the second) of everything that differs."""
    only = sorted(first.records.keys() ^ second.records.keys())
    if only:
        mine, theirs = ("there" if only[0] in arm.records else "missing" for arm in (first, second))
        yield f"prompt {only[0]} ({len(only)} are not in both)", mine, theirs
    for benchmark, facts in first.facts.items():
        other = second.facts.get(benchmark, {})
        for name in names:
            if facts.get(name) != other.get(name):
                yield f"{name} on {benchmark}", facts.get(name), other.get(name)
    for key, record in first.records.items():
        if key in second.records and record.prompt_ids != second.records[key].prompt_ids:
            yield f"the text of prompt {key}", record.prompt_ids, second.records[key].prompt_ids
