"""Reading and writing the files of a run folder: JSON strict, everything whole, a clear error for a damaged one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specdiff2.types import CorruptFileError


def read_json(path: Path, remedy: str) -> Any:
    """The value in ``path``; None where there is no such file.

    Args:
        remedy: what the file should have been and what to do, for the error message.

    Raises:
        CorruptFileError: it is not JSON.
    """
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON ({error}): expected {remedy}") from error


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, replaced in one step so that a reader never sees half a file."""
    write_text(path, json.dumps(value, allow_nan=False, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaced in one step as well."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
