"""A real Slurm of this machine for the tests: munged, slurmctld and slurmd from Debian's packages, nothing installed.

The packages are unpacked into ``.cache/slurm-debs`` once. ``slurmd -N`` runs several nodes on one machine; their names
must resolve, since ranks find each other by them. Settings: slurm.schedmd.com/slurm.conf.html.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
    "libnuma1",
)
MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
SETTINGS = """\
ClusterName=specdiff
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PluginDir={plugins}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=4
MessageTimeout=5
KillWait=3
ReturnToService=2
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE
"""  # cred_expire: seconds that a requeued job waits; config_overrides: as many CPUs as we say


class SlurmCluster:
    """Two nodes of eight CPUs with the feature ``a100``; commands run with ``environment``."""

    def __init__(self, folder: Path, packages: Path) -> None:
        self.folder, self._usr = folder, packages / "usr"
        libraries = next(self._usr.glob("lib/*/slurm-wlm"))
        self.environment = {
            "PATH": f"{self._usr / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries.parent}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self.nodes = ["127.0.0.1", "127.0.0.2"]  # names that resolve everywhere
        ports = free_ports(1 + len(self.nodes))
        text = SETTINGS.format(folder=folder, plugins=libraries, port=ports[0], user=pwd.getpwuid(os.getuid()).pw_name)
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
            text += "CPUs=8 Features=a100\n"
            (folder / f"spool-{name}").mkdir()
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(256))
        (folder / "munge.key").chmod(0o600)
        self.started: dict[str, subprocess.Popen[Any]] = {}  # ended with the cluster

    def start(self) -> None:
        """Until all nodes are idle."""
        files = [f"--{name}={self.folder}/munge.{end}" for name, end in MUNGE_FILES.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *files)
        wait_until(lambda: (self.folder / "munge.socket").exists(), 10, "munged")
        self._daemon("slurmctld", "slurmctld-wlm", "-D", "-i", "-c")
        for name in self.nodes:
            self.start_node(name)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%t %D") == f"idle {len(self.nodes)}", 30, self._logs)

    def start_node(self, name: str) -> None:
        """A node's agent."""
        self._daemon(name, "slurmd-wlm", "-D", "-N", name, "-d", str(self._usr / "sbin/slurmstepd-wlm"))

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.started[name] = subprocess.Popen(
                [self._usr / "sbin" / program, *arguments], env={**os.environ, **self.environment}, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str) -> str:
        """Output of a Slurm command; empty where it fails."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip()

    def processes(self, job: str = "") -> list[int]:
        """What runs for a job (``12_3``), for all jobs without one; the step daemons, which report its end, first."""
        raw = self.run("squeue", "-h", "-j", job, "-o", "%A") if job else ""
        marks = [f"SLURM_CONF={self.folder}/".encode(), f"\0SLURM_JOB_ID={raw}".encode() + b"\0" * bool(raw)]
        inside, daemons = set(), set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if all(mark in process.joinpath("environ").read_bytes() for mark in marks):
                    inside.add(int(process.name))
                    parent = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                    if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                        daemons.add(parent)
        return [*daemons, *inside - daemons]

    def _step_daemons(self) -> list[int]:
        """Those that wait for a killed agent have no processes any more; their log tells whose they are."""
        found = []
        for path in Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                if path.read_text().startswith("slurmstepd"):
                    logs = [os.readlink(file) for file in path.parent.glob("fd/*")]
                    found += [int(path.parent.name)] * any(log.startswith(f"{self.folder}/") for log in logs)
        return found

    def kill_node(self, job: str) -> str:
        """``kill -9`` of the agent of a job's node and of all that runs for that job; returns the node's name."""
        name, processes = self.run("squeue", "-h", "-j", job, "-o", "%N"), self.processes(job)
        self.started[name].kill()
        self.started[name].wait()
        kill_all(processes)
        return name

    def _logs(self) -> str:
        return "\n".join(f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.out"))

    def stop(self) -> None:
        """All that has been started and what it runs, whatever state it is in."""
        for process in self.started.values():
            process.kill()
        kill_all([*self.processes(), *self._step_daemons()])
        for process in self.started.values():
            process.wait()


def kill_all(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.1)


def unpacked_packages() -> Path:
    """Debian's Slurm below ``.cache``; skips the test where it cannot be had, saying why."""
    target = ROOT / ".cache/slurm-debs"
    if target.is_dir():
        return target
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("Slurm comes from Debian packages: no apt-get and dpkg here")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        download = ["apt-get", "-qq", "download", *PACKAGES]
        for command in (download, ["apt-get", "-qq", "update"], download):  # an image may come without lists
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=120, check=False)
            if command is download and done.returncode == 0:
                break
        else:
            pytest.skip(f"Slurm comes from Debian packages, but `apt-get download` fails: {done.stderr.strip()[-300:]}")
        root = Path(scratch) / "root"
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True)
        with contextlib.suppress(OSError):  # another test process was faster
            root.rename(target)
    return target


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, unpacked_packages())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
