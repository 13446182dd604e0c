"""One evaluation by several processes: files of their own in one run folder, and what they say together.

    run/shards/000-of-008/      run.json, records.jsonl, benchmark.json, ... of rank 0 of 8, as of a run of its own
    run/shards/000-of-008.json  what this rank is doing
    run/shards/earlier/         what one process alone had measured before
    run/shards/merged.json      there once the files in ``run`` itself hold everything

Files are the only channel, so nothing that was written is lost with a process. The same generation twice (runs with
different numbers of processes at once) counts once. Knows no model, no process and no launcher.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.benchmark import MANIFEST_FILE, first_difference
from specdiff2.evaluation.decoder_info import portable
from specdiff2.evaluation.json_files import read_json, write_json, write_text
from specdiff2.evaluation.parts import prompts_digest
from specdiff2.evaluation.records import RECORDS_FILE, Record, read_records
from specdiff2.types import MismatchError, SpecDiffError

SHARDS, MERGED_FILE, EARLIER = "shards", "merged.json", "earlier"
HARDWARE = ("machine", "device", "dtype", "threads", "runtime")  # keys of run.json that seconds depend on
_REMEDY = "a file of an evaluation; use another run_id, or delete the folder to measure again"


def shard_name(rank: int, num_ranks: int) -> str:
    """``000-of-008``."""
    return f"{rank:03d}-of-{num_ranks:03d}"


def is_pending(run: Path) -> bool:
    """Whether several processes share this run and nobody has merged what they wrote."""
    return (run / SHARDS).is_dir() and not (run / SHARDS / MERGED_FILE).is_file()


def homes(run: Path, place: str) -> list[Path]:
    """Folders with records of one benchmark (``place`` below a run, ``.`` for the only one)."""
    found = sorted(folder for folder in (run / SHARDS).glob("*/") if not folder.name.startswith("."))
    if not (run / SHARDS / MERGED_FILE).is_file():  # after a merge it says again what the shards say
        found.append(run)
    return [folder / place for folder in found if (folder / place / RECORDS_FILE).is_file()]


def measured(
    folders: Iterable[Path], manifest: Mapping[str, Any], prompts: Mapping[str, Sequence[int]]
) -> list[Record]:
    """Records of other processes, warm-up left out, whose settings must be those of ``manifest``.

    Args:
        prompts: prompt id -> token ids, as this process encodes them; records of other prompts are not compared.

    Raises:
        MismatchError: they were measured with other settings or prompts.
        CorruptFileError: a file cannot be read.
    """
    found = []
    for folder in folders:
        other = read_json(folder / MANIFEST_FILE, _REMEDY) or {}
        by_source = bool(other.get("whole") and manifest.get("whole"))
        difference = first_difference(_settings(other, by_source), _settings(manifest, by_source))
        records = [record for record in read_records(folder / RECORDS_FILE) if not record.warmup]
        if difference is None:
            changed = [r for r in records if r.prompt_id in prompts and r.prompt_ids != list(prompts[r.prompt_id])]
            difference = (f"prompt {changed[0].prompt_id}", changed[0].prompt_ids, "others") if changed else None
        if difference is not None:
            key, old, new = difference
            raise MismatchError(
                f"{folder / RECORDS_FILE} was measured with {key}={old!r}, now {key}={new!r}: expected the same "
                "settings of all processes, and to continue; use another run_id, or delete the folder to measure again"
            )
        found += records
    return found


def _settings(manifest: Mapping[str, Any], by_source: bool) -> dict[str, Any]:
    """What two processes must agree on. ``by_source``: both are parts, which tell the digest of all prompts."""
    parts = {"prompts_sha256", "num_prompts", "threads", "whole"}
    known: dict[str, Any] = {key: value for key, value in manifest.items() if key not in parts}
    known["decoders"] = {name: portable(described) for name, described in manifest.get("decoders", {}).items()}
    known["num_prompts"] = (manifest.get("whole") or manifest).get("num_prompts")
    if by_source:
        known["prompts"] = manifest["whole"]["prompts_sha256"]
    plain: dict[str, Any] = json.loads(json.dumps(known))
    return plain


def merge(run: Path, num_prompts: Mapping[str, int]) -> dict[str, Any]:
    """Write what all processes measured into ``run`` itself, as one process would have; returns what they were.

    Records are ordered by prompt, then by method. The result is ``{"ranks": [...], "differing": {...},
    "num_mixed_prompts": ...}``: the processes, what differed between their machines, and the prompts whose methods
    were measured on differing ones (continued by another process after one had died).

    Args:
        num_prompts: prompts of each benchmark, by its place.

    Raises:
        SpecDiffError: generations are missing.
        MismatchError, CorruptFileError: see ``measured``.
    """
    _keep_earlier(run)
    used: dict[Path, int] = {}
    hardware: dict[tuple[str, str], set[str]] = {}
    lines: list[str] = []
    for place, expected in num_prompts.items():
        manifest, found = _collect(run, place, expected)
        for source, record in found:
            used[source] = used.get(source, 0) + 1
            hardware.setdefault((place, record.prompt_id), set()).add(json.dumps(_facts(source)))
        lines.append(_write(run / place, manifest, [record for _, record in found]))
    if len(num_prompts) > 1:
        write_text(run / RECORDS_FILE, "".join(lines))
    ranks = [{"shard": str(source.name), **_facts(source, "host"), "num_generations": n} for source, n in used.items()]
    differing = {key: list(dict.fromkeys(rank[key] for rank in ranks)) for key in HARDWARE}
    return {
        "ranks": sorted(ranks, key=lambda rank: rank["shard"]),
        "differing": {key: values for key, values in differing.items() if len(values) > 1},
        "num_mixed_prompts": sum(len(facts) > 1 for facts in hardware.values()),
    }


def _write(home: Path, manifest: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Manifest and records of a whole benchmark, as one process writes them; returns the records' lines."""
    pairs = {record.prompt_id: record.prompt_ids for record in records}
    whole = {"num_prompts": len(pairs), "prompts_sha256": prompts_digest(pairs.items())}
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / MANIFEST_FILE, {key: value for key, value in {**manifest, **whole}.items() if key != "whole"})
    lines = "".join(record.to_json() + "\n" for record in records)
    write_text(home / RECORDS_FILE, lines)
    return lines


