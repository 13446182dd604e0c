"""What train.py refuses or resolves before any model loads: prompts, rollout laws, checkpoints, sweeps' status."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from specdiff2.data.hub_prompts import HubPrompts
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.prompt import Prompt
from specdiff2.models.drafter_files import BLOCK_FORMAT, WEIGHTS_FILE, read_record, store_drafter
from specdiff2.objectives import CrossEntropy, ObjectiveSchedule, Stage, Streak
from specdiff2.runtime import publish, resume, sweep_callback, training
from specdiff2.runtime.prompts import check_disjoint, load_prompts
from specdiff2.runtime.rollouts import check_sampling, teacher_sampling
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams

MODEL = {"gamma": 4, "shifted": True, "attention": "causal_prefix", "denoising_steps": 1}
SCHEDULE = ObjectiveSchedule([Stage(CrossEntropy(), 4), Stage(Streak())])


def prompt(name: str, text: str) -> Prompt:
    return Prompt(name, [{"role": "user", "content": text}])


# ---------------------------------------------------------------- prompts
def test_held_out_prompts_must_not_be_trained_on() -> None:
    train = [prompt("a", "one"), prompt("b", "two")]
    check_disjoint(train, [prompt("a", "three")])  # ids count within their source only
    with pytest.raises(ConfigError, match=r"1 of 2 prompts.*'v'.*'b'"):
        check_disjoint(train, [prompt("u", "four"), prompt("v", " two\n")])


def test_the_fingerprint_of_rollouts_knows_what_the_prompts_say() -> None:
    class Source:
        def __init__(self, text: str) -> None:
            self.text = text

        def load(self) -> list[Prompt]:
            return [prompt("a", self.text)]

        def describe(self) -> dict[str, str]:
            return {"source": "hub", "name": "same"}

    one, two = load_prompts(Source("one")), load_prompts(Source("two"))
    assert one.origin["name"] == "same" and one.origin != two.origin
    assert one.origin == load_prompts(Source("one")).origin


def test_damaged_gzip_prompts(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"question": "one"}\n' * 50))
    data[12:20] = b"\xff" * 8  # inside the deflate stream
    (tmp_path / "q.jsonl.gz").write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match=r"q\.jsonl\.gz"):
        list(read_jsonl(tmp_path / "q.jsonl.gz"))


@pytest.mark.parametrize("error", [ConnectionError("no route"), httpx.ConnectError("no route")])
def test_a_connection_lost_while_streaming_is_one_message(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"question": "one"}
        raise error

    monkeypatch.setattr("datasets.load_dataset", rows)
    with pytest.raises(ConfigError, match=r"some/set.*no route"):
        HubPrompts("some/set", prompt_field="question", streaming=True).load()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_broken_line_of_a_local_set_is_named(streaming: bool, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "one"}\n{"question":\n', encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"q\.jsonl:2"):
        HubPrompts(str(path), prompt_field="question", streaming=streaming).load()


# ---------------------------------------------------------------- rollout laws
def test_the_teacher_law_is_that_of_the_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    law = teacher_sampling({"temperatures": [0.7], "top_k": 5, "top_p": 0.9})
    assert law == SamplingParams(0.7, 5, 0.9) and "one-hot" not in caplog.text
    assert teacher_sampling({"temperatures": [0.0]}).temperature == 0 and "one-hot" in caplog.text
    with pytest.raises(ConfigError, match=r"temperatures=\[0.0, 1.0\]"):
        teacher_sampling({"temperatures": [0.0, 1.0]})


@pytest.mark.parametrize(
    "wrong", [{"temperatures": [1.0, -1.0]}, {"temperatures": []}, {"top_p": 0.0}, {"samples_per_prompt": 0}]
)
def test_sampling_settings_are_checked_without_a_model(wrong: dict) -> None:
    check_sampling({"temperatures": [0.0, 1.0], "top_k": 0, "batch_size": 3})
    with pytest.raises(ConfigError):
        check_sampling(wrong)


# ---------------------------------------------------------------- prefix loss
@pytest.mark.parametrize(
    ("weight", "model", "expected"),
    [
        (None, MODEL, 0.05),
        (None, MODEL | {"attention": "bidirectional"}, 0.0),
        (None, MODEL | {"shifted": False}, 0.0),
        (0.2, MODEL, 0.2),
        (0.0, MODEL | {"shifted": False}, 0.0),
    ],
)
def test_prefix_loss_of_null_follows_the_model(weight: float | None, model: dict, expected: float) -> None:
    assert training.resolve_prefix_loss(weight, model) == expected


def test_prefix_loss_that_is_impossible_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefix_loss_weight=0\.1"):
        training.resolve_prefix_loss(0.1, MODEL | {"attention": "bidirectional"})


# ---------------------------------------------------------------- checkpoints
def write_checkpoint(folder: Path, step: int = 6, **record: object) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    path = folder / "checkpoints" / "last.ckpt"
    content = {
        "global_step": step,
        "state_dict": {"w": torch.zeros(1000)},
        "optimizer_states": [{"param_groups": [{"lr": 1e-4, "initial_lr": 1e-3}]}],
        "specdiff2": {"gamma": 4, "shifted": True, "schedule": SCHEDULE.describe(), **record},
    }
    torch.save(content, path)
    return path


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    assert resume.read_checkpoint(path).step == 6
    whole = path.read_bytes()
    for name, data in {
        "cut": whole[: len(whole) // 2],
        "short": whole[:900],
        "empty": b"",
        "text": b"hello, world",
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptFileError, match=rf"{name}.*resume=false"):
            resume.read_checkpoint(tmp_path / name)
    torch.save({"state_dict": {}}, tmp_path / "foreign")
    torch.save([1], tmp_path / "list")
    for name in ("foreign", "list"):
        with pytest.raises(CorruptFileError, match=r"not one that train\.py wrote"):
            resume.read_checkpoint(tmp_path / name)


def test_settings_are_compared_with_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = resume.read_checkpoint(write_checkpoint(tmp_path))
    resume.check_resume(checkpoint, MODEL, SCHEDULE, 1e-3)
    assert not caplog.text
    for wrong in ({"gamma": 5}, {"shifted": False}):
        with pytest.raises(MismatchError, match=next(iter(wrong))):
            resume.check_resume(checkpoint, MODEL | wrong, SCHEDULE, 1e-3)
    later = ObjectiveSchedule([Stage(CrossEntropy(), 8), Stage(Streak())])
    with pytest.raises(MismatchError, match=r"objective\.warmup_steps=4"):
        resume.check_resume(checkpoint, MODEL, later, 1e-3)
    with caplog.at_level(logging.WARNING):
        resume.check_resume(checkpoint, MODEL, ObjectiveSchedule.single(CrossEntropy(0.5)), 5e-4)
    assert "goes on with CrossEntropy" in caplog.text and "optimizer.lr=0.0005 is not used" in caplog.text


def test_curves_up_to_the_checkpoint_are_continued(tmp_path: Path) -> None:
    checkpoint = resume.read_checkpoint(write_checkpoint(tmp_path / "old"))
    # evaluations count the steps done, losses are counted from 0: that of row 6 comes after the checkpoint
    rows = "epoch,step,train/loss,val/streak\n" + "".join(f"0,{s},,{s}.1\n0,{s},{s}.5,\n" for s in range(10))
    (tmp_path / "old/metrics.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "new").mkdir()
    resume.continue_curves(checkpoint, tmp_path / "new")
    lines = (tmp_path / "new/metrics.csv").read_text(encoding="utf-8").split()
    assert lines[0] == "epoch,step,train/loss,val/streak"
    assert lines[-3:] == ["0,5,,5.1", "0,5,5.5,", "0,6,,6.1"] and len(lines) == 1 + 13
    resume.continue_curves(checkpoint, tmp_path / "old")  # a killed run goes on in its own folder: the same rows there
    assert (tmp_path / "old/metrics.csv").read_text(encoding="utf-8").split() == lines
    (tmp_path / "new/metrics.csv").write_text(rows, encoding="utf-8")  # another folder keeps what it has
    resume.continue_curves(checkpoint, tmp_path / "new")
    assert (tmp_path / "new/metrics.csv").read_text(encoding="utf-8") == rows


def test_a_run_goes_on_with_its_own_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same settings only; where the last one is torn, the newest whole one."""
    assert resume.own_checkpoint(tmp_path, "abc") is None
    folder = tmp_path / "checkpoints"
    content = torch.load(write_checkpoint(tmp_path), weights_only=True)
    content["specdiff2"]["settings"] = "abc"
    torch.save(content, folder / "step-4.ckpt")
    (folder / "last.ckpt").write_bytes(b"torn")
    found = resume.own_checkpoint(tmp_path, "abc")
    assert found is not None and found.path.name == "step-4.ckpt" and found.step == 6
    assert resume.own_checkpoint(tmp_path, "def") is None and "other settings" in caplog.text


