"""The thread of each rank that writes its heartbeat, watches the others' and ends its process where they are missing.

A rank whose main thread is blocked in a collective cannot be reached by an exception: the thread prints the message
and ends the process. Where the collective fails by itself (gloo says "Connection closed by peer"), the main thread
asks ``explain`` who is missing instead, so that the error takes the ordinary way out.

Costs a thread that wakes four times a second, and one small file written each second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from specdiff2.training.rank_probe import (
    end_process,
    frames_of,
    is_gone,
    is_here,
    is_trainer,
    line_of,
    pending_collective,
    process_identity,
)
from specdiff2.training.rank_watch import (
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    Beat,
    Fault,
    Sighting,
    State,
    describe,
    diagnose,
    read_beats,
    summary,
    write_beat,
)

TICK_S, BEAT_S = 0.25, 1.0
GRACE_S = 5.0  # for the main thread, to meet the error of its collective itself
SILENCE_S = 5.0  # silent for so long when a collective has failed: that is the rank
EXPLAIN_S = 12.0  # longest look for the rank behind the error of a collective
END_S = 120.0  # for the ordinary way out (loggers, files); a process that still hangs then is ended
HANGS = ("silent", "stuck")


class Place(NamedTuple):
    """Fields of a ``Beat`` that the main thread sets; the watcher sets all others, so that neither waits."""

    step: int = 0
    phase: str = "start"
    moves: int = 0
    is_pause: bool = True


class RankWatcher(threading.Thread):
    """Watches one training from one of its ranks.

    Args:
        run_folder: of the whole training, the same on all ranks; heartbeats lie in its ``ranks/``.
        run: identifies this training among those that have used the folder.
        hang_timeout_s: for a rank that neither moves nor is in a phase that may take long.
        pause_timeout_s: for one that is.
    """

    def __init__(
        self, run_folder: Path, run: str, rank: int, world_size: int, hang_timeout_s: float, pause_timeout_s: float
    ) -> None:
        super().__init__(daemon=True, name="rank-watcher")
        self.run_folder, self.folder, self.world_size = run_folder, run_folder / "ranks", world_size
        self.hang_timeout_s, self.pause_timeout_s = hang_timeout_s, pause_timeout_s
        self.beat = Beat(run, rank, socket.gethostname(), os.getpid(), process_identity(os.getpid()) or "")
        self.seen: dict[int, Sighting] = {}
        self._place = Place()
        self._main_thread = threading.main_thread().ident or 0
        self._over = threading.Event()
        self._lock = threading.RLock()  # beats are written by both threads
        self.is_leaving = False  # the main thread is on its way out: it has the say
        self._read_every_s = min(10.0, max(BEAT_S, hang_timeout_s / 20))  # many ranks share one file system
        self._since_read_s = self._fault_s = self._leaving_s = 0.0

    # -- called by the main thread -------------------------------------------------------------------------------

    def move(self, step: int, phase: str, *, is_pause: bool = False) -> None:
        """The main thread enters a phase; costs one small object, no lock and no file."""
        self._place = Place(step, phase, self._place.moves + 1, is_pause)

    def finish(self) -> None:
        """Training is over for this rank; the others no longer expect it."""
        self.retire()
        self._say(state=DONE)

    def retire(self) -> None:
        """Watch nothing any more."""
        self._over.set()

    def leave(self, reason: str, state: State = FAILED) -> None:
        """This rank ends because of an error; the process has ``END_S`` for that."""
        self.is_leaving = True
        self._say(state=state, reason=reason)

    def explain(self) -> str | None:
        """The message to raise for a failed collective; None where no rank is found to be missing."""
        self.is_leaving = True
        end_s = time.monotonic() + EXPLAIN_S
        while time.monotonic() < end_s:
            with self._lock:
                self._say()  # the others may be looking for the silent one, too
                self._look(TICK_S, read=True)
                fault = diagnose(self._others(), self.hang_timeout_s, self.pause_timeout_s, SILENCE_S)
                if fault is not None:
                    return self._conclude(fault)
            time.sleep(TICK_S)
        return None

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look at everything again and again until ``finish``."""
        last_s = time.monotonic()
        since_beat_s = BEAT_S
        while not self._over.wait(TICK_S):
            now_s = time.monotonic()
            # a watcher that was itself stopped for an hour has not watched the others for an hour
            elapsed_s, last_s = min(now_s - last_s, 4 * TICK_S), now_s
            if self.is_leaving:
                self._end_late(elapsed_s)
                continue
            since_beat_s += elapsed_s
            with self._lock:
                if since_beat_s >= BEAT_S:
                    since_beat_s = 0.0
                    self._say_where()
                self._watch(elapsed_s)

    def _watch(self, elapsed_s: float) -> None:
        self._since_read_s += elapsed_s
        self._look(elapsed_s, read=self._since_read_s >= self._read_every_s)
        fault = diagnose(self.seen, self.hang_timeout_s, self.pause_timeout_s)
        self._fault_s = self._fault_s + elapsed_s if fault is not None else 0.0
        if fault is None or self.is_leaving or self._fault_s < (0.0 if fault.kind in HANGS else GRACE_S):
            return
        is_busy = self.beat.is_pause and self.beat.collective is None
        if is_busy and self.seen[self.beat.rank].still_s < self.pause_timeout_s:
            return  # let it write its checkpoint; it meets the others' absence in its next collective
        self._end(fault)

    def _look(self, elapsed_s: float, *, read: bool) -> None:
        """Make every sighting older by ``elapsed_s``, then newer where there is something new to see."""
        for sighting in self.seen.values():
            sighting.silent_s += elapsed_s
            sighting.still_s += elapsed_s
        ranks = set(range(self.world_size)) - {self.beat.rank}
        beats = {self.beat.rank: self.beat}
        if read:
            self._since_read_s = 0.0
            beats |= read_beats(self.folder, self.beat.run, ranks)
        for rank, beat in beats.items():
            self.seen.setdefault(rank, Sighting(beat)).renew(beat)
        if any(self._looks_gone(rank) for rank in ranks & self.seen.keys()):
            for rank, beat in read_beats(self.folder, self.beat.run, ranks).items():  # it may have said why
                self.seen.setdefault(rank, Sighting(beat)).renew(beat)
        for rank in ranks & self.seen.keys():
            self.seen[rank].is_gone = self._looks_gone(rank)

    def _looks_gone(self, rank: int) -> bool:
        return self.seen[rank].beat.state == RUNNING and is_gone(self.seen[rank].beat, self.beat)

    def _others(self) -> dict[int, Sighting]:
        return {rank: sighting for rank, sighting in self.seen.items() if rank != self.beat.rank}

    def _say_where(self) -> None:
        """The heartbeat. Where nothing moves, with the collective and the line that the main thread is in."""
        still = self._place.moves == self.beat.moves and self.beat.count > 0
        if not self._say(
            collective=pending_collective() if still else None, at=line_of(self._main_thread) if still else None
        ):
            for sighting in self.seen.values():  # the disk that all ranks write to: their silence says nothing then
                sighting.silent_s = 0.0

    def _say(self, **changes: Any) -> bool:
        """Write a beat; False where the disk refuses."""
        with self._lock, contextlib.suppress(OSError):
            self.beat = dataclasses.replace(self.beat, count=self.beat.count + 1, **self._place._asdict(), **changes)
            write_beat(self.folder, self.beat)
            return True
        return False

    def _conclude(self, fault: Fault) -> str:
        """End silent processes of this machine, tell the other ranks; returns the message."""
        message = describe(fault, self.seen, self.beat.rank, self.run_folder)
        for sighting in fault.ranks:
            if fault.kind == "silent" and is_here(sighting.beat, self.beat):
                with contextlib.suppress(OSError):
                    os.kill(sighting.beat.pid, signal.SIGKILL)  # stopped: it would not hear anything softer
        self.leave(summary(fault, len(self.seen)), STOPPED)
        return message

    def _end(self, fault: Fault) -> None:
        """End this process from its watcher: the main thread is blocked for good."""
        traces = self.folder / f"{self.beat.rank:03d}.txt"
        with contextlib.suppress(OSError), traces.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(f"\nerror: {self._conclude(fault)}; tracebacks of rank {self.beat.rank}: {traces}", file=sys.stderr)
        end_process()

    def _end_late(self, elapsed_s: float) -> None:
        """End a process whose way out is blocked as well, in Lightning's clean-up or in the process group's."""
        self._leaving_s += elapsed_s
        if self._leaving_s < END_S:
            return
        self._over.set()
        if any(is_trainer(frame) or "/torch/distributed/" in frame.f_code.co_filename
               for frame in frames_of(self._main_thread)):  # fmt: skip
            print(
                f"\nerror: rank {self.beat.rank}: not ended {END_S:.0f} s after its error: ended now", file=sys.stderr
            )
            end_process()
