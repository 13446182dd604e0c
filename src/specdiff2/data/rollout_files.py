"""Files of a rollout store: shards of one JSON record per line, and JSON written atomically.

Only bytes and paths; what the records mean for a run is the store's business (``data.rollouts``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specdiff2.data.jsonl import parse_object
from specdiff2.types import CorruptFileError, Rollout, StorageError

_log = logging.getLogger(__name__)
ROLLOUTS_FILE = "rollouts.json"  # in the folder of a training run: its stores by split
_REMEDY = "delete this line (the rollout is sampled again on the next run) or the whole folder"


def encode_rollout(rollout: Rollout) -> bytes:
    record = {
        "rollout_id": rollout.rollout_id,
        "temperature": rollout.temperature,
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "meta": rollout.meta,
    }
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode_rollout(line: bytes, where: str) -> Rollout:
    """Raises:
    CorruptFileError: not a JSON object with the fields of a rollout.
    """
    record = parse_object(line, where, _REMEDY)
    ids = [record.get("prompt_ids"), record.get("completion_ids")]
    well_formed = (
        isinstance(record.get("rollout_id"), str)
        and isinstance(record.get("temperature"), (int, float))
        and isinstance(record.get("meta"), dict)
        and all(isinstance(part, list) and all(type(token) is int and token >= 0 for token in part) for part in ids)
    )
    if not well_formed:
        raise CorruptFileError(
            f"{where}: not a rollout (has: {', '.join(record)}); expected rollout_id, temperature, prompt_ids, "
            f"completion_ids and meta; {_REMEDY}"
        )
    rollout_id, prompt_ids, completion_ids = (record[key] for key in ("rollout_id", "prompt_ids", "completion_ids"))
    return Rollout(rollout_id, prompt_ids, completion_ids, float(record["temperature"]), record["meta"])


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.jsonl"


def list_shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.jsonl"))


def read_shards(folder: Path) -> Iterator[Rollout]:
    """Every complete record in order. The end of the last shard, if it lacks its newline, is not a record yet.

    Raises:
        CorruptFileError: a complete line that is no rollout, an id for the second time, or an unfinished
            line anywhere but at the very end.
    """
    seen: set[str] = set()
    shards = list_shards(folder)
    for shard in shards:
        *lines, tail = shard.read_bytes().split(b"\n")
        if tail and shard != shards[-1]:
            raise CorruptFileError(f"{shard}:{len(lines) + 1}: the line is cut off; {_REMEDY}")
        for number, line in enumerate(lines, start=1):
            rollout = decode_rollout(line, f"{shard}:{number}")
            if rollout.rollout_id in seen:
                raise CorruptFileError(f"{shard}:{number}: rollout {rollout.rollout_id!r} is there twice; {_REMEDY}")
            seen.add(rollout.rollout_id)
            yield rollout


def drop_unfinished_line(folder: Path) -> int:
    """Cut what a killed process left after the last newline; returns the number of bytes cut."""
    shards = list_shards(folder)
    if not shards:
        return 0
    data = shards[-1].read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        os.truncate(shards[-1], complete)
    return len(data) - complete


def acquire_lock(folder: Path) -> IO[bytes]:
    """The folder's one writer lock, waited for if another process has it; given back by ``release_lock``.

    Raises:
        StorageError: the lock file cannot be created.
    """
    try:
        file = open(folder / ".lock", "ab")  # noqa: SIM115 (stays open as long as the lock is held)
    except OSError as error:
        raise storage_error(folder / ".lock", error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.warning("waiting for another process that writes to %s", folder)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def release_lock(file: IO[bytes]) -> None:
    # unlocked explicitly: a forked child may hold a copy of the descriptor, and closing ours would not be enough
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def append_bytes(path: Path, data: bytes) -> None:
    """All of ``data`` at the end of ``path``, on disk when this returns, or nothing of it.

    Raises:
        StorageError: the disk is full or refuses; the file is as it was before.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:  # a raw write may take only a part
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        if size == 0:
            _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the next writer cuts the unfinished line if this fails too
            os.truncate(path, size)
        raise storage_error(path, error) from error


def write_json_atomic(path: Path, value: Any) -> None:
    """Strict JSON; see ``write_atomic``."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never a part.

    Raises:
        StorageError: the disk is full or refuses; an old file is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; what was written before is intact: make room or choose "
        "another folder, then run the same command again to continue"
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
