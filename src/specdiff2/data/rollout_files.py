"""Files of a rollout store: shards of one JSON record per line, and JSON written atomically.

Each writer appends to shards of its own: ``shard-00000.jsonl`` ... of writer 0, ``shard-w001-00000.jsonl`` ... of
writer 1. Only bytes and paths; what the records mean for a run is the store's business (``data.rollouts``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from specdiff2.data.jsonl import parse_object
from specdiff2.types import CorruptFileError, Rollout, StorageError

_log = logging.getLogger(__name__)
ROLLOUTS_FILE = "rollouts.json"  # in the folder of a training run: its stores by split
REMEDY = "delete this line (the rollout is sampled again on the next run) or the whole folder"


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
    record = parse_object(line, where, REMEDY)
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
            f"completion_ids and meta; {REMEDY}"
        )
    rollout_id, prompt_ids, completion_ids = (record[key] for key in ("rollout_id", "prompt_ids", "completion_ids"))
    return Rollout(rollout_id, prompt_ids, completion_ids, float(record["temperature"]), record["meta"])


def shard_path(folder: Path, writer: int, index: int) -> Path:
    """Shard ``index`` of one writer. Writer 0 has the names that stores of one writer always had."""
    return folder / (f"shard-{index:05d}.jsonl" if writer == 0 else f"shard-w{writer:03d}-{index:05d}.jsonl")


def list_shards(folder: Path) -> list[Path]:
    """Writer by writer, each writer's in the order they were begun: the order of the rollouts of a store."""
    return sorted(folder.glob("shard-*.jsonl"))


def shard_writer(shard: Path) -> int:
    parts = shard.stem.split("-")
    return 0 if len(parts) == 2 else int(parts[1].removeprefix("w"))


def last_shards(shards: Sequence[Path]) -> set[Path]:
    """The shards that writers append to, one a writer: only these may end in an unfinished line."""
    return set({shard_writer(shard): shard for shard in shards}.values())


def shard_lines(
    shard: Path, *, offset: int = 0, number: int = 0, last: bool = True
) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset of its first byte, the line without its newline) of each complete line.

    Args:
        offset, number: begin there: the end of the last line that is known, and how many lines come before.
        last: the shard may end in an unfinished line, which is not given. A writer may be in the middle of it.

    Raises:
        CorruptFileError: an unfinished line in a shard that is not a writer's last.
    """
    with open(shard, "rb") as file:
        file.seek(offset)
        for line in file:
            number += 1
            if not line.endswith(b"\n"):
                if not last:
                    raise CorruptFileError(f"{shard}:{number}: the line is cut off; {REMEDY}")
                return
            yield number, offset, line[:-1]
            offset += len(line)


def drop_unfinished_line(shard: Path) -> int:
    """Cut what a killed process left after the last newline; returns the number of bytes cut. For the shard's owner."""
    complete = sum(len(line) + 1 for _, _, line in shard_lines(shard))
    num_bytes = shard.stat().st_size - complete
    if num_bytes:
        os.truncate(shard, complete)
    return num_bytes


def try_lock(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """The lock of this file, held until it is closed or the process ends; None: another process (or object) has it
    (never with ``wait``, which waits until it has not).

    Raises:
        StorageError: the file cannot be created, or the file system has no locks.
    """
    try:
        file = open(path, "ab")  # noqa: SIM115 (stays open as long as the lock is held)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            file.close()
            raise
    except OSError as error:
        raise storage_error(path, error) from error
    return file


def acquire_lock(folder: Path) -> IO[bytes]:
    """The folder's one lock for changes to its other files, waited for; given back by ``release_lock``. Raises
    StorageError as ``try_lock``."""
    path = folder / ".lock"
    for _ in range(20):  # others mostly need it for moments, which is not worth a line
        file = try_lock(path)
        if file is not None:
            return file
        time.sleep(0.05)
    _log.warning("waiting for another process that writes to %s", folder)
    file = try_lock(path, wait=True)
    assert file is not None
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
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # pids of two machines may be equal
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
