"""A JSON file of a model folder, as the object it must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdiff2.types import CorruptFileError


def read_json_object(path: Path) -> dict[str, Any]:
    """What ``path`` holds.

    Raises:
        CorruptFileError: not JSON, or not an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise CorruptFileError(f"{path}: not valid JSON ({error}); fetch the model again") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{path}: expected a JSON object; fetch the model again")
    return found
