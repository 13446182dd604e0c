"""Reading and writing the JSON files of a run folder: strict, whole, and with a clear error for a damaged one."""

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
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, allow_nan=False, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
