"""W&B from finished runs: what the offline files hold, the report built by code, dead hosts (case 30)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from entry_runs import Options, evaluate_here, strict_json, train_here
from record_builder import toy_records, write_run
from wandb_files import OfflineRun, artifact_files, offline_runs

from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.runtime import wandb_report
from specdiff2.runtime.wandb_charts import read_content
from specdiff2.runtime.wandb_panels import REPORT_FILE, build_report
from specdiff2.runtime.wandb_report import WandbTarget, collect, upload
from specdiff2.training.wandb_artifacts import ROLLOUTS_FILE, read_rollouts
from specdiff2.types import ConfigError, CorruptFileError

DEAD = "http://127.0.0.1:9"
TRAINED = ["paths.outputs=.", "paths.drafters=drafters", "paths.rollouts=rollouts", "max_steps=6"]


@pytest.fixture(scope="module", autouse=True)
def quiet_wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, nothing outside of the test's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        scratch = str(tmp_path_factory.mktemp("wandb"))
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
            patch.setenv(name, scratch)
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_MODE", "offline")
        yield
    wandb.teardown()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_options: Options) -> Path:
    """A folder in which ``train.py`` has run (run t, W&B logger) and ``eval.py`` has measured its drafter (run e)."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = [*TRAINED, "logger=[csv,wandb]", "callbacks.decoding_probe=null"]
        train_here(tiny_options, folder / "train/t", *options)
        drafter = f"drafter={folder / 'drafters/smollm2_block/best'}"
        evaluate_here(tiny_options, folder / "eval/e", *TRAINED[:3], drafter, "grid={K:[1,2],gamma:[2,4]}")
    return folder


@pytest.fixture(scope="module")
def uploaded(work: Path) -> dict[str, OfflineRun]:
    """The evaluation's offline files by kind of run."""
    command = [str(work / "eval/e"), "--wandb", "me/project", "--offline"]
    assert wandb_report.main(command) == 0
    runs = [OfflineRun(folder) for folder in offline_runs(work / "eval/e")]
    return {one.run["job_type"]: one for one in runs}


def test_evaluation_curves_are_line_series_over_the_position(work: Path, uploaded: dict[str, OfflineRun]) -> None:
    run, summary = uploaded["eval"], strict_json(work / "eval/e/summary.json")
    drafting = [row for row in summary["rows"] if row["accept_rate"]]
    assert len(drafting) == 4
    for row in drafting:
        for key in ("accept_rate", "survival"):
            name = f"{key}/questions_T0/{row['method']}"
            assert run.step_metrics[name] == "position"
            expected = {j: value for j, value in enumerate(row[key], start=1) if value is not None}
            assert run.line(name) == pytest.approx(expected)
        assert run.summary[f"speedup/questions_T0/{row['method']}"] == pytest.approx(row["speedup"])


def test_evaluation_tables_config_and_names(work: Path, uploaded: dict[str, OfflineRun]) -> None:
    run, summary = uploaded["eval"], strict_json(work / "eval/e/summary.json")
    columns, lines = run.table("summary_rows")
    assert [line[columns.index("method")] for line in lines] == [row["method"] for row in summary["rows"]]
    assert {"speedup", "mean_streak", "tau", "K", "gamma"} <= set(columns)
    columns, lines = run.table("records")
    assert len(lines) == 5 * 3 and {"prompt_id", "text", "num_tokens", "mean_streak"} <= set(columns)
    recorded = strict_json(work / "eval/e/run.json")
    assert run.config["provenance"]["commit"] == recorded["commit"]
    assert run.config["sampler"] == recorded["config"]["sampler"] and run.run["project"] == "project"
    logged = [name for row in run.history for name in row]
    assert not [name for name in logged if name.split(".")[0].endswith("_table")]


def test_a_grid_is_drawn_over_its_settings(work: Path, uploaded: dict[str, OfflineRun]) -> None:
    run, summary = uploaded["eval"], strict_json(work / "eval/e/summary.json")
    streaks = {row["method"]: row["mean_streak"] for row in summary["rows"]}
    for gamma in (2, 4):
        name = f"over_K/mean_streak/questions_T0/specdiff2/gamma-{gamma}"
        assert run.line(name) == pytest.approx({k: streaks[f"specdiff2_K-{k}_gamma-{gamma}"] for k in (1, 2)})