def test_settings_that_compute_the_same_run_have_one_digest() -> None:
    config = {key: key for key in resume.DECISIVE} | {"run_id": "a", "threads": 1, "trainer": {"devices": 2}}
    digest = resume.settings_digest(config)
    assert digest == resume.settings_digest(config | {"run_id": "b", "threads": 2, "trainer": {"devices": 1}})
    assert digest != resume.settings_digest(config | {"seed": 1})


# ---------------------------------------------------------------- published drafters
def test_drafters_of_an_earlier_run_are_withdrawn(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before/config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "best").mkdir()  # something else: no drafter
    publish.withdraw(tmp_path, ["before", "best", "last"])
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_kept_steps_are_published_and_older_ones_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, tensors = ["step-2", "step-10", "last"], {"weight": torch.zeros(1)}
    for name in [*(f"run/drafter/{name}" for name in names), "drafters/m/step-5", "drafters/m/best"]:
        store_drafter(tmp_path / name, BLOCK_FORMAT, {}, {"from": name}, tensors,
                      lambda folder: save_file(tensors, folder / WEIGHTS_FILE))  # fmt: skip
    (tmp_path / "drafters/m/step-notes").mkdir()  # somebody's own, no drafter
    paths = {"drafters": str(tmp_path / "drafters")}
    config = {"publish": True, "model_name": "m", "paths": paths, "verifier": {}}
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(publish, "default_sampler", lambda *_: "specdiff2")  # these folders hold no real drafter
    publish.report(config, tmp_path / "run", names)
    shown = tmp_path / "drafters/m"
    assert sorted(path.name for path in shown.glob("[!.]*")) == ["last", "step-10", "step-2", "step-notes"]
    assert read_record(shown / "step-10")["training"] == {"from": "run/drafter/step-10"}
    assert f"eval.py drafter={shown}/last" in capsys.readouterr().out


