"""Sweeps on several processes and searches, as users run them on a tiny model (case 31 for every launcher)."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from braked_steps import brake_options
from entry_runs import ROOT, Options, metric, strict_json
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from slurm_cluster import wait_until

from specdiff2.runtime.sweep_callback import planned_jobs
from specdiff2.runtime.sweep_study import prepare_study, sampler_space

Run = Callable[..., subprocess.CompletedProcess[str]]


def states(sweep: Path) -> list[str]:
    return [strict_json(path)["status"] for path in sorted(sweep.glob("[0-9]/status.json"))]


def test_trainings_under_joblib_share_rollouts_and_a_rerun_does_what_is_missing(
    run_script: Run, tiny_options: Options, tmp_path: Path
) -> None:
    options = [*tiny_options["train"], "publish=false", "max_steps=4", "objective.warmup_steps=0", "run_id=s/1"]
    command = ["train.py", "-m", *options, "callbacks.decoding_probe=null"]
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    first = run_script(*command, *joblib, "optimizer.lr=1e-4,1e-3,-1", cwd=tmp_path)
    sweep = tmp_path / "outputs/multirun/train/s/1"
    assert first.returncode == 1 and states(sweep) == ["done", "done", "failed"], first.stdout + first.stderr
    assert "ConfigError" in (sweep / "2/traceback.txt").read_text(encoding="utf-8")
    assert "job 2 failed: ConfigError: optimizer" in first.stdout and "run_id=s/1" in first.stdout
    assert "hydra/launcher=joblib" in strict_json(sweep / "0/run.json")["command"]  # as typed, not the worker's own

    logs = [(sweep / job / "train.log").read_text(encoding="utf-8") for job in "01"]
    sampled = [int(count) for log in logs for count in re.findall(r"reused, (\d+) sampled", log)]
    assert sorted(sampled) == [0, 0, 3, 5]  # whichever comes first samples, the other one waits and reads

    stamps = [(sweep / job / "metrics.csv").stat().st_mtime_ns for job in "01"]
    again = run_script(*command, "optimizer.lr=1e-4,1e-3,1e-2", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("done already") == 2, again.stdout + again.stderr
    assert stamps == [(sweep / job / "metrics.csv").stat().st_mtime_ns for job in "01"]
    assert states(sweep) == ["done"] * 3 and not (sweep / "2/traceback.txt").exists()
    with (sweep / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["optimizer.lr"]) for row in rows] == [1e-4, 1e-3, 1e-2]
    assert all(float(row["best_streak"]) >= 0 and (tmp_path / row["drafter"]).is_dir() for row in rows)
    assert "training sweep over optimizer.lr" in (sweep / "sweep.html").read_text(encoding="utf-8")


def test_under_submitit_a_crashed_job_is_listed_and_the_others_finish(
    run_script: Run, tiny_options: Options, tmp_path: Path
) -> None:
    options = [*tiny_options["eval"], "drafter=untrained", "benchmark.limit=1", "run_id=s/1"]
    command = ["tests/crashing_eval.py", "-m", *options, "hydra/launcher=submitit_local", "seed=7,0"]
    done = run_script(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))  # for the unpickled entry point
    sweep = tmp_path / "outputs/multirun/crashing_eval/s/1"
    assert done.returncode == 1 and "job 0 did not finish" in done.stdout, done.stdout + done.stderr
    stored = strict_json(sweep / "sweep.json")
    assert [job["status"] for job in stored["jobs"]] == ["running", "done"]
    assert {(row["job"], row["seed"]) for row in stored["rows"]} == {("1", 0)}
    assert "1 of 2 jobs done" in done.stdout


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_signalled_and_killed_training_ends_as_an_undisturbed_one(
    run_script: Run, tiny_options: Options, tmp_path: Path
) -> None:
    """Under submitit: SIGUSR2 to job 0, which is queued again; then ``kill -9``, after which the rerun continues it."""
    options = [*tiny_options["train"], "publish=false", "max_steps=120", "objective.warmup_steps=0", "run_id=s/1"]
    options += ["callbacks.decoding_probe=null", "callbacks.checkpoint.every_n_train_steps=19,20"]
    options += ["callbacks.streak_monitor.every_n_steps=40", "hydra/launcher=submitit_local"]
    brake, run = tmp_path / "brake", partial(run_script, "train.py", "-m", cwd=tmp_path, PYTHONPATH=str(ROOT))
    options += brake_options(brake)
    sweep = tmp_path / "outputs/multirun/train/s/1"

    def resumed() -> list[int]:
        log = (sweep / "0/train.log").read_text(encoding="utf-8")
        return [int(step) for step in re.findall(r"resuming from \S+ at step (\d+)", log)]

    def interrupt(number: int) -> None:
        os.kill(strict_json(sweep / "0/status.json")["pid"], number)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(run, *options)
        wait_until((sweep / "0/checkpoints/last.ckpt").is_file, 120, "a checkpoint")
        interrupt(signal.SIGUSR2)
        wait_until(resumed, 120, "the requeued job")
        interrupt(signal.SIGKILL)
        brake.unlink()
    told = first.result()
    assert told.returncode == 1 and states(sweep) == ["running", "done"], told.stdout + told.stderr
    where = strict_json(sweep / "0/status.json")
    assert "job 0 did not finish" in told.stdout and f"local job {where['job_id']}, log {where['log']}" in told.stdout
    again = run(*options)
    assert again.returncode == 0 and states(sweep) == ["done"] * 2, again.stdout + again.stderr
    assert len(resumed()) == 2 and all(0 < step < 120 for step in resumed())
    assert len({(sweep / job / "drafter/last/model.safetensors").read_bytes() for job in "01"}) == 1
    assert metric(sweep / "0", "train/loss") == metric(sweep / "1", "train/loss")
    rows = strict_json(sweep / "sweep.json")["rows"]
    assert len(rows) == 2 and len({row["best_streak"] for row in rows}) == 1


def test_a_search_goes_on_after_failures_and_continues(run_script: Run, tiny_options: Options, tmp_path: Path) -> None:
    options = [*tiny_options["eval"], "drafter=untrained", "benchmark.limit=1", "run_id=s/1"]
    # the drafter has four positions, so gamma=99 fails: with seed 0 the first two trials
    space = ["sampler=tree_match", "sampler.gamma=choice(4,99)"]
    command = ["eval.py", "-m", "hydra/sweeper=optuna_speed", *options, *space]
    first = run_script(*command, "hydra.sweeper.n_trials=3", cwd=tmp_path)
    sweep = tmp_path / "outputs/multirun/eval/s/1"
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_script(*command, "hydra.sweeper.n_trials=4", cwd=tmp_path)
    assert second.returncode == 0 and "3 trials done, 1 to go" in second.stdout, second.stdout + second.stderr

    jobs = strict_json(sweep / "sweep.json")["jobs"]
    assert {job["status"] for job in jobs} == {"done", "failed"} and len(jobs) == 4
    best = yaml.safe_load((sweep / "best.yaml").read_text(encoding="utf-8"))
    rows = [row for row in strict_json(sweep / "sweep.json")["rows"] if row["method"] == "tree_match"]
    assert best["tokens_per_s"] == pytest.approx(max(row["tokens_per_s"] for row in rows))
    assert rows[0]["job"] == best["job"] == jobs[0]["job"]  # on top
    told = yaml.safe_load((sweep / "optimization_results.yaml").read_text(encoding="utf-8"))
    assert told["best_value"] == pytest.approx(best["tokens_per_s"])
    assert "sampler.gamma=4" in best["overrides"] and best["command"].startswith("python eval.py")


def test_a_study_repeats_the_trials_that_were_cut_off(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="pip install 'specdiff2[sweep]'")
    storage = f"sqlite:///{tmp_path / 'new/study.db'}"
    assert prepare_study(storage, "speed", 3) == (3, 0)
    study = optuna.load_study(study_name="speed", storage=storage)
    trials = [study.ask() for _ in range(2)]
    tried = [trial.suggest_int("x", 0, 10**6) for trial in trials]
    study.tell(trials[0], 1.0)  # the process ends before the second one does
    assert prepare_study(storage, "speed", 3) == (2, 1)
    study = optuna.load_study(study_name="speed", storage=storage)
    assert study.ask().suggest_int("x", 0, 10**6) == tried[1]
    assert prepare_study(storage, "speed", 1)[0] == 0


def test_only_what_the_sampler_reads_is_searched() -> None:
    optuna = pytest.importorskip("optuna", reason="pip install 'specdiff2[sweep]'")
    config = SimpleNamespace(sampler=SimpleNamespace(name="specdiff2"))

    def searched(**fixed: Any) -> dict[str, Any]:
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
        for key, value in fixed.items():
            trial.set_user_attr(key.replace("__", "."), value)
        sampler_space(config, trial)
        return dict(trial.params)

    assert set(searched()) == {"sampler.K", "sampler.temperature"}  # of the sampler in the configuration
    assert set(searched(sampler="tree_match")) == {"sampler.K", "sampler.temperature"}
    assert 4 <= searched(sampler="tree")["sampler.num_nodes"] <= 64
    assert set(searched(sampler="tree_lookup")) == {"sampler.num_nodes"}
    assert searched(sampler="tree", sampler__num_nodes="auto") == {}
    assert json.dumps(searched(sampler__K="4"))[2:21] == "sampler.temperature"


def test_planned_jobs_are_those_that_hydra_makes() -> None:
    task = ["sampler.K=1,2", "experiment=tiny", "sampler=specdiff2,tree", "seed=range(0,2)", "publish=False"]
    task += ["stop=[a,b],[c]", "sampler.gamma=null,4"]
    config = OmegaConf.create(
        {"hydra": {"sweeper": {"params": {"max_new_tokens": "4,8"}}, "overrides": {"task": task}}}
    )
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        parsed = OverridesParser.create().parse_overrides(["max_new_tokens=4,8", *task])
        assert list(planned_jobs(config).values()) == BasicSweeper.split_arguments(parsed, None)[0]
