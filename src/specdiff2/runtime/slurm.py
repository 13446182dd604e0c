"""Jobs of Slurm and submitit: who this process is in its job, and which jobs of a sweep are still in the queue.

submitit is an optional package and is imported only where it has started the process or is about to start jobs. Slurm
is asked with its own commands (slurm.schedmd.com/squeue.html); a cluster without accounting (``sacct``) is enough.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.launch import own_rank
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
SUBMITIT, SUBMITIT_FOLDER = "SUBMITIT_EXECUTOR", ".submitit"
POLLS_S = (0.5, 1.0, 2.0, 5.0)  # pauses between questions to Slurm; the last one again and again


def join_job() -> int:
    """Give torch its variables in a submitit job of several tasks; returns this process's rank.

    MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK replace what the launching process may have handed down.
    """
    if SUBMITIT in os.environ:
        import submitit

        if submitit.JobEnvironment().num_tasks > 1:
            environment = submitit.helpers.TorchDistributedEnvironment()
            environment.export(set_cuda_visible_devices=False, overwrite=True)
    return own_rank()


def job_facts() -> dict[str, str]:
    """Scheduler, id and log file of the job that this process belongs to; empty outside one."""
    if SUBMITIT in os.environ:
        import submitit

        job = submitit.JobEnvironment()
        return {"scheduler": job.name(), "job_id": job.job_id, "log": str(job.paths.stderr)}
    if "SLURM_STEP_ID" in os.environ:
        return {"scheduler": "slurm", "job_id": os.environ["SLURM_JOB_ID"]}
    return {}


def step_name() -> str | None:
    """``slurm/JOB.STEP`` in a plain ``srun python ...``: the same on all ranks and again when the job is requeued."""
    if SUBMITIT in os.environ or "SLURM_STEP_ID" not in os.environ:
        return None
    return f"slurm/{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def prepare_sweep(folder: Path) -> None:
    """Before jobs are submitted: Slurm is there, and nothing of this sweep is in its queue.

    Raises:
        ConfigError: no ``srun`` here, or jobs of this sweep still wait or run: they write to the same folders.
    """
    if shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher: no `srun` on PATH: run this on a login node of the Slurm cluster, or use "
            "hydra/launcher=submitit_local on this machine"
        )
    alive = queued_jobs(folder)
    if alive:
        raise ConfigError(f"{folder}: jobs of this sweep are still in the queue of Slurm: {still_queued(alive)}")
    _watch_without_accounting()


def refusal(error: BaseException) -> str | None:
    """Why Slurm takes no jobs, where that is what ``error`` (submitit's) says."""
    lines = [line.removeprefix("sbatch: error: ") for line in str(error).splitlines() if "sbatch: error: " in line]
    if not lines:
        return None
    keys = ", ".join(f"hydra.launcher.{key}" for key in ("account", "partition", "qos", "constraint", "gpus_per_node"))
    return f"Slurm refuses the jobs: {'; '.join(dict.fromkeys(lines))}; see {keys} and the other settings there"


def still_queued(alive: Sequence[str]) -> str:
    """What to do about jobs that go on without the process that submitted them."""
    arrays = " ".join(sorted({job.split("_")[0] for job in alive}))
    return f"{', '.join(alive)}; wait until they have ended (or `scancel {arrays}`), then run the same command again"


def queued_jobs(folder: Path) -> list[str]:
    """Ids of the jobs of a sweep that wait or run, requeued ones included; from submitit's folders and ``squeue``.

    Raises:
        ConfigError: ``squeue`` does not answer.
    """
    known = {path.name for path in (folder / SUBMITIT_FOLDER).glob("*") if re.fullmatch(r"\d+(_\d+)?", path.name)}
    if not known or shutil.which("squeue") is None:
        return []
    arrays = ",".join(sorted({job.split("_")[0] for job in known}))
    return sorted(known & set(_squeue("-j", arrays)))


def wait_for_jobs(folder: Path) -> None:
    """Until no job of the sweep is in the queue; the launcher stops waiting at the first one that has failed."""
    for pause_s in itertools.chain(POLLS_S, itertools.repeat(POLLS_S[-1])):
        try:
            if not queued_jobs(folder):
                return
        except ConfigError as error:  # a controller that restarts
            log.warning("%s; asked again in %g s", error, pause_s)
        time.sleep(pause_s)


def _squeue(*arguments: str) -> dict[str, str]:
    """State by job id (``12`` or ``12_3``); ids that Slurm has forgotten are left out."""
    command = ["squeue", "--noheader", "--array", "--states=PD,R,S,CG,CF", "--format=%i %T", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise ConfigError(f"`{' '.join(command)}` fails: {done.stderr.strip()}; expected the queue of a running Slurm")
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def _watch_without_accounting() -> None:
    """submitit learns from ``sacct`` that a job was killed; without accounting it would wait for it for ever."""
    if shutil.which("sacct") and not subprocess.run(["sacct", "-nX"], capture_output=True, check=False).returncode:
        return
    import submitit

    class QueueWatcher(type(submitit.SlurmJob.watcher)):  # type: ignore[misc]
        """States from ``squeue``, which knows all that has not ended; what it does not list has."""

        def update(self) -> None:
            self._last_status_check = time.time()
            waiting: set[str] = self._registered - self._finished
            try:
                states = _squeue("-j", ",".join(sorted({job.split("_")[0] for job in waiting}))) if waiting else {}
            except ConfigError as error:
                log.warning("%s; asked again later", error)
                return
            self._info_dict.update({job: {"State": states.get(job, "ENDED")} for job in waiting})
            self._finished |= waiting - states.keys()

    watcher: Any = QueueWatcher(delay_s=5)
    submitit.SlurmJob.watcher = watcher
