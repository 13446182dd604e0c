"""Rollouts on disk: append-only shards and a manifest that says what they were sampled from.

A store survives being killed at any point: records are appended whole and synced, an unfinished last line is
dropped by the next writer, the manifest is replaced atomically. Any number of processes write at once, each to shards
of its own; readers need no lock. The store never decides what to sample (``data.generate`` does).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.rollout_files import (
    acquire_lock,
    append_bytes,
    drop_unfinished_line,
    encode_rollout,
    last_shards,
    list_shards,
    release_lock,
    shard_path,
    shard_writer,
    storage_error,
    write_atomic,
    write_json_atomic,
)
from specdiff2.data.rollout_locks import WriterSlot, if_abandoned
from specdiff2.data.rollout_scan import StoreScan, read_shards
from specdiff2.data.signatures import SIGNATURES_FILE, Signatures
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, Rollout

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
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
        self._slot: WriterSlot | None = None
        self._scan = StoreScan(self.folder)
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
        if not (folder / MANIFEST_FILE).exists() and not list_shards(folder):
            raise ConfigError(f"rollout folder {str(folder)!r}: no rollouts there; sample them first or check the path")
        fingerprint = read_manifest(folder)
        check_fingerprint(fingerprint, dict(expected or {}), folder, exact=False)
        return cls(folder, fingerprint)

    def load(self) -> list[Rollout]:
        """All complete rollouts, shard by shard. Raises CorruptFileError with file and line."""
        return list(read_shards(self.folder))

    def ids(self) -> set[str]:
        return {rollout.rollout_id for rollout in read_shards(self.folder)}

    def __len__(self) -> int:
        return sum(1 for _ in read_shards(self.folder))

    def lock(self) -> int:
        """Become a writer, until ``close``: returns its number. Reads what is there, and drops the unfinished last
        lines of writers that have died.

        Raises:
            CorruptFileError: a line that is no rollout; names file and line.
            StorageError: the disk refuses.
        """
        if self._slot is None:
            self._slot = WriterSlot(self.folder)
            self._drop_unfinished_lines()
            self._scan.refresh()
        return self._slot.number

    def refresh(self) -> None:
        """Read what other writers have appended since. Raises CorruptFileError."""
        self._scan.refresh()

    def holds(self, rollout_ids: Sequence[str]) -> list[bool]:
        """Which of them are there, as of ``lock`` or the last ``refresh``."""
        return self._scan.ids.holds(rollout_ids)

    @property
    def num_known(self) -> int:
        """How many are there, as of ``lock`` or the last ``refresh``."""
        return len(self._scan.ids)

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Append all of them, synced to disk, or none.

        Raises:
            ConfigError: an id is there already.
            StorageError: the disk is full or refuses; nothing written earlier is lost.
        """
        if not rollouts:
            return
        number = self.lock()
        self._scan.refresh()
        new_ids = [rollout.rollout_id for rollout in rollouts]
        twice = [i for i, known in zip(new_ids, self.holds(new_ids), strict=True) if known]
        twice += sorted({i for i in new_ids if new_ids.count(i) > 1})
        if twice:
            raise ConfigError(f"rollout id {twice[0]!r}: already in {self.folder}; ids must be unique")
        data = b"".join(map(encode_rollout, rollouts))
        append_bytes(self._shard_for(number, len(data)), data)
        self._scan.refresh()

    def note_prompts(self, signatures: Signatures, sources: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the prompts are recognised by, and list their sources in the manifest. Only once: a store's prompts
        never change. Stores without these read as before.

        Raises:
            StorageError: the disk is full or refuses.
        """
        if not (self.folder / SIGNATURES_FILE).exists():
            buffer = io.BytesIO()
            signatures.save(buffer)
            write_atomic(self.folder / SIGNATURES_FILE, buffer.getvalue())
        self._note("sources", [dict(one) for one in sources], replace=False)

    def note_complete(self, writers: Sequence[Mapping[str, Any]]) -> None:
        """Write into the manifest that nothing is missing: what each shard holds, and who sampled it.

        Raises:
            StorageError: the disk is full or refuses.
        """
        self._drop_unfinished_lines()
        self._scan.refresh()
        self._note("complete", self._scan.summary() | {"writers": [dict(one) for one in writers]}, replace=True)

    def is_complete(self, num_rollouts: int | None = None) -> bool:
        """Whether the manifest says so, the shards have the sizes that it says, and there are ``num_rollouts``."""
        complete = _read_manifest(self.folder).get("complete")
        if complete is None or num_rollouts not in (None, complete["num_rollouts"]):
            return False
        sizes = {shard.name: shard.stat().st_size for shard in list_shards(self.folder)}
        return sizes == {name: shard["bytes"] for name, shard in complete["shards"].items()}

    def close(self) -> None:
        """No longer a writer."""
        if self._slot is not None:
            self._slot.release()
            self._slot, self._scan = None, StoreScan(self.folder)

    def _note(self, key: str, value: Any, *, replace: bool) -> None:
        """Set a key of the manifest, which other writers may be changing too."""
        if key in _read_manifest(self.folder) and not replace:  # a store that cannot be written to may be read
            return
        lock = acquire_lock(self.folder)
        try:
            write_json_atomic(self.folder / MANIFEST_FILE, _read_manifest(self.folder) | {key: value})
        finally:
            release_lock(lock)

    def _drop_unfinished_lines(self) -> None:
        """Those of this writer and of dead ones."""
        for shard in last_shards(list_shards(self.folder)):
            own = self._slot is not None and shard_writer(shard) == self._slot.number
            with contextlib.nullcontext(True) if own else if_abandoned(self.folder, shard_writer(shard)) as abandoned:
                num_bytes = drop_unfinished_line(shard) if abandoned else 0
            if num_bytes:
                _log.warning(
                    "%s: dropped %d bytes of a record that a killed process left unfinished; it is sampled again",
                    shard,
                    num_bytes,
                )

    def _exists(self) -> bool:
        return (self.folder / MANIFEST_FILE).exists() or bool(list_shards(self.folder))

    def _create(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        lock = acquire_lock(self.folder)  # two processes that start together agree on one manifest
        try:
            if not self._exists():
                manifest = {"format": FORMAT_VERSION, "fingerprint": self.fingerprint}
                write_json_atomic(self.folder / MANIFEST_FILE, manifest)
        finally:
            release_lock(lock)

    def _shard_for(self, number: int, num_bytes: int) -> Path:
        own = [shard for shard in list_shards(self.folder) if shard_writer(shard) == number]
        if not own:
            return shard_path(self.folder, number, 0)
        size = own[-1].stat().st_size
        if size > 0 and size + num_bytes > self._max_shard_bytes:
            return shard_path(self.folder, number, int(own[-1].stem.rsplit("-", 1)[1]) + 1)
        return own[-1]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The fingerprint in ``folder/manifest.json``.

    Raises:
        CorruptFileError: missing, not JSON, or of an unknown format.
    """
    return _read_manifest(folder)["fingerprint"]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, _ = manifest["format"], dict(manifest["fingerprint"])
    except FileNotFoundError as error:
        raise CorruptFileError(f"{path}: missing beside rollout shards of unknown origin; delete {folder}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFileError(f"{path}: not a rollout manifest ({error!r}); restore it or delete {folder}") from error
    if version != FORMAT_VERSION:
        raise CorruptFileError(
            f"{path}: format {version!r}, this version reads {FORMAT_VERSION}; sample into a new folder"
        )
    return manifest


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
