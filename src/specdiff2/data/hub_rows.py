"""Rows of a hub data set or of a local file or folder, through the library ``datasets``; errors within seconds.

Without a network ``datasets`` retries for 23 seconds (5.0) before it looks into its cache. So the hub is asked once,
with a deadline, and where it does not answer ``datasets`` is told that it is offline.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdiff2.data.jsonl import read_jsonl
from specdiff2.types import ConfigError, CorruptFileError

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_DEADLINE_SECONDS = 6.0  # a resolver without a name server obeys no timeout of ours


def hub_rows(
    name: str, subset: str | None = None, split: str = "train", *, streaming: bool = False, revision: str | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of the hub data set, folder or file ``name`` as they are asked for.

    Raises:
        ConfigError: the data set, subset or split is missing (or cannot be reached offline).
        CorruptFileError: a local file cannot be read.
    """
    import datasets  # imported here: takes a second
    import httpx  # what huggingface_hub talks to the network with; its errors are no OSError

    local = Path(name).expanduser()
    builder = BUILDERS.get(local.suffix)
    if builder is not None and not local.is_file():
        raise ConfigError(f"data set {name!r}: no such file (looked in {Path.cwd()})")
    try:  # with streaming most errors appear while rows are read
        if builder is not None:
            yield from datasets.load_dataset(builder, data_files=str(local), split=split, streaming=streaming)
        elif local.exists():
            yield from datasets.load_dataset(str(local), subset, split=split, streaming=streaming)
        else:
            with _offline_if_unreachable():
                rows = datasets.load_dataset(name, subset, split=split, streaming=streaming, revision=revision)
            yield from rows
    except datasets.exceptions.DatasetGenerationError as error:
        _name_broken_line(local)
        raise CorruptFileError(f"data set {name!r}: {error}; fetch or write the file again") from error
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:  # unreachable, gated, unknown subset, script
        _name_broken_line(local)
        raise ConfigError(
            f"data set {name!r} (subset {subset!r}, split {split!r}) cannot be loaded: {error}. Check the name; "
            "without network use a local folder or file, or fill the cache once while online (HF_HUB_OFFLINE=1 then "
            "reads it)"
        ) from error


def _name_broken_line(local: Path) -> None:
    """Raises CorruptFileError with file and line where a line of a JSONL file is broken."""
    if local.is_file() and local.suffix == ".jsonl":
        for _ in read_jsonl(local):
            pass


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    import datasets
    import huggingface_hub.constants as hub

    before = datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
    if not before[0] and not _answers(hub.ENDPOINT):
        datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before


def _answers(url: str) -> bool:
    """Whether anything answers there, asked in a thread that nobody waits for longer than the deadline."""
    import httpx

    answered: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError, OSError):
            httpx.head(url, timeout=_DEADLINE_SECONDS)
            answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_DEADLINE_SECONDS)
    return bool(answered)
