"""Ranks of a real training that are killed or stopped: the others name them and end, nothing written is lost.

One child process imports everything once and then plays torchrun's agent: it forks the ranks of each scene, which run
the entry point of ``train.py``. Beside it, two trainings are started with the plain command, where Lightning starts
rank 1. Run as a script, this file is that child: ``python test_faults.py FOLDER OPTION ...``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from specdiff2.training.rank_probe import process_identity
from specdiff2.training.rank_watch import Beat

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
QUIET = ["publish=false", "callbacks.decoding_probe=null", "callbacks.streak_monitor.every_n_steps=100000", "threads=1"]
ENDLESS = ["max_steps=100000", "callbacks.checkpoint.every_n_train_steps=5"]


def until(condition: Callable[[], Any], what: str, limit_s: float = 150.0) -> Any:
    """The first true value."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {limit_s} s")


def beat(run: Path, rank: int) -> Beat | None:
    try:
        return Beat(**json.loads((run / f"ranks/{rank:03d}.json").read_text(encoding="utf-8")))
    except OSError:
        return None


def trains(run: Path) -> Callable[[], bool]:
    """Whether both ranks are in their training steps and a checkpoint is there."""
    return lambda: (
        (run / "checkpoints/last.ckpt").exists()
        and all((b := beat(run, rank)) is not None and b.step > 0 for rank in (0, 1))
    )


def no_process(*pids: int) -> Callable[[], bool]:
    return lambda: not any(process_identity(pid) for pid in pids)


# -- the agent ---------------------------------------------------------------------------------------------------------


def rank_process(rank: int, port: int, arguments: list[str], log: Path, prepare: Callable[[], None]) -> int:
    """Fork one rank as torchrun starts it; its output goes to ``log``. Returns the pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
        )  # fmt: skip
        sys.argv = ["train.py", *arguments]
        import train

        prepare()
        train.build.run_entry_point(train.main, train.CONFIG_DIR)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 4
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(name: str, *arguments: str, folder: Path, prepare: Callable[[int], None] = lambda rank: None) -> list[int]:
    """Both ranks of the run ``name``; logs are ``name-rank.log``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = [*sys.argv[2:], *DDP, *QUIET, f"run_id={name}", "hydra.job.name=train", *arguments]
    return [
        rank_process(rank, port, overrides, folder / f"{name}-{rank}.log", lambda rank=rank: prepare(rank))
        for rank in (0, 1)
    ]


