"""What heartbeats say about the ranks of a training, and what the user is told."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdiff2.training.callbacks.rank_watch import RankWatch, is_collective_error
from specdiff2.training.checkpoint_io import WholeFiles
from specdiff2.training.rank_probe import is_gone, is_here, process_identity
from specdiff2.training.rank_watch import (
    Beat,
    Sighting,
    beat_path,
    describe,
    diagnose,
    read_beats,
    write_beat,
)
from specdiff2.training.rank_watcher import RankWatcher
from specdiff2.types import ConfigError

ALL_REDUCE = "collective gloo:all_reduce number 7 (Float[64])"


def seen(rank: int, silent_s: float = 0.0, still_s: float = 0.0, is_gone: bool = False, **beat: Any) -> Sighting:
    settings: dict[str, Any] = dict(step=12, phase="in the forward pass", moves=40, is_pause=False)
    return Sighting(
        Beat("run", rank, f"node{rank // 2}", 100 + rank, "p", **(settings | beat)), silent_s, still_s, is_gone
    )


def fault_of(*sightings: Sighting, silence_s: float | None = None) -> tuple[str, list[int]] | None:
    fault = diagnose({s.beat.rank: s for s in sightings}, 60.0, 1000.0, silence_s)
    return None if fault is None else (fault.kind, [s.beat.rank for s in fault.ranks])


def told(rank: int, *sightings: Sighting, folder: Path = Path("run")) -> str:
    by_rank = {s.beat.rank: s for s in sightings}
    fault = diagnose(by_rank, 60.0, 1000.0)
    assert fault is not None
    return describe(fault, by_rank, rank, folder)


def test_ranks_that_move_or_compute_are_left_alone() -> None:
    assert fault_of(seen(0), seen(1, still_s=59, moves=39, collective=None)) is None
    # a long computation: nobody waits for anybody
    assert fault_of(seen(0, still_s=500), seen(1, still_s=500)) is None
    # rank 0 writes a checkpoint and the other one waits for it in the next step
    busy = seen(0, still_s=900, is_pause=True, moves=40)
    assert fault_of(busy, seen(1, still_s=890, moves=42, collective=ALL_REDUCE)) is None
    # a finished rank, or one that waits while another one still moves
    assert fault_of(seen(0), seen(1, 900, 900, is_gone=True, state="done")) is None
    assert fault_of(seen(0, still_s=900, moves=41, collective=ALL_REDUCE), seen(1, still_s=2)) is None


def test_the_missing_rank_is_found() -> None:
    waiting = seen(0, still_s=70, moves=42, collective=ALL_REDUCE)
    assert fault_of(waiting, seen(1), seen(2, is_gone=True)) == ("gone", [2])
    assert fault_of(waiting, seen(1, silent_s=61), seen(2)) == ("silent", [1])
    assert fault_of(waiting, seen(1, still_s=70), seen(2, still_s=70)) == ("stuck", [1, 2])
    assert fault_of(waiting, seen(1, still_s=70, moves=42)) == ("stuck", [1])  # in the same phase, but not waiting
    assert fault_of(waiting, seen(1, still_s=70, moves=42, collective=ALL_REDUCE)) == ("stuck", [0, 1])
    assert fault_of(waiting, seen(1, still_s=1001, is_pause=True)) == ("stuck", [1])
    # an error that a rank has told counts before the silence that follows from it
    assert fault_of(waiting, seen(1, state="failed", reason="OOM"), seen(2, is_gone=True)) == ("failed", [1])
    # what ranks of another machine have seen
    assert fault_of(waiting, seen(2, state="stopped", reason="rank 3 is gone")) == ("told", [2])


def test_a_failed_collective_shortens_the_patience_with_silence_only() -> None:
    sightings = seen(0, still_s=6, moves=42, collective=ALL_REDUCE), seen(1, silent_s=6, still_s=6)
    assert fault_of(*sightings) is None
    assert fault_of(*sightings, silence_s=5.0) == ("silent", [1])


def test_messages_name_rank_host_pid_step_phase_collective_and_the_way_on(tmp_path: Path) -> None:
    waiting = seen(0, still_s=70, moves=42, phase="in the backward pass", collective=ALL_REDUCE, at="a.py:3 f")
    gone = told(0, waiting, seen(3, is_gone=True, step=11), folder=tmp_path)
    assert "rank 3 (host node1, pid 103) is gone" in gone and "last seen at step 11, in the forward pass" in gone
    assert (
        f"rank 0 (host node0, pid 100) was at step 12, in the backward pass, waiting in {ALL_REDUCE}, in a.py:3 f"
        in gone
    )
    assert "out-of-memory" in gone and "no checkpoint was written yet" in gone
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").touch()
    assert f"resume={tmp_path}" in told(0, waiting, seen(3, is_gone=True), folder=tmp_path)

    assert "no sign of life for 61 s" in told(0, waiting, seen(1, silent_s=61))
    stuck = told(1, waiting, seen(1, still_s=70, at="b.py:5 g"))  # told by the rank that hangs itself
    assert "rank 1 (host node0, pid 101) hangs: alive, but for 70 s at step 12" in stuck and "b.py:5 g" in stuck
    assert f"rank 0 (host node0, pid 100) was at step 12, in the backward pass, waiting in {ALL_REDUCE}" in stuck
    everyone = told(0, waiting, seen(1, still_s=75, moves=42, collective=ALL_REDUCE))
    assert "all 2 ranks are alive and none has moved for 70 s" in everyone and "NCCL_DEBUG" in everyone
    failed = told(0, waiting, seen(1, state="failed", reason="OutOfMemoryError: 3 GiB"))
    assert "rank 1 (host node0, pid 101) failed at step 12" in failed and "OutOfMemoryError: 3 GiB" in failed
    heard = told(0, waiting, seen(2, state="stopped", reason="rank 3 (host node1, pid 103) is gone"))
    assert heard.startswith("rank 3 (host node1, pid 103) is gone; rank 0 (host node0, pid 100) was at step 12")


def test_beats_of_another_run_torn_and_missing_files_are_left_out(tmp_path: Path) -> None:
    beats = [dataclasses.replace(seen(rank).beat, run=run) for rank, run in enumerate(["new", "new", "old"])]
    for beat in beats:
        write_beat(tmp_path, beat)
    beat_path(tmp_path, 1).write_text("{", encoding="utf-8")
    assert read_beats(tmp_path, "new", range(4)) == {0: beats[0]}
    assert json.loads(beat_path(tmp_path, 2).read_text(encoding="utf-8"))["run"] == "old"
    assert not list(tmp_path.glob("*.partial"))


def test_a_sighting_is_renewed_by_what_has_changed() -> None:
    sighting = seen(1, silent_s=5, still_s=5)
    sighting.renew(dataclasses.replace(sighting.beat, count=1))
    assert (sighting.silent_s, sighting.still_s) == (0.0, 5)
    sighting.renew(dataclasses.replace(sighting.beat, moves=41))
    assert sighting.still_s == 0.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_process_is_gone_when_killed_and_unknown_on_another_machine(tmp_path: Path) -> None:
    mine = dataclasses.replace(seen(0).beat, process=process_identity(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        beat = dataclasses.replace(mine, rank=1, pid=child.pid, process=process_identity(child.pid))
        assert is_here(beat, mine) and not is_gone(beat, mine)
        child.send_signal(signal.SIGSTOP)
        assert not is_gone(beat, mine)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked for its exit code
        assert is_gone(beat, mine)
    finally:
        child.kill()
        child.wait()
    assert is_gone(dataclasses.replace(beat, pid=os.getpid()), mine)  # the pid is another process's by now
    assert not is_gone(dataclasses.replace(beat, host="elsewhere"), mine)
    assert not is_gone(dataclasses.replace(beat, process="pid:[1] 77"), mine)  # another container


def test_a_watcher_that_was_stopped_itself_accuses_nobody(tmp_path: Path) -> None:
    watcher = RankWatcher(tmp_path, "run", 0, 2, 60.0, 1000.0)
    watcher.folder.mkdir()
    write_beat(watcher.folder, dataclasses.replace(seen(1).beat, host="elsewhere"))
    watcher._look(1.0, read=True)
    watcher._look(30.0, read=False)
    assert watcher.seen[1].silent_s == 30.0 and watcher.seen[1].beat.host == "elsewhere"
    # its own disk refuses: the others' silence says nothing
    watcher.folder.rename(tmp_path / "away")
    watcher._say_where()
    assert watcher.seen[1].silent_s == 0.0


def test_one_process_has_no_watcher_and_bad_timeouts_are_refused(tmp_path: Path) -> None:
    strategy = SimpleNamespace(_timeout=timedelta(seconds=100), broadcast=lambda value: value)
    RankWatch(tmp_path).setup(SimpleNamespace(world_size=1), None, "fit")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"hang_timeout_s=600: expected less than .* 100 s"):
        RankWatch(tmp_path).setup(SimpleNamespace(world_size=2, strategy=strategy), None, "fit")
    with pytest.raises(ConfigError, match=r"hang_timeout_s=0\.5"):
        RankWatch(tmp_path, hang_timeout_s=0.5)


def test_errors_of_collectives_are_told_from_others() -> None:
    assert is_collective_error(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert is_collective_error(torch.distributed.DistBackendError("NCCL error"))
    assert not is_collective_error(RuntimeError("shape '[3]' is invalid for input of size 4"))
    assert not is_collective_error(ConfigError("connection"))


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoints/last.ckpt"
    monkeypatch.setenv("TMPDIR", "/nowhere")  # no detour through another file system
    WholeFiles().save_checkpoint({"global_step": 1}, path)
    with pytest.raises(AttributeError):
        WholeFiles().save_checkpoint({"global_step": 2, "bad": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"global_step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
