"""What each process of a split evaluation last told, in a file of its own: who runs, who has died, whom to wait for.

A process of the same launcher on the same machine that is no longer there has died; of others only silence tells. No
collectives and no sockets. Knows nothing of prompts or models.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from specdiff2.data.rollout_files import try_lock
from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.shards import shard_name
from specdiff2.runtime.provenance import write_json
from specdiff2.types import SpecDiffError, StorageError

log = logging.getLogger(__name__)
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Share:
    """What one of ``num_ranks`` processes decodes. ``launched``: a launcher started all of them together."""

    rank: int
    num_ranks: int
    launched: bool

    @property
    def name(self) -> str:
        return shard_name(self.rank, self.num_ranks)

    @property
    def speaks(self) -> bool:
        """Whether the user sees this process: bars, tables and log lines come once."""
        return self.rank == 0 or not self.launched


def how_to_go_on(run_id: str) -> str:
    """What a user can do about a process that is missing."""
    again = f"run the same command again with run_id={run_id} to go on, with any number of processes"
    return f"what was decoded stays: {again}"


def tell(share: Share, shards: Path, status: str, **more: Any) -> None:
    """What this process is doing, for the others and for who looks into the folder."""
    state = {
        **asdict(share),
        "status": status,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher": launcher(),
    }
    write_json(shards / f"{share.name}.json", {**state, **more})


def take_lock(path: Path, *, wait: bool) -> IO[bytes] | None:
    """The opened file while this process holds its lock, which the system takes back when it dies; None: it is taken.

    Where the file system has no locks a warning says so, and nothing is locked.
    """
    try:
        return try_lock(path, wait=wait)
    except StorageError as error:
        file = path.open("ab")  # or the disk's own refusal
        log.warning("%s: no locks here (%s); do not start the same rank twice at once", path, error.__cause__)
        return file


@functools.cache
def launcher() -> str:
    """Who started this process; the same for all ranks that one launcher started on one machine."""
    parent = os.getppid()  # 0: it lies outside this container
    return f"{socket.gethostname()} {parent} {psutil.Process(parent).create_time() if parent else 0.0}"


def states(share: Share, shards: Path) -> dict[int, dict[str, Any]]:
    """What each process last told, by rank; ``status`` is unknown for those that have told nothing."""
    paths = {rank: shards / f"{shard_name(rank, share.num_ranks)}.json" for rank in range(share.num_ranks)}
    return {rank: read_json(path, "a state; delete it") or {"status": "unknown"} for rank, path in paths.items()}


def has_died(state: Mapping[str, Any]) -> bool:
    """Whether a process of our own launcher on this machine is no longer there."""
    if state["status"] != "running" or state["launcher"] != launcher():
        return False
    try:
        return psutil.Process(state["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_others(share: Share, shards: Path, run_id: str, wait_s: float) -> None:
    """Until every rank is done.

    Raises:
        SpecDiffError: one has failed or died, or none of those missing has written anything for ``wait_s`` seconds.
    """
    seen, since = None, time.monotonic()
    while left := {rank: one for rank, one in states(share, shards).items() if one["status"] != "done"}:
        for rank, one in left.items():
            if has_died(one) or (one["status"] == "failed" and one["launcher"] == launcher()):
                raise SpecDiffError(
                    f"rank {rank} of {share.num_ranks} (process {one['pid']} on {one['host']}) has "
                    f"{one['status'] if 'error' in one else 'died'}{': ' + one['error'] if 'error' in one else ''}; "
                    f"{how_to_go_on(run_id)}"
                )
        written = {rank: (one, _bytes(shards, share, rank)) for rank, one in left.items()}
        if written != seen:
            seen, since = written, time.monotonic()
        elif time.monotonic() - since > wait_s:
            named = ", ".join(f"{rank} ({one.get('host', 'has not started')})" for rank, one in left.items())
            raise SpecDiffError(
                f"rank 0 of {share.num_ranks} has seen nothing new of rank {named} for shard_wait_s={wait_s:g} "
                f"seconds; {how_to_go_on(run_id)}"
            )
        time.sleep(_POLL_S)


def _bytes(shards: Path, share: Share, rank: int) -> int:
    """Of a rank's records."""
    return sum(path.stat().st_size for path in shards.glob(f"{shard_name(rank, share.num_ranks)}*/**/*.jsonl"))
