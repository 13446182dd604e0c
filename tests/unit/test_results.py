"""An experiment's results.json: built from run folders, refused where they do not fit, and every committed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from record_builder import RUN, toy_records, write_manifest, write_run

from specdiff2.evaluation.report import write_report
from specdiff2.runtime.results import RESULTS_FILE, build_results, main, read_results
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted(ROOT.glob("experiments/*/results*.json"))
NOT_OF_DECODING = "008-preflight"  # its rows are passes of models, predicted and timed


def run(folder: Path, status: str | None = "done", num_prompts: int = 4, **header: Any) -> Path:
    write_run(folder, toy_records(num_prompts), **header)
    write_manifest(folder, ["autoregressive", "specdiff", "specdiff2"])
    if status:
        (folder / "status.json").write_text(json.dumps({"status": status}), encoding="utf-8")
    return folder


def sweep(folder: Path) -> Path:
    for number in (0, 1):
        job = run(folder / str(number), num_prompts=3)
        (job / ".hydra").mkdir()
        overrides = [f"sampler.K={4 * number + 1}", "benchmark=toy"]
        (job / ".hydra/overrides.yaml").write_text(yaml.safe_dump(overrides), encoding="utf-8")
    return folder


def test_one_run_is_its_summary_under_its_header(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    found = build_results([folder])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert found["rows"] == summary["rows"] and found["comparisons"] == summary["comparisons"]
    assert {key: found[key] for key in ("command", "commit", "machine", "seed")} == {
        key: RUN[key] for key in ("command", "commit", "machine", "seed")
    }
    assert build_results([run(tmp_path / "b", dirty=True)])["commit"] == "abc123 with changes"
    elsewhere = build_results([run(tmp_path / "c", command="python eval.py drafter=/secret/place/best")])
    assert elsewhere["command"] == "python eval.py drafter=best"


def test_runs_of_one_commit_share_a_table(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, command=f"python eval.py run_id={name}") for name in "ab"]
    found = build_results(folders)
    assert found["command"] == "python eval.py run_id=a ; python eval.py run_id=b"
    assert [row["run"] for row in found["rows"]] == ["a"] * 3 + ["b"] * 3
    assert found["rows"][3]["command"] == "python eval.py run_id=b" and "commit" not in found["rows"][3]
    assert [one["run"] for one in found["comparisons"]] == ["a", "b"]


@pytest.mark.parametrize("changes", [{"commit": "def"}, {"machine": "other"}, {"threads": 2}, {"dirty": True}])
def test_runs_that_differ_are_mixed_only_when_asked(changes: dict[str, Any], tmp_path: Path) -> None:
    folders = [run(tmp_path / "a"), run(tmp_path / "b", **changes)]
    with pytest.raises(MismatchError, match="--mixed"):
        build_results(folders)
    key = "commit" if "dirty" in changes else next(iter(changes))
    rows = build_results(folders, mixed=True)["rows"]
    assert rows[0][key] == RUN[key] != rows[3][key]


def test_a_sweep_tells_the_settings_of_every_row(tmp_path: Path) -> None:
    found = build_results([sweep(tmp_path / "k")])
    assert [row["settings"] for row in found["rows"]] == [{"sampler.K": 1}] * 3 + [{"sampler.K": 5}] * 3
    (tmp_path / "k/1/status.json").write_text('{"status": "failed"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="'failed'"):
        build_results([tmp_path / "k"])


@pytest.mark.parametrize("damage", ["running", "no summary", "no run", "nothing", "empty"])
def test_unfinished_runs_are_refused(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    if damage == "empty":
        folder.mkdir()
    elif damage != "nothing":
        run(folder, "running" if damage == "running" else "done")
    for name in {"no summary": ["summary.json"], "no run": ["run.json"]}.get(damage, []):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"expected a (finished|run)"):
        build_results([folder])


def test_command_writes_results_claims_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run(tmp_path / "a", None), sweep(tmp_path / "k")]
    write_report([folders[0]])
    entry = {"id": "more_drafts", "arms": {"many": "specdiff2", "one": "specdiff"}}
    spec = tmp_path / "claims.yaml"
    spec.write_text(yaml.safe_dump({"run": str(folders[0]), "claims": [entry]}), encoding="utf-8")
    out = tmp_path / "out"
    given = [*map(str, folders), "--out", str(out), "--claims", str(spec), "--plot", "survival by position"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "SpecDiff-2, K 5" in shown and "SpecDiff-2, a" in shown and "4 prompts" in shown and "3 prompts" in shown
    assert "More drafts give a longer streak. | Figure 5 | - | **confirmed**" in shown
    assert len(read_results(out / RESULTS_FILE)["rows"]) == 9
    assert json.loads((out / "claims.json").read_text(encoding="utf-8"))["claims"][0]["verdict"] == "confirmed"
    drawing = ElementTree.fromstring((out / "survival-by-position.svg").read_text(encoding="utf-8"))
    tags = [element.tag.split("}")[-1] for element in drawing.iter()]
    assert tags[0] == "svg" and "style" in tags and "path" in tags
    assert any("--card" in (element.text or "") for element in drawing.iter() if element.tag.endswith("style"))


def test_nothing_is_written_where_anything_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a")
    write_report([folder])
    assert main([str(folder), "--out", str(tmp_path / "out"), "--plot", "typo"]) == 1
    assert "survival by position" in capsys.readouterr().err  # names what there is
    assert main([str(folder), "--out", str(tmp_path / "out"), "--claims", str(tmp_path / "gone.yaml")]) == 1
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- the schema
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results_are_in_the_schema(path: Path) -> None:
    if path.parent.name == NOT_OF_DECODING:
        with pytest.raises(CorruptFileError, match=r"rows\[\]\.speedup"):
            read_results(path)
        return
    assert read_results(path)["rows"]


def test_there_are_committed_results() -> None:
    assert len({path.parent.name for path in COMMITTED}) >= 10


@pytest.mark.parametrize("damage", ["header", "row", "rows", "list", "text", "gone"])
def test_other_schemas_are_refused(damage: str, tmp_path: Path) -> None:
    record = build_results([run(tmp_path / "a")])
    if damage == "header":
        del record["machine"]
    elif damage == "row":
        del record["rows"][1]["lossless_check"]
    elif damage == "rows":
        record["rows"] = []
    path = tmp_path / RESULTS_FILE
    if damage != "gone":
        text = json.dumps([record] if damage == "list" else record)
        path.write_text("{" if damage == "text" else text, encoding="utf-8")
    with pytest.raises(ConfigError if damage == "gone" else CorruptFileError, match=r"results\.json"):
        read_results(path)
