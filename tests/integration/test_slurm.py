"""Sweeps on a real Slurm of this machine (``slurm_cluster``): sizes, preemption, requeue, the loss of a node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from braked_steps import brake_options
from entry_runs import ROOT, Options, metric, strict_json
from slurm_cluster import SlurmCluster, running_cluster, wait_until

pytest.importorskip("submitit", reason="pip install 'specdiff2[sweep]'")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
# one node has no GPU to give; the rest is as on a cluster of A100s
SLURM = ["hydra/launcher=a100_slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1"]
MAX_STEPS = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def launch(cluster: SlurmCluster, folder: Path, script: str, *overrides: str) -> subprocess.Popen[str]:
    """A sweep in the background; its output goes to ``launcher.txt``."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with (folder / "launcher.txt").open("a") as out:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / script), "-m", *SLURM, *overrides], cwd=folder, stdout=out, stderr=out,
            text=True, env={**os.environ, **environment, **cluster.environment},
        )  # fmt: skip
    cluster.started[f"launcher {process.pid}"] = process
    return process


def job_id(folder: Path) -> str:
    return str(strict_json(folder / "status.json")["job_id"])


def finished(process: subprocess.Popen[str], folder: Path) -> str:
    """The launcher's output."""
    process.wait(240)
    return (folder / "launcher.txt").read_text(encoding="utf-8")


def test_a_training_on_two_nodes_survives_preemption_and_requeue(
    cluster: SlurmCluster, tiny_options: Options, tmp_path: Path
) -> None:
    """Twice the same training: one is signalled (SIGUSR2), then requeued by the administrator (SIGTERM); one is not."""
    options = [*tiny_options["train"], "publish=false", f"max_steps={MAX_STEPS}", "objective.warmup_steps=0"]
    options += ["callbacks.decoding_probe=null", "callbacks.streak_monitor.every_n_steps=20", "run_id=s/1"]
    options += ["callbacks.checkpoint.every_n_train_steps=9999,10000"]  # two jobs that differ in nothing
    options += ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1"]
    brake = tmp_path / "brake"
    options += brake_options(brake)
    launcher = launch(cluster, tmp_path, "train.py", *options)
    sweep = tmp_path / "outputs/multirun/train/s/1"
    log = sweep / "0/train.log"

    def resumed() -> list[int]:
        return [int(step) for step in re.findall(r"resuming from \S+ at step (\d+)", log.read_text(encoding="utf-8"))]

    wait_until((sweep / "0/metrics.csv").is_file, 120, "steps of job 0")
    cluster.run("scancel", "--signal=USR2", job_id(sweep / "0"))
    wait_until(resumed, 120, "the requeued job")
    length = metric(sweep / "0", "train/loss")
    wait_until(lambda: len(metric(sweep / "0", "train/loss")) > len(length), 120, "further steps of job 0")
    cluster.run("scontrol", "requeue", job_id(sweep / "0"))
    wait_until(lambda: len(resumed()) == 2, 120, lambda: log.read_text(encoding="utf-8"))
    brake.unlink()
    told = finished(launcher, tmp_path)
    assert launcher.returncode == 0 and "training sweep" in (sweep / "sweep.html").read_text(encoding="utf-8"), told
    steps = resumed()
    assert len(steps) == 2 and 0 < steps[0] < steps[1] < MAX_STEPS, log.read_text(encoding="utf-8")
    assert len({(sweep / number / "drafter/last/model.safetensors").read_bytes() for number in "01"}) == 1
    losses = [metric(sweep / number, "train/loss") for number in "01"]
    assert len(losses[1]) == MAX_STEPS and losses[0] == losses[1]
    assert strict_json(sweep / "0/status.json")["scheduler"] == "slurm"


def test_an_evaluation_moves_on_when_its_node_is_lost_and_a_dead_job_is_named(
    cluster: SlurmCluster, tiny_options: Options, tmp_path: Path
) -> None:
    options = [*tiny_options["eval"], "drafter=untrained", "benchmark.limit=8", "max_new_tokens=64", "run_id=s/1"]
    launcher = launch(cluster, tmp_path, "tests/crashing_eval.py", *options, "seed=7,0")
    sweep = tmp_path / "outputs/multirun/crashing_eval/s/1"
    records = sweep / "1/records.jsonl"
    wait_until(lambda: records.is_file() and records.read_text().count("\n") >= 3, 120, "records")
    node = cluster.kill_node(job_id(sweep / "1"))
    before = records.read_text(encoding="utf-8")
    again = launch(cluster, tmp_path, "tests/crashing_eval.py", *options, "seed=7,0")
    assert "are still in the queue of Slurm" in finished(again, tmp_path)
    told = finished(launcher, tmp_path)
    cluster.start_node(node)
    jobs = {number: strict_json(sweep / number / "status.json") for number in "01"}
    assert launcher.returncode == 1, told
    assert "job 0 did not finish" in told and f"slurm job {jobs['0']['job_id']}, log {jobs['0']['log']}" in told
    assert records.read_text(encoding="utf-8").startswith(before[: before.rindex("\n")])
    stored = strict_json(sweep / "sweep.json")
    assert [job["status"] for job in stored["jobs"]] == ["running", "done"]
    assert {(row["job"], row["num_prompts"]) for row in stored["rows"]} == {("1", 8)}