def _collect(run: Path, place: str, expected: int) -> tuple[dict[str, Any], list[tuple[Path, Record]]]:
    """A manifest, and (shard or run folder, record) of every generation in order."""
    folders = homes(run, place)
    manifest = read_json(folders[0] / MANIFEST_FILE, _REMEDY) if folders else {"decoders": {}}
    found: dict[tuple[str, str], tuple[Path, Record]] = {}
    for folder in folders:
        source = folder if place == "." else folder.parents[len(Path(place).parts) - 1]
        for record in measured([folder], manifest, {}):
            found.setdefault((record.method, record.prompt_id), (source, record))
    missing = expected * max(len(manifest["decoders"]), 1) - len(found)
    if missing:
        raise SpecDiffError(
            f"{run / SHARDS}: {missing} generations of {expected} prompts of {place} are missing; run the same command "
            "again with the same run_id to decode them"
        )
    methods = list(manifest["decoders"])
    return manifest, sorted(found.values(), key=lambda one: (one[1].prompt_index, methods.index(one[1].method)))


def _facts(source: Path, *more: str) -> dict[str, Any]:
    """What seconds measured there depend on."""
    known = read_json(source / "run.json", _REMEDY) or {}
    return {key: known.get(key) for key in (*more, *HARDWARE)}


def _keep_earlier(run: Path) -> None:
    """Copy what one process alone had measured in ``run`` before its files are replaced."""
    kept = run / SHARDS / EARLIER
    if kept.exists() or (run / SHARDS / MERGED_FILE).is_file() or not (run / RECORDS_FILE).is_file():
        return
    partial = kept.with_name(f".{EARLIER}.{os.getpid()}")
    shutil.copytree(run, partial, ignore=shutil.ignore_patterns(SHARDS, ".hydra"), dirs_exist_ok=True)
    partial.rename(kept)
