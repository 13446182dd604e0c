"""What can be seen of a rank from inside and from its machine: process, line of code, collective.

The collective comes from the flight recorder of torch.distributed, which gloo and NCCL write alike where the variable
``TORCH_FR_BUFFER_SIZE`` is set before the process group is made (tried with torch 2.13).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C import _distributed_c10d

from specdiff2.training.rank_watch import Beat

PACKAGE = str(Path(__file__).resolve().parents[1])


def end_process() -> None:
    """At once, without the interpreter's clean-up, which would wait for the blocked thread."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def process_identity(pid: int) -> str | None:
    """Name space and start time of a process: a pid alone may mean another process elsewhere or later.

    Returns:
        None: there is no such process (or a zombie), as seen from here. An empty string: this system does not tell.
    """
    try:
        names = os.readlink("/proc/self/ns/pid")
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else ""
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{names} {fields[19]}"


def is_here(beat: Beat, mine: Beat) -> bool:
    """Whether the process of a beat can be looked for from here: the same machine and container."""
    return beat.host == mine.host and beat.process.split(" ")[0] == mine.process.split(" ")[0] != ""


def is_gone(beat: Beat, mine: Beat) -> bool:
    """Whether it is known to be gone; False for processes that cannot be seen from here."""
    return is_here(beat, mine) and process_identity(beat.pid) != beat.process


def pending_collective() -> str | None:
    """The collective that this process waits in: the last one it has begun, where it has not ended.

    Older entries of gloo may lack their end for a while, so only the last one counts.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:  # an older torch: then only the process group's own timeout finds a rank that is stuck but alive
        return None
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    last: dict[str, Any] | None = max(entries, key=lambda entry: entry["record_id"], default=None)
    if last is None or last["retired"]:
        return None
    sizes = " ".join(f"{kind}{size}" for kind, size in zip(last["input_dtypes"], last["input_sizes"], strict=False))
    return f"collective {last['profiling_name']} number {last['collective_seq_id']} ({sizes or 'no data'})"


def line_of(thread: int) -> str | None:
    """The innermost line of this package that a thread is in below Lightning's trainer, as
    ``training/window_mean.py:95 take``; where there is none, the innermost line of all."""
    frames = list(itertools.takewhile(lambda frame: not is_trainer(frame), frames_of(thread)))
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)]
    named = (ours or frames)[:1]
    return _named(named[0]) if named else None


def frames_of(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_trainer(frame: FrameType) -> bool:
    """Whether it is Lightning's ``Trainer``."""
    return frame.f_code.co_filename.endswith("/pytorch/trainer/trainer.py")


def _named(frame: FrameType) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