def codes(*pids: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill_in_checkpoint(rank: int) -> None:
    """Rank 0 is killed when step 8's ``last.ckpt`` is written but does not have its name yet."""
    replace = os.replace

    def killing(source: Any, target: Any) -> None:
        if Path(target).name == "last.ckpt" and (Path(target).parent / "step-8.ckpt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    if rank == 0:
        os.replace = killing


def agent(folder: Path) -> None:
    """All scenes that need no new interpreter; writes ``agent.json``."""
    import train  # noqa: F401 - once, for all ranks forked later

    runs, told = folder / "outputs/train", dict[str, Any]()
    short = ["max_steps=12", "callbacks.checkpoint.every_n_train_steps=4"]
    told["undisturbed"] = codes(*start("undisturbed", *short, folder=folder))
    told["torn"] = codes(*start("torn", *short, folder=folder, prepare=kill_in_checkpoint))
    told["step"] = torch.load(runs / "torn/checkpoints/last.ckpt", weights_only=True, mmap=True)["global_step"]
    told["resumed"] = codes(*start("resumed", *short, f"resume={runs / 'torn'}", folder=folder))

    ranks = start("stopped", *ENDLESS, "callbacks.rank_watch.hang_timeout_s=3", folder=folder)
    until(trains(runs / "stopped"), "stopped: training")
    os.kill(ranks[1], signal.SIGSTOP)
    stopped_s = time.monotonic()
    told["stopped"] = codes(*ranks)
    told["stopped_s"] = time.monotonic() - stopped_s

    pids_file = folder / "orphans.json"
    torchrun = os.fork()
    if torchrun == 0:
        pids_file.write_text(json.dumps(start("orphans", *ENDLESS, folder=folder)), encoding="utf-8")
        signal.pause()
    until(trains(runs / "orphans"), "orphans: training")
    os.kill(torchrun, signal.SIGKILL)
    codes(torchrun)
    until(no_process(*json.loads(pids_file.read_text(encoding="utf-8"))), "orphans: gone", 30)
    (folder / "agent.json").write_text(json.dumps(told), encoding="utf-8")


# -- the tests ---------------------------------------------------------------------------------------------------------


class Command:
    """A process group of its own, whatever happens to it; output in ``log``."""

    def __init__(self, folder: Path, *command: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "output.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def commands(
    tiny_options: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Command]]:
    """The agent and the two plain commands, at work at the same time."""
    folder, train = tmp_path_factory.mktemp("faults"), tiny_options["train"]
    plain = [str(ROOT / "train.py"), *train, *DDP, *QUIET, *ENDLESS, "run_id=run"]
    started = {
        "agent": Command(folder / "agent", __file__, str(folder / "agent"), *train),
        "rank": Command(folder / "rank", *plain),
        "launcher": Command(folder / "launcher", *plain),
    }
    try:
        yield started
    finally:
        for command in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


@pytest.fixture(scope="module")
def told(commands: dict[str, Command]) -> dict[str, Any]:
    """What the agent has seen."""
    command = commands["agent"]
    assert command.process.wait(250) == 0, command.output[-3000:] + logs(command.folder)
    return json.loads((command.folder / "agent.json").read_text(encoding="utf-8"))


def logs(folder: Path) -> str:
    return "\n".join(path.name + "\n" + path.read_text(encoding="utf-8")[-1500:] for path in folder.glob("*.log"))


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def rank_started_by(pid: int) -> int | None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        with contextlib.suppress(OSError):  # gone already
            if "train.py" in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8"):
                return int(child)
    return None


def test_a_launcher_that_is_killed_leaves_no_rank_behind(commands: dict[str, Command]) -> None:
    """While rank 1 still imports its libraries, when no heartbeat is written yet."""
    command = commands["launcher"]
    rank_1 = until(lambda: rank_started_by(command.process.pid), "rank 1")
    command.process.kill()
    command.process.wait()
    until(no_process(rank_1), "rank 1 gone", 90)
    [error] = errors(command.output)
    assert f"rank 1 (pid {rank_1}): the process that started it (pid {command.process.pid}) is gone" in error


def test_a_killed_rank_is_named_and_the_launcher_ends(commands: dict[str, Command]) -> None:
    command = commands["rank"]
    run = command.folder / "outputs/train/run"
    until(trains(run), "training")
    lost = beat(run, 1)
    assert lost is not None
    os.kill(lost.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert command.process.wait(60) == 1
    assert time.monotonic() - killed_s < 30
    [error] = errors(command.output)
    assert f"rank 1 (host {lost.host}, pid {lost.pid}) is gone" in error and f"resume={run}" in error
    assert "rank 0 (host" in error and " at step " in error
    assert no_process(lost.pid, command.process.pid)()
    torch.load(run / "checkpoints/last.ckpt", weights_only=True)


def test_a_stopped_rank_is_named_with_its_collective(told: dict[str, Any], commands: dict[str, Command]) -> None:
    assert told["stopped"] == [1, -signal.SIGKILL] and told["stopped_s"] < 30
    folder = commands["agent"].folder
    [error] = errors((folder / "stopped-0.log").read_text(encoding="utf-8"))
    assert "rank 1 (host" in error and "hangs: no sign of life for" in error
    assert "waiting in collective gloo:" in error and "resume=" in error
    assert (folder / "outputs/train/stopped/ranks/000.txt").stat().st_size > 0


def test_a_kill_while_a_checkpoint_is_written_loses_nothing_and_resuming_ends_the_same(
    told: dict[str, Any], commands: dict[str, Command]
) -> None:
    """Case 27 for two ranks: the weights and the optimizer of an undisturbed run, bit for bit."""
    folder = commands["agent"].folder
    assert told["undisturbed"] == [0, 0] and told["torn"] == [-signal.SIGKILL, 1], logs(folder)
    assert told["step"] == 4 and told["resumed"] == [0, 0], logs(folder)
    [error] = errors((folder / "torn-1.log").read_text(encoding="utf-8"))
    assert "rank 0 (host" in error and "is gone" in error
    ends = [
        torch.load(folder / f"outputs/train/{name}/checkpoints/last.ckpt", weights_only=True)
        for name in ("undisturbed", "resumed")
    ]
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(ends[0][key], ends[1][key], atol=0.0, rtol=0.0)


def test_ranks_whose_agent_is_killed_end_themselves(told: dict[str, Any], commands: dict[str, Command]) -> None:
    folder = commands["agent"].folder
    for rank in (0, 1):
        found = errors((folder / f"orphans-{rank}.log").read_text(encoding="utf-8"))
        assert found and all("is gone" in error for error in found)


if __name__ == "__main__":
    agent(Path(sys.argv[1]))
