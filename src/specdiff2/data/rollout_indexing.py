"""The table behind a ``RolloutIndex``: made in one pass over the shards, kept beside them, continued when they grow.

``<store>/.index/rows.bin`` holds one ``ROW`` record a line, then what was read of each shard as JSON, then the number
of bytes of that JSON. It is replaced as a whole. A shard whose size and time have not changed is not opened; of one
that has changed, the part indexed before is compared by its digest: lines behind it are added, and where it is another
text the shard is read anew. One process builds it, others wait for that. Nothing here needs memory for whole shards;
the check for ids that are there twice needs 8 bytes a rollout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from specdiff2.data.lazy_rollouts import CHUNK, fact_chunks, rollout_facts
from specdiff2.data.rollout_files import (
    REMEDY,
    acquire_lock,
    decode_rollout,
    last_shards,
    list_shards,
    release_lock,
    shard_lines,
    storage_error,
)
from specdiff2.data.rollout_index import ROW, IndexedShard, RolloutIndex
from specdiff2.types import CorruptFileError

VERSION = 1
BLOCK = 1 << 20  # bytes copied or hashed at once
_log = logging.getLogger(__name__)


def open_index(folder: str | Path) -> RolloutIndex:
    """All complete rollouts of a store, read when they are asked for.

    Raises:
        CorruptFileError: a line that is no rollout, or an id for the second time.
        StorageError: no room for the table.
    """
    folder = Path(folder)
    path = folder / ".index" / "rows.bin"
    index = _read(folder, path)
    if index is not None and _is_current(index):
        return index
    try:
        path.parent.mkdir(exist_ok=True)
        lock = acquire_lock(path.parent)
    except OSError as error:
        _log.warning("%s cannot be written (%s): its index lasts as long as this process", folder, error)
        return _build(folder, index, tempfile.TemporaryFile())
    try:
        index = _read(folder, path)  # another process may have built it meanwhile
        return index if index is not None and _is_current(index) else _replace(folder, index, path)
    finally:
        release_lock(lock)


def _replace(folder: Path, old: RolloutIndex | None, path: Path) -> RolloutIndex:
    temporary = path.with_suffix(".tmp")  # only who holds the lock writes it
    try:
        with open(temporary, "w+b") as file:
            _build(folder, old, file)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    index = _read(folder, path)
    assert index is not None  # just written
    return index


def _read(folder: Path, path: Path) -> RolloutIndex | None:
    """The index as it was left; None where there is none or it is damaged (then it is made again)."""
    if not path.exists():
        return None
    table = open(path, "rb")  # noqa: SIM115 (stays open as long as the index)
    try:
        end = os.fstat(table.fileno()).st_size - 8
        (length,) = struct.unpack("<q", os.pread(table.fileno(), 8, end))
        record = json.loads(os.pread(table.fileno(), min(length, end), end - length))
        index = RolloutIndex(folder, table, [IndexedShard(**shard) for shard in record["shards"]])
        if record["version"] == VERSION and len(index) * ROW.itemsize == end - length:
            return index
    except (OSError, struct.error, ValueError, TypeError, KeyError):
        pass
    table.close()
    _log.warning("%s: not an index that this version can read; it is made again", path)
    return None


def _is_current(index: RolloutIndex) -> bool:
    shards = list_shards(index.folder)
    return [shard.name for shard in shards] == [shard.name for shard in index.shards] and all(
        _is_unchanged(known, path) for known, path in zip(index.shards, shards, strict=True)
    )


def _is_unchanged(known: IndexedShard, path: Path) -> bool:
    status = path.stat()
    return (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns)


def _build(folder: Path, old: RolloutIndex | None, file: IO[bytes]) -> RolloutIndex:
    """Write the whole table to an empty file, with what ``old`` knows of the shards."""
    paths = list_shards(folder)
    last, known, first_row = last_shards(paths), {}, 0
    for shard in () if old is None else old.shards:
        known[shard.name] = (shard, first_row)
        first_row += shard.num_rows
    _log.info("%s: indexing %.2f GB of rollouts", folder, sum(path.stat().st_size for path in paths) / 1e9)
    shards = []
    for path in paths:
        before, first_row = known.get(path.name, (None, 0))
        if before is not None and not _still_begins(path, before):
            before = None
        if old is not None and before is not None:
            file.write(old.records(first_row, first_row + before.num_rows).tobytes())
        shards.append(_extend(path, before, path in last, file))
    record = json.dumps({"version": VERSION, "shards": [asdict(shard) for shard in shards]}).encode()
    file.write(record + struct.pack("<q", len(record)))
    file.flush()
    index = RolloutIndex(folder, file, shards)
    _refuse_twice(index)
    return index


def _still_begins(path: Path, known: IndexedShard) -> bool:
    """Whether a shard still begins with the bytes that were indexed."""
    if _is_unchanged(known, path):
        return True
    return path.stat().st_size >= known.num_bytes and _hash(path, known.num_bytes).hexdigest() == known.digest


def _hash(path: Path, num_bytes: int) -> hashlib.blake2b:
    """Of the first bytes of a file, to be continued."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for start in range(0, num_bytes, BLOCK):
            digest.update(file.read(min(BLOCK, num_bytes - start)))
    return digest


def _extend(path: Path, before: IndexedShard | None, is_last: bool, file: IO[bytes]) -> IndexedShard:
    """Append the records of the lines behind those indexed ``before`` to ``file``."""
    if before is not None and _is_unchanged(before, path) and (is_last or before.size == before.num_bytes):
        return before
    status = path.stat()
    num_rows, num_bytes = (0, 0) if before is None else (before.num_rows, before.num_bytes)
    digest, records = _hash(path, num_bytes), []
    for number, offset, line in shard_lines(path, offset=num_bytes, number=num_rows, last=is_last):
        digest.update(line + b"\n")
        num_rows, num_bytes = number, offset + len(line) + 1
        records.append((offset, len(line) + 1, *rollout_facts(decode_rollout(line, f"{path}:{number}"))))
        if len(records) == CHUNK:
            file.write(np.array(records, dtype=ROW).tobytes())
            records.clear()
    file.write(np.array(records, dtype=ROW).tobytes())
    return IndexedShard(path.name, num_rows, num_bytes, digest.hexdigest(), status.st_size, status.st_mtime_ns)


def _refuse_twice(index: RolloutIndex) -> None:
    """Raises:
    CorruptFileError: an id is there twice; names the second place.
    """
    digests = np.empty(len(index), dtype=np.uint64)
    for rows, facts in fact_chunks(index):
        digests[rows] = facts["digest"]
    digests.sort()
    twice = digests[1:][digests[1:] == digests[:-1]]
    if len(twice) == 0:
        return
    seen: set[str] = set()  # the ids themselves, as two ids may have one digest
    for row in _rows_of(index, twice):
        rollout_id = index.read(row).rollout_id
        if rollout_id in seen:
            raise CorruptFileError(f"{index.where(row)}: rollout {rollout_id!r} is there twice; {REMEDY}")
        seen.add(rollout_id)


def _rows_of(index: RolloutIndex, digests: np.ndarray) -> Iterator[int]:
    for rows, facts in fact_chunks(index):
        yield from rows[np.isin(facts["digest"], digests)].tolist()