def test_training_curves_per_step_and_lineage_down_to_the_evaluation(
    work: Path, uploaded: dict[str, OfflineRun]
) -> None:
    trained, evaluated = uploaded["train"], uploaded["eval"]
    positions = [f"val/accept_rate@{j}" for j in (1, 2, 3, 4)]
    assert all(trained.step_metrics[name] == "trainer/global_step" for name in positions)
    assert 0.0 in trained.line("val/accept_rate@1") and 6.0 in trained.line("val/accept_rate@1")
    stores = trained.artifacts("rollouts")
    assert len(stores) == 2 and all(one["use_after_commit"] for one in stores.values())  # inputs of the training
    assert all("manifest.json" in artifact_files(one) for one in stores.values())
    made = trained.artifacts("drafter")
    assert not any(one.get("use_after_commit") for one in made.values())  # its outputs
    (name, used), = evaluated.artifacts("drafter").items()  # fmt: skip
    assert used["use_after_commit"] and name in made and name.endswith("-best")
    assert made[name]["digest"] == used["digest"]  # one version for W&B
    assert artifact_files(used) == ["config.json", "model.safetensors"]


def test_the_wandb_logger_of_a_training_run_logs_the_same(work: Path, uploaded: dict[str, OfflineRun]) -> None:
    (folder,) = offline_runs(work / "train/t")
    live, later = OfflineRun(folder), uploaded["train"]
    for name in ("val/accept_rate@1", "val/survival@4", "val/streak"):
        steps = {row["trainer/global_step"]: row[name] for row in live.history if name in row}
        assert steps == pytest.approx(later.line(name))
    assert live.config["max_steps"] == 6 and live.config["provenance"]["seed"] == 0
    for kind in ("rollouts", "drafter"):
        assert {name: one["digest"] for name, one in live.artifacts(kind).items()} == {
            name: one["digest"] for name, one in later.artifacts(kind).items()
        }


def test_an_evaluation_uploads_itself_when_asked(work: Path, tiny_options: Options, tmp_path: Path) -> None:
    asked = ["wandb=upload", "wandb.project=mine", "wandb.offline=true", "wandb.artifacts=false"]
    run = evaluate_here(tiny_options, tmp_path / "e", "drafter=untrained", "benchmark.limit=1", *asked)
    (folder,) = offline_runs(run)
    found = OfflineRun(folder)
    assert found.run["project"] == "mine" and "mean_streak/questions_T0/specdiff2" in found.summary
    with pytest.raises(ConfigError, match=r"wandb\.projekt"):
        evaluate_here(tiny_options, tmp_path / "f", "wandb=upload", "+wandb.projekt=mine")


def panels_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    grids = [block["metadata"] for block in report["spec"]["blocks"] if block["type"] == "panel-grid"]
    return [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]


def test_report_serialises_with_its_panels(work: Path, uploaded: dict[str, OfflineRun]) -> None:
    report = strict_json(work / "eval/e" / REPORT_FILE)
    lines = {
        panel["config"]["chartTitle"]: panel["config"] for panel in panels_of(report) if "metrics" in panel["config"]
    }
    assert lines["accept_rate@j"]["xAxis"] == "position"
    assert lines["val/accept_rate@j"]["metrics"] == [f"val/accept_rate@{j}" for j in (1, 2, 3, 4)]
    assert lines["speedup over K"]["xAxis"] == "swept/K" and lines["speedup over gamma"]["xAxis"] == "swept/gamma"
    logged = set().union(*(one.step_metrics for one in uploaded.values()), *(one.summary for one in uploaded.values()))
    assert {name for config in lines.values() for name in config["metrics"]} <= logged  # no panel stays empty
    text = json.dumps(report["spec"])
    for told in ("python ", "dtype: float32", "machine: ", "| method |", "summary_rows", "records"):
        assert told in text
    filters = [run_set["filters"] for block in report["spec"]["blocks"] if block["type"] == "panel-grid"
               for run_set in block["metadata"]["runSets"]]  # fmt: skip
    groups = {entry["value"] for one in filters for entry in one["filters"] if entry["key"]["name"] == "group"}
    assert groups == {one.run["run_group"] for one in uploaded.values()}


