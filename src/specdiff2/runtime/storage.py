"""Telling a disk that is full or refuses from a bug."""

from __future__ import annotations

import errno

REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR})


def storage_problem(error: BaseException) -> str | None:
    """What the disk said, with the file where it is known; None for any other error.

    torch hides a failed write in a RuntimeError of its ``PytorchStreamWriter``.
    """
    if isinstance(error, OSError) and error.errno in REFUSED:
        place = f"{error.filename}: " if error.filename is not None else ""
        verb = "no access" if error.errno == errno.EACCES else "cannot write"
        return f"{verb}: {place}{error.strerror or error}"
    if isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error):
        return f"cannot write: {error}"
    return None
