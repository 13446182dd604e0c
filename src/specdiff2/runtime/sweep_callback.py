"""What a sweep leaves behind: a status file per job, and the merged table, files and plots of all finished ones.

``status.json`` (running | done | failed, with the configuration's fingerprint, and under a scheduler the job's id and
log) is written for every run by the process that runs it (rank 0 of several; another rank only where it fails first),
whatever the launcher; ``traceback.txt`` beside it for a failed one. The launching process merges once at
the end from the job folders alone (``evaluation.sweep``), since Hydra skips its own end-of-sweep hook when a job has
failed, and no hook runs in a process that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import socket
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from specdiff2.evaluation.shards import is_pending
from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.evaluation.sweep_jobs import JOB_FACTS, JOBS_FILE, job_value, read_job, read_jobs, read_plan, read_status
from specdiff2.runtime import slurm
from specdiff2.runtime.launched import agreed_stamp
from specdiff2.runtime.logging import quiet_libraries
from specdiff2.runtime.provenance import write_json
from specdiff2.runtime.sweep_study import prepare_study
from specdiff2.types import ConfigError, SpecDiffError

log = logging.getLogger(__name__)
STATUS_FILE = "status.json"
_current_sweep: list[DictConfig] = []  # Hydra's settings of the sweep this process leads; at most one


class SweepCallback(Callback):
    """Hydra callback; see ``conf/hydra/default.yaml``. Other launchers send it to their processes with each job.

    Attributes:
        command: what the user typed, for processes that were started with another command line.
        rank: of this process among those of its job.
    """

    def __init__(self) -> None:
        self.command: list[str] = []
        self.rank = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _current_sweep[:] = [config.hydra]
        self.command = list(sys.argv)
        search = is_search(config)
        if search:
            _continue_study(config)
        jobs = {} if search else planned_jobs(config)
        folder = Path(config.hydra.sweep.dir)
        if uses_slurm(config.hydra):
            try:
                slurm.prepare_sweep(folder)
            except ConfigError as error:  # Hydra would turn it into a warning
                _current_sweep.clear()
                sys.exit(f"error: {error}")
        write_json(folder / JOBS_FILE, {"search": search, "jobs": jobs})

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if self.command and not _current_sweep:  # a process of a launcher: as the one that the user started
            sys.argv[:] = self.command
            quiet_libraries()
        self.rank = slurm.join_job()
        if self.rank > 0:
            logging.disable(logging.INFO)  # lines come once
            return
        folder = Path(config.hydra.runtime.output_dir)
        if not is_done(folder, fingerprint(config)):
            write_json(
                folder / STATUS_FILE,
                _status("running", config) | {"host": socket.gethostname(), "pid": os.getpid()} | slurm.job_facts(),
            )

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        folder = Path(config.hydra.runtime.output_dir)
        if job_return.status == JobStatus.FAILED:
            self._record_failure(config, folder, job_return)
        elif self.rank == 0 and not is_done(folder, fingerprint(config)) and not is_pending(folder):
            # done already: it was skipped, and its own times stay; pending: other shards of an evaluation are not done
            (folder / "traceback.txt").unlink(missing_ok=True)  # from an earlier try
            write_json(folder / STATUS_FILE, _finished("done", config, folder))
        if config.hydra.mode == RunMode.MULTIRUN and is_search(config):
            _tell_value(folder, job_return)

    def _record_failure(self, config: DictConfig, folder: Path, job_return: JobReturn) -> None:
        error = job_return._return_value  # the property would raise it
        told = f"{type(error).__name__}: {error}"
        told = f"rank {self.rank}: {told}" if self.rank else told
        if read_status(folder / STATUS_FILE)["status"] != "failed":  # another rank, whose end this one has noticed
            text = "".join(traceback.format_exception(error))
            (folder / "traceback.txt").write_text(text, encoding="utf-8")
            write_json(folder / STATUS_FILE, _finished("failed", config, folder) | {"error": told})
        if config.hydra.mode != RunMode.MULTIRUN:  # a single run ends with this message anyway
            return
        log.error("%s failed: %s", folder, error)
        if not _current_sweep:  # on its way to the launching process, where its own class may not survive pickling
            job_return.return_value = SpecDiffError(f"{told} (traceback: {folder / 'traceback.txt'})")


def uses_slurm(settings: DictConfig) -> bool:
    """Whether jobs go to Slurm; ``settings`` are Hydra's."""
    return str(settings.launcher._target_).endswith("submitit_launcher.SlurmLauncher")


def is_search(config: DictConfig) -> bool:
    """Whether a sweeper chooses settings by what earlier jobs returned, instead of running a fixed list."""
    return not str(config.hydra.sweeper._target_).endswith("BasicSweeper")


def _tell_value(folder: Path, job_return: JobReturn) -> None:
    """Hand a search what the job measured; a job that failed has produced nothing: 0, and the search goes on."""
    value = job_value(read_job(folder))
    job_return.status, job_return.return_value = JobStatus.COMPLETED, 0.0 if value is None else value


