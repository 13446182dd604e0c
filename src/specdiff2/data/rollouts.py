"""Rollouts on disk: append-only shards and a manifest that says what they were sampled from.

A store survives being killed at any point: records are appended whole and synced, an unfinished last line is
dropped by the next writer, the manifest is replaced atomically. One process writes at a time; readers need no
lock. The store never decides what to sample (``data.generate`` does).
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from specdiff2.data.rollout_files import (
    acquire_lock,
    append_bytes,
    drop_unfinished_line,
    encode_rollout,
    list_shards,
    read_shards,
    release_lock,
    shard_path,
    storage_error,
    write_atomic,
    write_json_atomic,
)
from specdiff2.data.signatures import SIGNATURES_FILE, Signatures
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, Rollout

FORMAT_VERSION = 1
_log = logging.getLogger(__name__)


class RolloutStore:
    """A folder of rollouts that all have the same origin.

    Args:
        folder: created when it does not exist.
        fingerprint: what the rollouts depend on (verifier, tokenizer, sampling, prompts ...), JSON-ready;
            kept in the manifest. An existing folder must have exactly this one.
        max_shard_bytes: a new shard is begun before one grows beyond this.

    Raises:
        MismatchError: the folder holds rollouts of another origin; names the key and both values.
        CorruptFileError: the manifest is unreadable, or missing beside shards.
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any], *, max_shard_bytes: int = 64 << 20) -> None:
        self.folder = Path(folder)
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
        self._max_shard_bytes = max_shard_bytes
        self._lock: IO[bytes] | None = None
        self._ids: set[str] = set()
        if not self._exists():
            self._create()
        check_fingerprint(read_manifest(self.folder), self.fingerprint, self.folder, exact=True)

    @classmethod
    def open(cls, folder: str | Path, expected: Mapping[str, Any] | None = None) -> RolloutStore:
        """An existing store. The keys of ``expected`` (for instance verifier, tokenizer) must match, others may differ.

        Raises:
            ConfigError: there is no store in ``folder``.
            MismatchError, CorruptFileError: as the constructor.
        """
        folder = Path(folder)
        if not (folder / "manifest.json").exists() and not list_shards(folder):
            raise ConfigError(f"rollout folder {str(folder)!r}: no rollouts there; sample them first or check the path")
        fingerprint = read_manifest(folder)
        check_fingerprint(fingerprint, dict(expected or {}), folder, exact=False)
        return cls(folder, fingerprint)

    def load(self) -> list[Rollout]:
        """All complete rollouts, in the order they were appended. Raises CorruptFileError with file and line."""
        return list(read_shards(self.folder))

    def ids(self) -> set[str]:
        return {rollout.rollout_id for rollout in read_shards(self.folder)}

    def __len__(self) -> int:
        return len(self.ids())

    def lock(self) -> None:
        """Become the only writer (waits for another one) and drop an unfinished last line. Held until ``close``."""
        if self._lock is not None:
            return
        self._lock = acquire_lock(self.folder)
        num_bytes = drop_unfinished_line(self.folder)
        if num_bytes:
            _log.warning(
                "%s: dropped %d bytes of a record that a killed process left unfinished; it is sampled again",
                list_shards(self.folder)[-1],
                num_bytes,
            )
        self._ids = self.ids()

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Append all of them, synced to disk, or none.

        Raises:
            ConfigError: an id is there already.
            StorageError: the disk is full or refuses; nothing written earlier is lost.
        """
        if not rollouts:
            return
        self.lock()
        new_ids = [rollout.rollout_id for rollout in rollouts]
        twice = [i for i in new_ids if i in self._ids] + sorted({i for i in new_ids if new_ids.count(i) > 1})
        if twice:
            raise ConfigError(f"rollout id {twice[0]!r}: already in {self.folder}; ids must be unique")
        data = b"".join(map(encode_rollout, rollouts))
        append_bytes(self._shard_for(len(data)), data)
        self._ids.update(new_ids)

    def note_prompts(self, signatures: Signatures, sources: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the prompts are recognised by, and list their sources in the manifest. Only once: a store's prompts
        never change. Stores without these read as before.

        Raises:
            StorageError: the disk is full or refuses.
        """
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        if not (self.folder / SIGNATURES_FILE).exists():
            buffer = io.BytesIO()
            signatures.save(buffer)
            write_atomic(self.folder / SIGNATURES_FILE, buffer.getvalue())
        if "sources" not in manifest:
            write_json_atomic(self.folder / "manifest.json", manifest | {"sources": [dict(one) for one in sources]})

    def close(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None

    def _exists(self) -> bool:
        return (self.folder / "manifest.json").exists() or bool(list_shards(self.folder))

    def _create(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        lock = acquire_lock(self.folder)  # two processes that start together agree on one manifest
        try:
            if not self._exists():
                manifest = {"format": FORMAT_VERSION, "fingerprint": self.fingerprint}
                write_json_atomic(self.folder / "manifest.json", manifest)
        finally:
            release_lock(lock)

    def _shard_for(self, num_bytes: int) -> Path:
        shards = list_shards(self.folder)
        if not shards:
            return shard_path(self.folder, 0)
        size = os.path.getsize(shards[-1])
        if size > 0 and size + num_bytes > self._max_shard_bytes:
            return shard_path(self.folder, int(shards[-1].stem.split("-")[1]) + 1)
        return shards[-1]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The fingerprint in ``folder/manifest.json``.

    Raises:
        CorruptFileError: missing, not JSON, or of an unknown format.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, fingerprint = manifest["format"], dict(manifest["fingerprint"])
    except FileNotFoundError as error:
        raise CorruptFileError(f"{path}: missing beside rollout shards of unknown origin; delete {folder}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFileError(f"{path}: not a rollout manifest ({error!r}); restore it or delete {folder}") from error
    if version != FORMAT_VERSION:
        raise CorruptFileError(
            f"{path}: format {version!r}, this version reads {FORMAT_VERSION}; sample into a new folder"
        )
    return fingerprint


def check_fingerprint(have: Mapping[str, Any], want: Mapping[str, Any], folder: Path, *, exact: bool) -> None:
    """Raises:
    MismatchError: naming the first key that differs (dotted path), the stored and the wanted value.
    """
    for key in sorted(set(want) | (set(have) if exact else set())):
        old, new = have.get(key, "(absent)"), want.get(key, "(absent)")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            nested = {f"{key}.{name}": value for name, value in old.items()}
            check_fingerprint(nested, {f"{key}.{name}": value for name, value in new.items()}, folder, exact=exact)
        elif old != new:
            raise MismatchError(
                f"rollouts in {folder}: {key} was {old!r}, now it is {new!r}; rollouts of different origin are not "
                "mixed: choose a new folder or delete this one"
            )