def test_sweep_has_lines_over_the_swept_setting(tmp_path: Path) -> None:
    for index, k in enumerate((1, 8)):
        job = write_run(tmp_path / "s" / str(index), toy_records())
        (job / ".hydra").mkdir()
        (job / ".hydra/overrides.yaml").write_text(f"- sampler.K={k}\n", encoding="utf-8")
        (job / "status.json").write_text('{"status": "done"}', encoding="utf-8")
    merged = merge_jobs(tmp_path / "s")
    written = upload([tmp_path / "s"], WandbTarget("project", offline=True))
    assert len(written) == 3 and all(folder.parent == tmp_path / "s/wandb" for folder in written)
    run = OfflineRun(written[-1])
    expected = {float(row["sampler.K"]): row["speedup"] for row in merged.rows if row["method"] == "specdiff2"}
    assert run.run["job_type"] == "sweep"
    assert run.line("over_K/speedup/toy_T0/specdiff2") == pytest.approx(expected)
    report = build_report("project", "", collect([tmp_path / "s"]), "s")
    titles = [panel["config"].get("chartTitle") for panel in panels_of(report._to_model().model_dump(by_alias=True))]
    assert "speedup over K" in titles and "accept_rate@j" in titles


def fresh_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """W&B reads the environment once per process, unless it is told to forget."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()


def snapshot(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "wandb" not in path.relative_to(folder).parts[0]]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": DEAD}, "W&B cannot be reached"),
        ({"WANDB_API_KEY": "", "WANDB_BASE_URL": DEAD}, "no API key"),
    ],
)
def test_case_30_dead_host_or_no_key_is_one_message_and_the_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    environment: dict[str, str], told: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("WANDB_MODE")
    fresh_environment(monkeypatch, NETRC=str(tmp_path / "none"), **environment)
    folder = write_run(tmp_path / "e", toy_records())
    before = snapshot(folder)
    assert wandb_report.main([str(folder), "--wandb", "me/project", "--publish", "--timeout", "2"]) == 1
    error = capsys.readouterr().err
    assert told in error and "--offline" in error and "Traceback" not in error
    assert strict_json(folder / REPORT_FILE)["displayName"].startswith("SpecDiff-2")
    after = snapshot(folder)
    assert {name: after[name] for name in before} == before
    with pytest.raises(ConfigError, match="W&B"):
        upload([folder], WandbTarget("project", init_timeout_s=2))
    assert upload([folder], WandbTarget("project", init_timeout_s=2), fall_back=True)[0].name.startswith("offline-run")


def test_publishing_to_a_dead_host_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_environment(monkeypatch, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=DEAD, WANDB_HTTP_TIMEOUT="2")
    report = build_report("project", "me", collect([write_run(tmp_path / "e", toy_records())]), "e")
    with pytest.raises(ConfigError, match=r"not published.*wandb_report\.json"):
        wandb_report.publish(report)
    nobody = build_report("project", "", collect([tmp_path / "e"]), "e")
    with pytest.raises(ConfigError, match="entity/project"):
        wandb_report.publish(nobody)


def test_wrong_inputs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", "a/b/c", "a/"):
        with pytest.raises(ConfigError, match=re.escape(f"--wandb {text!r}")):
            WandbTarget.parse(text)
    assert WandbTarget.parse("me/project") == WandbTarget("project", "me")
    (tmp_path / "empty").mkdir()
    assert wandb_report.main([str(tmp_path / "empty"), "--wandb", "p", "--offline"]) == 1
    assert "neither summary.json nor metrics.csv" in capsys.readouterr().err
    (tmp_path / "empty/multirun.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="has not ended"):
        read_content(tmp_path / "empty")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(ConfigError, match="WANDB_MODE=disabled"):
        upload([tmp_path], WandbTarget("project"))
    assert upload([tmp_path], WandbTarget("project"), fall_back=True) == []
    stores = {"train": str(tmp_path / "empty"), "val": str(tmp_path / "gone")}
    (tmp_path / ROLLOUTS_FILE).write_text(json.dumps(stores), encoding="utf-8")
    assert read_rollouts(tmp_path) == [tmp_path / "empty"]
    (tmp_path / ROLLOUTS_FILE).write_text("[", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"rollouts\.json is damaged"):
        read_rollouts(tmp_path)
