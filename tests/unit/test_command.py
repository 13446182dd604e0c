"""Free text on the command line, clear refusals, and a disk that is full."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from specdiff2.evaluation import records
from specdiff2.runtime import build
from specdiff2.runtime.command import clear_composition_error, quote_prompt
from specdiff2.types import SpecDiffError

CONF = Path(__file__).resolve().parents[2] / "conf"
AWKWARD = [
    "What's 7 * 6 (in words), please?", "a,b", "42", "true", "x=1!", "{a: 1}", "[1]", "a: b # c", 'say "hi"', " lead",
    "ends in a backslash\\", "two\\\\", "it\\'s", "'", "'one' and 'two'", '"a" or "b"', "${seed}", "\\${seed}",
    "\\\\${seed}'\\", "$HOME ${", "two\nlines", "è 好", "null?", "1e3", "a\\b'c",
]  # fmt: skip


def parsed(argument: str) -> object:
    """What Hydra and OmegaConf make of it."""
    override = OverridesParser.create().parse_override(argument)
    assert not override.is_sweep_override()
    return OmegaConf.to_container(OmegaConf.create({"prompt": override.value(), "seed": 1}), resolve=True)["prompt"]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_prompt_arrives_letter_by_letter(text: str) -> None:
    kept, argument = quote_prompt(["seed=1", f"prompt={text}"])
    assert kept == "seed=1" and parsed(argument) == text


@pytest.mark.parametrize(
    "argument", ["prompt=", "prompt=null", "prompt='quoted, already'", 'prompt="it\'s"', "stop=[a]"]
)
def test_what_needs_no_quotes_stays(argument: str) -> None:
    assert quote_prompt([argument]) == [argument]


def test_sweeps_over_prompts_stay_sweeps() -> None:
    for flag in ("-m", "--multirun"):
        assert quote_prompt([flag, "prompt=a,b"]) == [flag, "prompt=a,b"]


def test_main_sees_quoted_arguments_and_run_json_the_typed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", "prompt=What's 7, please?"])
    seen: list[str] = []

    def main() -> None:
        seen.extend(sys.argv)
        run = {"seed": 0, "threads": None, "run_id": "a", "paths": {"run": str(tmp_path)}, "verifier": {}}
        build.begin(run)

    build.run_entry_point(main, CONF)
    assert seen[1] == "prompt='What\\'s 7, please?'"
    command = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["command"]
    assert command == "python eval.py 'prompt=What'\"'\"'s 7, please?'"


# ---------------------------------------------------------------- a disk that is full
@pytest.mark.parametrize(
    ("number", "word"), [(28, "cannot write"), (122, "cannot write"), (30, "cannot"), (13, "access")]
)
def test_a_full_or_refusing_disk_is_one_message(
    number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py"])

    def main() -> None:
        build._run_ids[:] = ["a/b"]
        raise OSError(number, "the reason", str(tmp_path / "records.jsonl"))

    with pytest.raises(SystemExit) as caught:
        build.run_entry_point(main, CONF)
    shown = capsys.readouterr().err
    assert caught.value.code == 1 and shown.count("\n") == 1 and "Traceback" not in shown
    assert word in shown and "records.jsonl" in shown and "the reason" in shown and "run_id=a/b" in shown


def test_a_record_writer_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py"])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def main() -> None:
        with records.RecordWriter(tmp_path / "records.jsonl") as writer:
            monkeypatch.setattr(writer, "append", full)
            writer.append(None)  # type: ignore[arg-type]

    with pytest.raises(SystemExit) as caught:
        build.run_entry_point(main, CONF)
    assert caught.value.code == 1 and "No space left on device; free some space" in capsys.readouterr().err


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py"])

    def failing(error: Exception) -> Callable[[], None]:
        def main() -> None:
            raise error

        return main

    for error in (OSError(5, "a bug"), RuntimeError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            build.run_entry_point(failing(error), CONF)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("script", "options", "override", "told"),
    [
        ("train", ["data=jsonl"], "data.train_prompts.pathh=x", "data.train_prompts.path'"),
        (
            "train",
            ["optimizer=adamw", "data=jsonl"],
            "data.train_prompts.answer_field=x",
            "+data.train_prompts.answer_f",
        ),
        ("train", [], "data.module.bucket_batches=2", "+data.module.bucket_batches"),
        ("eval", ["benchmark=jsonl", "sampler=block"], "benchmark.prompt_fild=x", "benchmark.prompt_field"),
    ],
)
def test_suggestions_come_from_the_chosen_options(
    script: str, options: list[str], override: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        build.load_config(CONF, script, [*options, override], tmp_path)
    message = str(clear_composition_error(caught.value, CONF, [*options, override]))
    assert told in message and repr(override.partition("=")[0]) in message


def test_specdiff_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def main() -> None:
        raise SpecDiffError("named")

    with pytest.raises(SystemExit) as caught:
        build.run_entry_point(main, CONF)
    assert caught.value.code == 1 and capsys.readouterr().err == "error: named\n"
