"""Reading JSONL files with errors that name file and line.

Lines are split on ``\\n`` bytes only: ``str.splitlines`` also splits on U+2028, which JSON allows inside strings.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdiff2.types import ConfigError, CorruptFileError


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number from 1, object)`` for every non-blank line; ``.gz`` files are unpacked.

    Raises:
        ConfigError: there is no such file.
        CorruptFileError: a line is not UTF-8, not JSON, or not an object.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"prompt file {str(path)!r}: not found (looked in {Path.cwd()}); expected a JSONL file")
    # a file opened in binary mode iterates over lines that end at b"\n" and nowhere else
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_object(line, f"{path}:{number}", "correct or delete this line")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptFileError(f"{path}: not a complete gzip file ({error}); fetch the file again") from error


def parse_object(line: bytes, where: str, remedy: str) -> dict[str, Any]:
    """One line as a JSON object.

    Raises:
        CorruptFileError: naming ``where`` and the ``remedy``.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{where}: not UTF-8 text ({error}); {remedy}") from error
    except json.JSONDecodeError as error:
        shown = line.decode("utf-8").rstrip("\n")[:80]
        raise CorruptFileError(f"{where}: not valid JSON ({error.msg}): {shown!r}; {remedy}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{where}: a JSON {type(value).__name__}, expected an object {{...}}; {remedy}")
    return value