# ---------------------------------------------------------------- interrupted
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_an_interrupted_training_says_how_to_go_on(
    has_checkpoint: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        is_global_zero, global_step, loggers = True, 6, ()

        def fit(self, *_: object, **__: object) -> None:
            raise SystemExit(1)  # what Lightning makes of Ctrl-C

    if has_checkpoint:
        write_checkpoint(tmp_path)
    with pytest.raises(SystemExit) as caught:
        training.fit(Interrupted(), None, None, None, tmp_path)
    shown = capsys.readouterr().err
    assert caught.value.code == 130 and "interrupted at step 6" in shown
    assert (f"resume={tmp_path}" in shown) == has_checkpoint and ("no checkpoint" in shown) != has_checkpoint


# ---------------------------------------------------------------- sweeps
@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": 3}', '{"status": "running", "fingerprint": "f"}'])
def test_a_damaged_status_is_a_job_not_done(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0/status.json").write_text(text, encoding="utf-8")
    assert not sweep_callback.is_done(tmp_path / "0", "f")
    settings = {
        "sweep": {"dir": str(tmp_path)},
        "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher"},
    }
    sweep_callback._current_sweep[:] = [OmegaConf.create(settings)]
    sweep_callback.finish_sweep()
    assert "0 of 1 jobs done" in capsys.readouterr().out
    (tmp_path / "0/status.json").write_text(json.dumps({"status": "done", "fingerprint": "f"}), encoding="utf-8")
    assert sweep_callback.is_done(tmp_path / "0", "f") and not sweep_callback.is_done(tmp_path / "1", "f")
