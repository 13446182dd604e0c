"""Which process of a training is missing: heartbeats, what they say about the ranks, and the message for the user.

Each rank keeps one small file, ``ranks/NNN.json`` of the run folder (``Beat``). Whoever watches turns what it has seen
of them over time (``Sighting``) into a ``Fault``:

    failed   the rank wrote that an error ended it          gone    its process is no more, without a word
    silent   its file has stopped changing (a stopped       stuck   its file changes, its training does not, and another
             process, a machine out of reach)                       rank waits for it in a collective

Pure: knows files and numbers, no process, thread or Lightning (``training.rank_watcher``, ``training.callbacks``).
Ages are the watcher's own, so the clocks of the machines need not agree.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdiff2.types import SpecDiffError

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"
State = Literal["running", "done", "failed", "stopped"]


class RankLostError(SpecDiffError):
    """Training cannot go on, since another process of it is gone, hangs or has failed."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank says about itself.

    Attributes:
        run: the same in all beats of one training; files of an earlier one in the same folder differ.
        process: identifies the process together with ``pid`` (``rank_watcher.process_identity``).
        count: grows with every write.
        moves: hooks of the training loop that it has passed; the same hook has the same number on every rank.
        is_pause: the phase may take long (evaluation, checkpoint).
        collective: the collective operation it waits in, where it is known.
        at: line of this package that its main thread is in, where it has not moved since the last beat.
        state: ``stopped``: it has ended itself because of another rank.
        reason: its error, or the fault for which it has stopped.
    """

    run: str
    rank: int
    host: str
    pid: int
    process: str
    count: int = 0
    step: int = 0
    phase: str = "start"
    moves: int = 0
    is_pause: bool = True
    collective: str | None = None
    at: str | None = None
    state: State = "running"
    reason: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """Where in the training it is, in words."""
        words = f"at step {self.step}, {self.phase}"
        words += f", waiting in {self.collective}" if self.collective else ""
        return words + (f", in {self.at}" if self.at else "")


@dataclass(slots=True)
class Sighting:
    """A beat and how old it is to the watcher: seconds since it changed, since the rank moved on, and whether its
    process was looked for on this machine and is not there."""

    beat: Beat
    silent_s: float = 0.0
    still_s: float = 0.0
    is_gone: bool = False

    def renew(self, beat: Beat) -> None:
        """Take over a newer reading of the file."""
        if beat.count != self.beat.count:
            self.silent_s = 0.0
        if beat.moves != self.beat.moves:
            self.still_s = 0.0
        self.beat = beat


@dataclass(frozen=True, slots=True)
class Fault:
    """Ranks that the others wait for in vain, with what is wrong with them."""

    kind: Literal["failed", "gone", "silent", "stuck", "told"]
    ranks: tuple[Sighting, ...]


def beat_path(folder: Path, rank: int) -> Path:
    return folder / f"{rank:03d}.json"


def write_beat(folder: Path, beat: Beat) -> None:
    """Replaced in one step. Not synced to disk: it says what is now, nothing that must survive the machine.

    Raises:
        OSError: the disk refuses.
    """
    path = beat_path(folder, beat.rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(beat)), encoding="utf-8")
    os.replace(partial, path)


def read_beats(folder: Path, run: str, ranks: Iterable[int]) -> dict[int, Beat]:
    """Beats of this run; ranks without one (no shared folder, not started) are left out."""
    beats = {}
    for rank in ranks:
        try:
            beat = Beat(**json.loads(beat_path(folder, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # not there, unreachable for now, or of another version
            continue
        if beat.run == run:
            beats[rank] = beat
    return beats


def diagnose(
    seen: Mapping[int, Sighting], hang_timeout_s: float, pause_timeout_s: float, silence_s: float | None = None
) -> Fault | None:
    """What keeps the training from going on; None while everything may be well.

    Args:
        seen: of all ranks, the watcher's own included.
        hang_timeout_s: for a rank that does not move, or is silent.
        pause_timeout_s: for one that does not move in a phase that may take long.
        silence_s: for a silent rank, where an error of a collective says that something is wrong; None: as for hangs.
    """
    running = [sighting for sighting in seen.values() if sighting.beat.state == RUNNING]
    silence_s = hang_timeout_s if silence_s is None else silence_s
    by_state = {state: [s for s in seen.values() if s.beat.state == state] for state in (FAILED, STOPPED)}
    if by_state[FAILED]:
        return Fault("failed", tuple(by_state[FAILED]))
    if gone := [s for s in running if s.is_gone]:
        return Fault("gone", tuple(gone))
    if silent := [s for s in running if s.silent_s >= silence_s]:
        return Fault("silent", tuple(silent))
    if by_state[STOPPED]:  # on a machine that saw more than this one
        return Fault("told", tuple(by_state[STOPPED][:1]))
    if not any(s.beat.collective for s in running):
        return None  # nobody waits: a long computation
    behind = [s for s in running if s.beat.moves == min(other.beat.moves for other in running)]
    behind = [s for s in behind if s.beat.collective is None] or behind  # of equals, those in a collective wait for it
    if all(s.still_s >= (pause_timeout_s if s.beat.is_pause else hang_timeout_s) for s in behind):
        return Fault("stuck", tuple(behind))
    return None


def describe(fault: Fault, seen: Mapping[int, Sighting], rank: int, run_folder: Path) -> str:
    """The message of one rank: who is missing, where that one was, what waits for it, how to go on."""
    words = [summary(fault, len(seen))]
    lost = {sighting.beat.rank for sighting in fault.ranks}
    waiting = [s.beat for s in seen.values() if s.beat.collective and s.beat.rank not in lost]
    if fault.kind == "told" or rank not in lost:
        words.append(f"{seen[rank].beat.name} was {seen[rank].beat.place}")
    elif waiting:
        words.append(f"{waiting[0].name} was {waiting[0].place}")
    return "; ".join([*words, "what was written stays", how_to_go_on(run_folder)])


def summary(fault: Fault, num_ranks: int) -> str:
    """The fault alone, in one line."""
    if fault.kind == "told":
        return str(fault.ranks[0].beat.reason)
    if fault.kind == "stuck" and len(fault.ranks) == num_ranks:
        return _everyone_waits(fault)
    return "; ".join(_WORDS[fault.kind](sighting) for sighting in fault.ranks)


def _failed(sighting: Sighting) -> str:
    beat = sighting.beat
    return f"{beat.name} failed {beat.place}: {beat.reason} (its own message is in its output)"


def _gone(sighting: Sighting) -> str:
    return (
        f"{sighting.beat.name} is gone: its process ended without a word, last seen {sighting.beat.place}; killed "
        "processes leave no message: look for the out-of-memory killer (dmesg), a job limit, or a crash above"
    )


def _silent(sighting: Sighting) -> str:
    return (
        f"{sighting.beat.name} hangs: no sign of life for {sighting.silent_s:.0f} s, last seen {sighting.beat.place}; "
        "its process is stopped or its machine out of reach"
    )


def _stuck(sighting: Sighting) -> str:
    return f"{sighting.beat.name} hangs: alive, but for {sighting.still_s:.0f} s {sighting.beat.place}"


def _everyone_waits(fault: Fault) -> str:
    still_s = min(sighting.still_s for sighting in fault.ranks)
    places = {sighting.beat.place: sighting.beat for sighting in fault.ranks}
    where = "; ".join(f"{beat.name} {place}" for place, beat in places.items())
    return (
        f"all {len(fault.ranks)} ranks are alive and none has moved for {still_s:.0f} s: {where}; where they wait in "
        "one collective, look at the network between them (NCCL_DEBUG=INFO); where in different ones, it is a bug"
    )


_WORDS = {"failed": _failed, "gone": _gone, "silent": _silent, "stuck": _stuck}


def how_to_go_on(folder: Path) -> str:
    """The override that continues a run that has been cut short."""
    if (folder / "checkpoints" / "last.ckpt").is_file():
        return f"go on with the same command and resume={folder}"
    return "no checkpoint was written yet: run the same command again (rollouts on disk are reused)"