def _continue_study(config: DictConfig) -> None:
    """Give a search that is run again only the trials that are missing."""
    sweeper = config.hydra.sweeper
    if str(sweeper.get("direction")).rpartition(".")[2] != "maximize":
        log.warning("hydra.sweeper.direction=%s: jobs return tokens/s (or a streak), so this looks for the worst "
                    "settings; set hydra.sweeper.direction=maximize", sweeper.get("direction"))  # fmt: skip
    if sweeper.get("storage") is None or sweeper.get("study_name") is None:
        return
    left, num_done = prepare_study(sweeper.storage, sweeper.study_name, sweeper.n_trials)
    with read_write(config):
        sweeper.n_trials = left
        if sweeper.sampler.get("seed") is not None:
            sweeper.sampler.seed += num_done  # the same seed again would repeat the first trials


def planned_jobs(config: DictConfig) -> dict[str, list[str]]:
    """Overrides by job number, as Hydra's own sweeper will make them: to know which jobs never started."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    given += list(config.hydra.overrides.task)
    choices: dict[str, list[str]] = {}
    loader = GlobalHydra.instance().config_loader()  # knows the options that sampler=glob(*) stands for
    for override in OverridesParser.create(loader).parse_overrides(given):
        key, swept = override.get_key_element(), override.is_sweep_override()
        values = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return {str(number): list(job) for number, job in enumerate(itertools.product(*choices.values()))}


def job_folder(*, _root_: DictConfig) -> str:
    """Folder of a job in its sweep: its number; in a search, which has no fixed order, a digest of its settings."""
    if not is_search(_root_):
        return str(_root_.hydra.job.num)
    settings = sorted(one for one in _root_.hydra.overrides.task if not one.startswith("run_id="))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:10]


def run_stamp() -> str:
    """The default ``run_id``: date and time, or what all processes of an ``srun`` or ``torchrun`` have in common."""
    return slurm.step_name() or agreed_stamp(datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))


def devices_per_node(whole: int, *, _root_: DictConfig) -> int:
    """Processes that the Trainer has on a node; ``whole`` for all devices of the node. 1 where nothing is trained."""
    devices = OmegaConf.select(_root_, "trainer.devices", default=1)
    if isinstance(devices, ListConfig):
        return len(devices)
    return whole if devices in ("auto", -1, "-1") else int(devices)


def gpus_per_node(whole: int, *, _root_: DictConfig) -> int | None:
    """As many GPUs; None where the Trainer is told to use the CPU."""
    on_cpu = OmegaConf.select(_root_, "trainer.accelerator") in ("cpu", "ds_cpu")
    return None if on_cpu else devices_per_node(whole, _root_=_root_)


def training_steps(default: int, *, _root_: DictConfig) -> int:
    """``factories.training_steps`` of the configuration."""
    from specdiff2.runtime import factories  # imports torch, which the launching process of a sweep may do without

    return factories.training_steps(_root_.objective, default)


OmegaConf.register_new_resolver("training_steps", training_steps, replace=True)
OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
OmegaConf.register_new_resolver("devices_per_node", devices_per_node, replace=True)
OmegaConf.register_new_resolver("gpus_per_node", gpus_per_node, replace=True)
OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)


def fingerprint(config: DictConfig) -> str:
    """Digest of the resolved settings of a job, Hydra's own left out."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    for key in ("hydra", "run_id", "shard", "shard_wait_s"):  # where it runs, not what
        plain.pop(key, None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_done(folder: Path, digest: str) -> bool:
    """Whether the job of these settings has already finished in ``folder``."""
    status = read_status(folder / STATUS_FILE)
    return status["status"] == "done" and status.get("fingerprint") == digest


def finish_sweep(wait: bool = True) -> None:
    """Merge what the jobs of the current sweep have written and say where it is; nothing outside a sweep.

    Args:
        wait: for jobs that go on: submitit's launchers stop waiting at the first one that crashes.
    """
    if not _current_sweep:
        return
    settings = _current_sweep.pop()
    folder = Path(settings.sweep.dir)
    if wait and str(settings.launcher._target_).endswith("submitit_launcher.LocalLauncher"):
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    if wait and uses_slurm(settings):
        slurm.wait_for_jobs(folder)
    elif uses_slurm(settings) and (alive := slurm.queued_jobs(folder)):
        print(f"jobs go on in Slurm: {slurm.still_queued(alive)}")
    jobs = read_jobs(folder)
    if any(job.rows for job in jobs):  # it lists what failed too
        print(merge_jobs(folder))
    else:
        for job in jobs:
            print(f"{job.folder}: {'done' if job.status == 'done' else job.why()}")
    left = [job for job in jobs if job.status != "done"]
    if left and not read_plan(folder).search:
        run_id = "/".join(folder.parts[-2:])
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done; add run_id={run_id} to the command to run the others")
    if any(job.status == "running" for job in left) and not uses_slurm(settings):
        print("a process that dies takes joblib's and the basic launcher's other jobs with it; "
              "hydra/launcher=submitit_local gives every job its own")  # fmt: skip


def _finished(state: str, config: DictConfig, folder: Path) -> dict[str, Any]:
    """The status of a job that has ended, with what its beginning wrote."""
    begun = read_status(folder / STATUS_FILE)
    kept = {key: begun[key] for key in ("host", "pid", "started_at", *JOB_FACTS) if key in begun}
    return _status(state, config) | kept | {"ended_at": _now()}


def _status(state: str, config: DictConfig) -> dict[str, Any]:
    overrides = OmegaConf.to_container(config.hydra.overrides.task)
    return {"status": state, "fingerprint": fingerprint(config), "overrides": overrides, "started_at": _now()}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
