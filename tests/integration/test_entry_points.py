"""train.py and eval.py as users run them, on a tiny model: files, tables, resume, sweeps, errors (cases 30-33)."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entry_runs import ROOT, Options, evaluate_here, strict_json, train_here

from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.evaluation import evaluate
from specdiff2.runtime.rebuild_report import main as rebuild_report
from specdiff2.runtime.resume import find_checkpoint
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, run_script: Run, tiny_options: Options) -> Path:
    """A folder in which ``python train.py`` has run (run_id a/b)."""
    folder = tmp_path_factory.mktemp("work")
    done = run_script("train.py", *tiny_options["train"], "run_id=a/b", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measure:  python eval.py drafter=outputs/drafters/smollm2_block/best" in done.stdout
    return folder


def test_train_leaves_everything_a_later_run_needs(trained: Path) -> None:
    run = trained / "outputs/train/a/b"
    record = strict_json(run / "run.json")
    assert record["command"].startswith("python train.py experiment=tiny") and record["seed"] == 0
    assert {"commit", "dirty", "machine", "dtype", "threads", "runtime", "versions"} <= set(record)
    assert record["config"]["max_steps"] == 8 and record["dtype"] == "float32"
    assert strict_json(run / "status.json")["status"] == "done"
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for column in (
        "train/loss",
        "train/streak",
        "val/streak",
        "val/accept_rate@1",
        "val/survival@4",
        "probe/mean_streak",
    ):
        assert any(row[column] for row in rows), column
    assert (run / "checkpoints/last.ckpt").is_file()
    for name in ("before", "best", "last"):
        assert (trained / "outputs/drafters/smollm2_block" / name / "model.safetensors").is_file()
    assert not [path for path in (trained / "outputs").rglob("*") if "=" in path.name]


def test_eval_writes_records_summary_and_report(trained: Path, run_script: Run, tiny_options: Options) -> None:
    done = run_script("eval.py", *tiny_options["eval"], "run_id=a/b", cwd=trained)
    assert done.returncode == 0, done.stdout + done.stderr
    run = trained / "outputs/eval/a/b"
    summary = strict_json(run / "summary.json")
    assert [row["method"] for row in summary["rows"]] == ["autoregressive", "specdiff2"]
    row = summary["rows"][1]
    assert row["num_prompts"] == 3 and row["num_drafts"] == 2 and row["gamma"] == 4 and row["tau_includes_bonus"]
    assert row["lossless_check"]["identical"] == row["lossless_check"]["checked"] == 3
    records = (run / "records.jsonl").read_text(encoding="utf-8").split("\n")
    assert all(json.loads(line)["rounds"] is not None for line in records if line)
    assert "tokens/s" in done.stdout and str(run / "report.html") in done.stdout
    report = (run / "report.html").read_text(encoding="utf-8")
    curves = "streak over training"
    assert "<html" in report and "http-equiv" not in report and curves in report
    before = (run / "report.html").stat().st_mtime_ns
    assert rebuild_report([str(run)]) == 0 and (run / "report.html").stat().st_mtime_ns > before
    again = (run / "report.html").read_text(encoding="utf-8")
    assert again.count("<svg") == report.count("<svg") and curves in again  # the training section is still there
    (run / "training_runs.json").write_text("{", encoding="utf-8")
    assert rebuild_report([str(run)]) == 1


def test_prompt_shows_streaks(
    trained: Path,
    tiny_options: Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(trained)
    evaluate_here(tiny_options, tmp_path, "prompt='what is 3?'", "color=never", "max_new_tokens=8")
    shown = capsys.readouterr().out
    assert "--- specdiff2 ---" in shown and "[" in shown and "mean streak" in shown and "tau" in shown
    assert "the same tokens as the verifier alone" in shown
    evaluate_here(tiny_options, tmp_path, "prompt='what is 3?'", "color=always", "max_new_tokens=8")
    assert "\x1b[" in capsys.readouterr().out


@pytest.mark.parametrize("sampler", ["specdiff", "tree_match", "leviathan", "block", "specinfer", "traversal"])
def test_every_sampler_decodes_at_both_temperatures(
    trained: Path, tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    monkeypatch.chdir(trained)
    single = ["sampler.K=1"] if sampler in ("specdiff", "leviathan", "block") else []
    for temperature in ("0.0", "0.7"):
        options = [f"sampler={sampler}", *single, f"verifier.temperature={temperature}", "benchmark.limit=1"]
        run = evaluate_here(tiny_options, tmp_path / temperature, *options)
        assert [row["method"] for row in strict_json(run / "summary.json")["rows"]] == ["autoregressive", sampler]


def test_untrained_drafter(tiny_options: Options, tmp_path: Path) -> None:
    stops = "stop_ids=[5,6]"
    run = evaluate_here(tiny_options, tmp_path, "drafter=untrained", "model.gamma=3", "sampler.gamma=2", stops)
    assert strict_json(run / "benchmark.json")["stop_ids"] == [5, 6]
    assert strict_json(run / "summary.json")["rows"][1]["gamma"] == 2


def test_a_suite_of_benchmarks_is_one_run(tiny_options: Options, tmp_path: Path, prompt_file: Path) -> None:
    cfg = build.load_config(ROOT / "conf", "eval", [*tiny_options["eval"], "drafter=untrained"], tmp_path)
    part = {"_target_": "specdiff2.data.prompts.JsonlPrompts", "path": str(prompt_file), "prompt_field": "question"}
    cfg.benchmark = {
        "_target_": "specdiff2.runtime.factories.suite",
        "first": {**part, "limit": 1},
        "second": {**part, "limit": 2},
    }
    config = build.check(cfg, EvalConfig)
    evaluate(config, build.begin(config))
    rows = strict_json(tmp_path / "summary.json")["rows"]
    assert [(row["benchmark"], row["num_prompts"]) for row in rows[::2]] == [("first", 1), ("second", 2)]


def test_resume_continues_in_a_new_run(
    trained: Path, tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    run = train_here(tiny_options, tmp_path / "r", "resume=outputs/train/a/b", "max_steps=10", "publish=false")
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert steps == list(range(10))  # the earlier run's curve, then its continuation
    old = Path("outputs/train/a/b/drafter")
    for name in ("before", "best", "last"):  # the first two were exported by the earlier run only
        assert (run / "drafter" / name / "model.safetensors").is_file()
    before = "before/model.safetensors"
    assert (run / "drafter" / before).read_bytes() == (old / before).read_bytes()
    assert find_checkpoint(True, Path("outputs")) == str(Path("outputs/train/a/b/checkpoints/last.ckpt"))
    no_verifier = "verifier.source=/nowhere"  # refused before a model loads
    with pytest.raises(MismatchError, match="gamma"):
        train_here(tiny_options, tmp_path / "s", "resume=outputs/train/a/b", "model.gamma=3", no_verifier)
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(Path("outputs/train/a/b/checkpoints/last.ckpt").read_bytes()[:5000])
    with pytest.raises(CorruptFileError, match=r"cut\.ckpt"):
        train_here(tiny_options, tmp_path / "s", f"resume={cut}", no_verifier)


def test_the_expected_streak_reads_the_law_of_the_rollouts(
    tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = HFVerifier.window_probs

    def spy(self: HFVerifier, batch: Any, ids: Any, sampling: SamplingParams) -> Any:
        seen.append(sampling)
        return original(self, batch, ids, sampling)

    monkeypatch.setattr(HFVerifier, "window_probs", spy)
    law = ["data.rollouts.temperatures=[0.7]", "data.rollouts.top_k=5", "data.rollouts.top_p=0.9"]
    paths = [f"paths.outputs={tmp_path}", "callbacks.decoding_probe=null", "max_steps=5"]
    train_here(tiny_options, tmp_path / "r", "objective=streak_expected", *law, *paths)
    assert seen and set(seen) == {SamplingParams(0.7, 5, 0.9)}


def test_held_out_prompts_that_are_trained_on_are_refused_before_a_model_loads(
    tiny_options: Options, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"data\.val_prompts: 1 of 3"):
        train_here(tiny_options, tmp_path, "data.train_prompts.skip=2", "verifier.source=/nowhere")


@pytest.mark.parametrize("objective", ["ce_decay", "mdm", "streak_expected"])
def test_other_objectives_and_online_rollouts_train(
    trained: Path, tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    monkeypatch.chdir(trained)  # rollouts are reused
    online = [] if objective == "mdm" else ["data.online=true"]
    run = train_here(tiny_options, tmp_path, f"objective={objective}", "publish=false", *online)
    assert (run / "drafter/best/config.json").is_file()


def test_missing_and_damaged_drafters_are_refused_before_the_verifier_loads(
    trained: Path, tiny_options: Options, tmp_path: Path
) -> None:
    no_verifier = "verifier.source=/nowhere"  # would fail otherwise
    with pytest.raises(ConfigError, match=r"python train\.py.*make demo"):
        evaluate_here(tiny_options, tmp_path, "drafter=/nowhere/best", no_verifier)
    trained_drafter = f"drafter={trained / 'outputs/drafters/smollm2_block/best'}"
    with pytest.raises(ConfigError, match=r"gamma=99: expected at most 4"):
        evaluate_here(tiny_options, tmp_path, trained_drafter, "sampler.gamma=99", no_verifier)
    with pytest.raises(ConfigError, match="prompt=' '"):
        evaluate_here(tiny_options, tmp_path, "drafter=untrained", "prompt=' '", no_verifier)
    damaged = shutil.copytree(trained / "outputs/drafters/smollm2_block/best", tmp_path / "damaged")
    (damaged / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="damaged"):
        evaluate_here(tiny_options, tmp_path, f"drafter={damaged}", no_verifier)
    cut = shutil.copytree(trained / "outputs/drafters/smollm2_block/best", tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CorruptFileError, match="cut"):
        evaluate_here(tiny_options, tmp_path, f"drafter={cut}")


def test_a_named_rollout_folder_refuses_other_settings(tiny_options: Options, tmp_path: Path) -> None:
    folder = f"data.folder={tmp_path / 'store'}"
    paths = f"paths.outputs={tmp_path}"
    train_here(tiny_options, tmp_path / "a", folder, paths, "max_steps=5", "callbacks.decoding_probe=null")
    with pytest.raises(MismatchError, match="temperatures"):
        train_here(tiny_options, tmp_path / "b", folder, paths, "data.rollouts.temperatures=[0.5]")


def test_missing_checkpoint_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume=true"):
        find_checkpoint(True, tmp_path)
    with pytest.raises(ConfigError, match="resume="):
        find_checkpoint(str(tmp_path), tmp_path)
    assert find_checkpoint(False, tmp_path) is None


def test_case_30_dead_wandb_host_does_not_end_training(
    trained: Path, run_script: Run, tiny_options: Options, tmp_path: Path
) -> None:
    shutil.copytree(trained / "outputs/rollouts", tmp_path / "outputs/rollouts")
    dead = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"}
    options = ["logger=[csv,wandb]", "logger.wandb.init_timeout_s=2", "max_steps=5", "run_id=a"]
    done = run_script("train.py", *tiny_options["train"], *options, cwd=tmp_path, **dead)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "W&B cannot be reached" in done.stdout + done.stderr
    run = tmp_path / "outputs/train/a"
    assert (run / "metrics.csv").is_file() and (run / "drafter/best").is_dir()
    assert list((run / "wandb").glob("offline-run-*"))


def test_case_31_failing_sweep_job_keeps_the_others_and_reruns(
    trained: Path, run_script: Run, tiny_options: Options
) -> None:
    command = ["eval.py", "-m", *tiny_options["eval"], "benchmark.limit=2", "run_id=s/1", "sampler.gamma=2,99,4"]
    first = run_script(*command, cwd=trained)
    sweep = trained / "outputs/multirun/eval/s/1"
    assert first.returncode == 1 and "gamma=99" in first.stderr and "run_id=s/1" in first.stdout
    states = [strict_json(sweep / job / "status.json")["status"] for job in "012"]
    assert states == ["done", "failed", "done"]
    assert "ConfigError" in (sweep / "1/traceback.txt").read_text(encoding="utf-8")
    merged = (sweep / "sweep.csv").read_text(encoding="utf-8")
    assert "sampler.gamma" in merged.split("\n")[0]
    rows = list(csv.DictReader(merged.split("\n")))
    assert {row["sampler.gamma"] for row in rows} == {"2", "4"}
    assert (sweep / "sweep.html").is_file()
    stamps = {job: (sweep / job / "records.jsonl").stat().st_mtime_ns for job in "02"}
    again = run_script(*command, cwd=trained)
    assert again.returncode == 1 and again.stdout.count("done already") == 2
    assert stamps == {job: (sweep / job / "records.jsonl").stat().st_mtime_ns for job in "02"}


@pytest.mark.parametrize(
    ("script", "override", "named"),
    [
        ("eval.py", "gama=3", "gamma"),
        ("eval.py", "+typo=1", "'typo'"),
        ("train.py", "model.gamma=two", "model.gamma='two'"),
    ],
)
def test_case_32_wrong_settings_end_with_one_message(
    run_script: Run, tiny_options: Options, tmp_path: Path, script: str, override: str, named: str
) -> None:
    done = run_script(script, "verifier=hf", "verifier.source=/nowhere", override, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: " in done.stderr and named in done.stderr and "Traceback" not in done.stderr
    assert "/nowhere" not in done.stderr.split("error: ")[1]
    assert not list(tmp_path.rglob("rollouts"))
