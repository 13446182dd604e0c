"""What Slurm is asked for, and what a process knows of its job, without a Slurm."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from entry_runs import strict_json
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import OmegaConf
from slurm_cluster import ROOT

from specdiff2.evaluation.sweep_jobs import read_job
from specdiff2.runtime import slurm
from specdiff2.runtime.sweep_callback import SweepCallback
from specdiff2.training.callbacks import Preempted, Preemption
from specdiff2.training.slurm_environment import cluster_plugins
from specdiff2.types import ConfigError

pytest.importorskip("submitit", reason="pip install 'specdiff2[sweep]'")
SBATCH = """#!/bin/bash

# Parameters
#SBATCH --array=0-1%2
#SBATCH --constraint=a100
#SBATCH --cpus-per-task=16
#SBATCH --error=SWEEP/.submitit/%A_%a/%A_%a_0_log.err
#SBATCH --gpus-per-node=8
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=SWEEP/.submitit/%A_%a/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup
export SLURM_KILL_BAD_EXIT=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output SWEEP/.submitit/%A_%a/%A_%a_%t_log.out --error SWEEP/.submitit/%A_%a/%A_%a_%t_log.err \
PYTHON -u -m submitit.core._submit SWEEP/.submitit/%j
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def flags_of(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The text that ``python SCRIPT.py -m hydra/launcher=a100_slurm OVERRIDES`` gives to sbatch for two jobs.

    sbatch keeps it and refuses, so that nothing waits for a job.
    """
    program(tmp_path, "srun", "exit 1")
    program(tmp_path, "sbatch", f'cp "$1" {tmp_path}/script; echo "sbatch: error: Invalid account" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def run(name: str, *overrides: str) -> str:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3", job_name=name):
            chosen = ["hydra/launcher=a100_slurm", f"paths.root={tmp_path}", "run_id=s/1", *overrides]
            cfg = compose(name, chosen, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        context = HydraContext(config_loader=None, callbacks=None)  # type: ignore[arg-type]
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=print, config=cfg)
        with pytest.raises(RuntimeError) as refused:
            launcher.launch([["seed=0"], ["seed=1"]], 0)
        assert "refuses the jobs: Invalid account; see hydra.launcher.account" in str(slurm.refusal(refused.value))
        text = (tmp_path / "script").read_text()
        return text.replace(f"{tmp_path}/outputs/multirun/{name}/s/1", "SWEEP").replace(sys.executable, "PYTHON")

    return run


def test_train_asks_for_one_task_per_gpu_of_its_trainer(submit: Any) -> None:
    assert submit("train", "trainer.num_nodes=4", "trainer.devices=8") == SBATCH


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [(["trainer=deepspeed_zero3"], {"nodes": "1", "ntasks-per-node": "8", "gpus-per-node": "8"}),
     (["trainer.devices=[0,1]", "trainer.num_nodes=3"], {"nodes": "3", "ntasks-per-node": "2", "gpus-per-node": "2"}),
     (["trainer.accelerator=ds_cpu", "trainer.devices=2"], {"nodes": "1", "ntasks-per-node": "2"})],
)  # fmt: skip
def test_train_asks_for_what_the_trainer_takes(submit: Any, overrides: list[str], wanted: dict[str, str]) -> None:
    flags = flags_of(submit("train", *overrides))
    assert {key: flags[key] for key in ("nodes", "ntasks-per-node", "gpus-per-node") if key in flags} == wanted


def test_rollouts_are_sampled_by_as_many_tasks_as_one_asks_for(submit: Any) -> None:
    flags = flags_of(submit("rollout", "hydra.launcher.tasks_per_node=8", "hydra.launcher.gpus_per_node=8"))
    assert (flags["nodes"], flags["ntasks-per-node"], flags["gpus-per-node"]) == ("1", "8", "8")


def test_eval_asks_for_one_gpu_and_other_settings_are_passed_on(submit: Any) -> None:
    settings = "account=me partition=gpu qos=low constraint=null gpus_per_node=null array_parallelism=1"
    text = submit("eval", *(f"hydra.launcher.{one}" for one in settings.split()))
    flags = flags_of(text)
    assert all(flags[key] == "1" for key in ("nodes", "ntasks-per-node"))
    assert [flags[key] for key in ("account", "partition", "qos")] == ["me", "gpu", "low"]
    assert flags["array"] == "0-1%1" and not {"constraint", "gpus-per-node"} & flags.keys() and "null" not in text


def test_a_sweep_is_refused_without_slurm_and_while_its_jobs_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, sweep = tmp_path / "tools", tmp_path / "sweep"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(ConfigError, match=r"no `srun` on PATH.*submitit_local"):
        slurm.prepare_sweep(sweep)
    for job in ("12_0", "12_1", "not a job"):
        (sweep / ".submitit" / job).mkdir(parents=True)
    program(tools, "srun", "exit 1")
    program(tools, "sacct", "exit 0")
    program(tools, "squeue", "echo '12_1 PENDING\n13_0 RUNNING'")
    with pytest.raises(ConfigError, match=r"12_1; wait until they have ended \(or `scancel 12`\)"):
        slurm.prepare_sweep(sweep)
    program(tools, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    slurm.prepare_sweep(sweep)
    program(tools, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ConfigError, match="Unable to contact slurm controller"):
        slurm.prepare_sweep(sweep)


def test_a_plain_step_has_one_name_and_lightning_does_not_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.step_name() is None and slurm.job_facts() == {} and cluster_plugins() == []
    variables = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4",
                 "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_LOCALID": "3",
                 "SLURM_NODEID": "0"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slurm.step_name() == "slurm/12.0" and slurm.join_job() == 3
    assert slurm.job_facts() == {"scheduler": "slurm", "job_id": "12"}
    (environment,) = cluster_plugins()
    assert environment.global_rank() == 3 and environment.world_size() == 4 and environment.auto_requeue is False


def test_ranks_of_a_submitit_job_find_each_other(tmp_path: Path) -> None:
    """In a process of its own, since variables are exported."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]
    code = f"""
import os
from specdiff2.runtime.slurm import job_facts, join_job
print(join_job(), *(os.environ[name] for name in {names}), job_facts()["log"])
"""
    job = {"EXECUTOR": "local", "FOLDER": str(tmp_path), "LOCAL_JOB_ID": "77", "LOCAL_NTASKS": "2"}
    job |= {"LOCAL_GLOBALID": "1", "LOCAL_LOCALID": "1"}
    environment = {**os.environ, "RANK": "9", **{f"SUBMITIT_{name}": value for name, value in job.items()}}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "1", "2", "1", socket.gethostname(), str(tmp_path / "77_1_log.err")]


