"""Locks between the processes that fill one store: which shards a writer appends to, and which rows it samples.

Both kinds are released by the kernel when their holder dies, also by ``kill -9``. They work between machines where the
shared file system has locks: NFS, GPFS, CephFS, Lustre mounted with ``flock`` (not ``localflock``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
from collections.abc import Iterator
from pathlib import Path

from specdiff2.data.rollout_files import release_lock, storage_error, try_lock

CLAIMS_FILE = ".claims"  # empty; byte n stands for row n of the plan
_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})


class WriterSlot:
    """The right to append to the shards of writer ``number``: the smallest number that no living process has."""

    def __init__(self, folder: Path) -> None:
        for number in itertools.count():
            file = try_lock(_lock_path(folder, number))
            if file is not None:
                self.number, self._file = number, file
                return

    def release(self) -> None:
        release_lock(self._file)


@contextlib.contextmanager
def if_abandoned(folder: Path, number: int) -> Iterator[bool]:
    """Whether writer ``number`` is not alive; it cannot come back inside this context."""
    file = try_lock(_lock_path(folder, number))
    try:
        yield file is not None
    finally:
        if file is not None:
            release_lock(file)


class RowClaims:
    """Ranges of rows of a plan, each claimed by at most one process; ranges of different processes never overlap.

    Locks of POSIX belong to a process: one object of this class a process and folder.

    Raises:
        StorageError: the file cannot be created, or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLAIMS_FILE
        try:
            self._file = open(self._path, "ab")  # noqa: SIM115 (stays open as long as there are claims)
        except OSError as error:
            raise storage_error(self._path, error) from error

    def claim(self, rows: range, *, wait: bool = False) -> bool:
        """False: a part of them is another process's (never with ``wait``, which waits until it is not)."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), len(rows), rows.start)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise storage_error(self._path, error) from error
        return True

    def release(self, rows: range) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, len(rows), rows.start)

    def close(self) -> None:
        """Release everything."""
        self._file.close()


def _lock_path(folder: Path, number: int) -> Path:
    """Held by writer ``number`` as long as it lives."""
    return folder / f".writer-{number:03d}.lock"
