"""What the verifier said about each rollout, kept on disk: every epoch after the first reads instead of computing.

One append-only file of numbers and one index line per rollout, keyed by its token ids; both are only as good as the
verifier and the layers they come from, so the folder belongs to one ``origin``. A line is written after its numbers:
a killed run loses at most the rollout it was writing. Several processes (ranks of one run, runs side by side) may
write: each holds a lock meanwhile and knows what was there when it opened the folder, and what it added. Beyond
``max_bytes`` nothing more is kept, and reading is then computing. So memory is bounded too, whatever the number of
rollouts: about 350 bytes for each one kept, whose numbers take some 100 KB of the file (100 tokens, 576 wide, 16 bits).
It knows no model: ``compute`` is given at each call.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

# numpy has no bfloat16: numbers are stored as integers of their size
_INTEGERS = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}


class ContextMemory:
    """Callable as ``memory(ids, compute)`` (see ``models.verifier_context.ContextSource``).

    Args:
        folder: created when missing; emptied, with a warning, when it holds numbers of another origin.
        origin: JSON-ready: verifier fingerprint, layers, dtype.
        max_bytes: how large the file may grow.
    """

    def __init__(self, folder: str | Path, origin: dict[str, Any], max_bytes: int = 16 << 30) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._numbers, self._index = self.folder / "contexts.bin", self.folder / "index.jsonl"
        self._entries: dict[str, tuple[int, list[int]]] = {}
        self._dtype: torch.dtype | None = None
        self._full = False
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._open(json.loads(json.dumps(origin)))

    def __len__(self) -> int:
        return len(self._entries)

    def __call__(self, ids: list[int], compute: Callable[[list[int]], Tensor]) -> Tensor:
        """The tensor ``compute(ids)`` gives, ``[token, width]``, from disk where it has been computed before."""
        key = hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()[:32]
        if key in self._entries:
            return self._read(*self._entries[key])
        found = compute(ids)
        self._append(key, found.detach().cpu().contiguous())
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process writes here meanwhile; freed by the system should this one be killed."""
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _open(self, origin: dict[str, Any]) -> None:
        path = self.folder / "origin.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError:
            before = "unreadable"
        if before != origin:
            if before is not None:
                log.warning("%s: contexts of another origin (%s, now %s): computed again", self.folder, before, origin)
            for file in (self._numbers, self._index):
                file.unlink(missing_ok=True)
            path.write_text(json.dumps(origin), encoding="utf-8")
        self._dtype = getattr(torch, str(origin["dtype"]).removeprefix("torch."))
        self._numbers.touch()
        lines = self._index.read_bytes().split(b"\n") if self._index.exists() else [b""]
        whole = [line for line in lines[:-1] if self._take(line)]
        if whole != lines[:-1] or lines[-1]:
            # left in the file, such a line would come true once the numbers have grown past where it points
            log.warning("%s: %d unfinished entries dropped", self.folder, len(lines) - len(whole) - (not lines[-1]))
            rewritten = self.folder / "index.jsonl.tmp"
            rewritten.write_bytes(b"".join(line + b"\n" for line in whole))
            os.replace(rewritten, self._index)

    def _take(self, line: bytes) -> bool:
        """Remember one line of the index; False where it, or its numbers, were never finished."""
        assert self._dtype is not None  # set by _open
        try:
            entry = json.loads(line)
            key, offset, shape = str(entry["key"]), int(entry["offset"]), [int(size) for size in entry["shape"]]
        except (ValueError, KeyError, TypeError):
            return False
        if offset + int(np.prod(shape)) * self._dtype.itemsize > self._numbers.stat().st_size:
            return False
        self._entries[key] = (offset, shape)
        return True

    def _append(self, key: str, found: Tensor) -> None:
        assert self._dtype is not None  # set by _open
        if found.dtype != self._dtype:
            raise ValueError(f"context of dtype {found.dtype}: expected {self._dtype}, as the origin says")
        with self._locked():
            self._append_locked(key, found)

    def _append_locked(self, key: str, found: Tensor) -> None:
        offset = self._numbers.stat().st_size
        if offset + found.numel() * found.element_size() > self.max_bytes:
            if not self._full:
                log.warning("%s holds %d rollouts in %.1f GiB, its limit: the others are computed each time",
                            self.folder, len(self), offset / 2**30)  # fmt: skip
            self._full = True
            return
        integer = _INTEGERS[found.element_size()][0]
        with self._numbers.open("ab") as file:
            file.write(found.view(integer).numpy().tobytes())
        entry = {"key": key, "offset": offset, "shape": list(found.shape)}
        with self._index.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
        self._entries[key] = (offset, list(found.shape))

    def _read(self, offset: int, shape: list[int]) -> Tensor:
        assert self._dtype is not None  # set by _open
        kind = _INTEGERS[self._dtype.itemsize][1]
        numbers = np.fromfile(self._numbers, dtype=kind, count=int(np.prod(shape)), offset=offset)
        return torch.from_numpy(numbers).view(self._dtype).view(shape)