def test_the_first_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the status; another rank only its failure, which rank 0 then leaves as it is."""
    hydra = {"runtime": {"output_dir": str(tmp_path)}, "overrides": {"task": ["seed=1"]}, "mode": "MULTIRUN",
             "sweeper": {"_target_": "BasicSweeper"}}  # fmt: skip
    config = OmegaConf.create({"seed": 1, "hydra": hydra})
    ranks = [SweepCallback(), SweepCallback()]
    monkeypatch.setattr("specdiff2.runtime.sweep_callback._current_sweep", [config.hydra])
    monkeypatch.setattr("logging.disable", lambda level: None)
    for number, callback in enumerate(ranks):
        monkeypatch.setenv("RANK", str(number))
        callback.on_job_start(config)
    for number in (1, 0):
        failed = JobReturn(status=JobStatus.FAILED)
        failed.return_value = ValueError(f"of {number}")
        ranks[number].on_job_end(config, failed)
    assert read_job(tmp_path).why() == "failed: rank 1: ValueError: of 1"
    ranks[1].on_job_end(config, JobReturn(status=JobStatus.COMPLETED))
    assert strict_json(tmp_path / "status.json")["status"] == "failed"  # done is for rank 0 to say
    ranks[0].on_job_end(config, JobReturn(status=JobStatus.COMPLETED))
    assert strict_json(tmp_path / "status.json")["status"] == "done"


class Strategy:
    """Two ranks of which this one is the first; ``other`` is what the second one decides."""

    other = False

    def reduce_boolean_decision(self, mine: bool, all: bool) -> bool:
        return mine or self.other

    def barrier(self, name: str) -> None:
        pass


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    saved: list[int] = []
    checkpoint = SimpleNamespace(dirpath=tmp_path, CHECKPOINT_NAME_LAST="last", FILE_EXTENSION=".ckpt")
    trainer = SimpleNamespace(strategy=Strategy(), checkpoint_callback=checkpoint, loggers=[], global_step=0,
                              max_steps=9, is_global_zero=True, saved=saved)  # fmt: skip
    trainer.save_checkpoint = lambda path: saved.append(trainer.global_step)
    return trainer


def test_signals_become_checkpoints_at_the_end_of_a_step(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM: go on. SIGUSR2 to any rank: end as submitit's handler says."""
    before = signal.getsignal(signal.SIGUSR2)
    Preemption().on_train_start(trainer, None)
    assert signal.getsignal(signal.SIGUSR2) is before  # no scheduler
    calls: list[int] = []

    def submitit(number: int, frame: Any) -> None:
        calls.append(number)
        raise SystemExit(144)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    signal.signal(signal.SIGUSR2, submitit)
    try:
        callback = Preemption()
        callback.on_train_start(trainer, None)

        def batch_ends_at(step: int) -> None:
            trainer.global_step = step
            callback.on_train_batch_end(trainer, None, None, None, 0)
            callback.on_train_batch_start(trainer, None, None, 0)

        signal.raise_signal(signal.SIGTERM)
        batch_ends_at(0)  # within the first step
        assert trainer.saved == []
        batch_ends_at(1)
        batch_ends_at(2)
        assert trainer.saved == [1] and calls == []
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGTERM)  # weaker
        with pytest.raises(Preempted) as ended:
            batch_ends_at(3)
        assert ended.value.code == 144 and trainer.saved == [1, 3] and calls == [signal.SIGUSR2]
        trainer.strategy.other = True
        with pytest.raises(Preempted):
            batch_ends_at(4)
        batch_ends_at(9)  # the last step: what is left is the export
        assert trainer.saved == [1, 3, 4]
        callback.teardown(trainer, None, "fit")
        assert signal.getsignal(signal.SIGUSR2) is submitit
    finally:
        signal.signal(signal.SIGUSR2, before)
