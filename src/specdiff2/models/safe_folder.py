"""Write a folder completely or not at all: a new one is written beside the old one and renamed over it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from specdiff2.types import ConfigError, SpecDiffError


def replace_folder(folder: Path, write: Callable[[Path], object], what: str) -> Path:
    """``folder`` as ``write`` fills it; what was there before is removed once the new one is complete on disk.

    Args:
        folder: an absolute path; folders above it are made.
        write: fills the empty folder that it gets.
        what: is saved, for the error.

    Raises:
        SpecDiffError: writing failed (full disk); what was there before is untouched.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        write(temporary)
        temporary.chmod(0o755)  # mkdtemp makes private folders
        for file in temporary.iterdir():
            _sync(file)
        _swap_in(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise SpecDiffError(
            f"{what} not saved to {folder}: {error}; what was there before is untouched; free some disk space or "
            "choose another folder, and save again"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already after a swap
    return folder


def is_taken(folder: Path) -> bool:
    """Whether something is there, which an export must not replace."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def require_empty(folder: Path) -> None:
    """Raises ConfigError where ``is_taken``."""
    if is_taken(folder):
        raise ConfigError(f"export to {folder}: it is not empty; choose another folder")


def backup_of(folder: Path) -> Path:
    """Where the old folder is for the moment between the two renames; left behind only by a crash right there."""
    return folder.parent / f".{folder.name}.previous"


def _swap_in(temporary: Path, folder: Path) -> None:
    backup = backup_of(folder)
    if not folder.exists():
        os.replace(temporary, folder)
        return
    shutil.rmtree(backup, ignore_errors=True)
    os.replace(folder, backup)  # a folder cannot be renamed over another one
    try:
        os.replace(temporary, folder)
    except OSError:
        os.replace(backup, folder)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def _sync(path: Path) -> None:
    """Data on disk before the rename that makes it visible, where the file system can."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())
