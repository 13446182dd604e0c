"""What README.md tells a user to type is accepted: its commands compose and validate, its tables name what is there."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from specdiff2.runtime import build
from specdiff2.runtime.command import quote_prompt
from specdiff2.runtime.config_schema import EvalConfig, RolloutConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEMAS = {"train": TrainConfig, "eval": EvalConfig, "rollout": RolloutConfig}
LAUNCHED = r"^    (?:python|torchrun --nproc-per-node \d+) (train|eval|rollout)\.py(.*)$"
COMMANDS = re.findall(LAUNCHED, README, flags=re.MULTILINE)
TABLE_COMMANDS = re.findall(r"`python (train|eval)\.py ([^`]*experiment=[^`]*)`", README)
HEADS = [  # an experiment's file begins with its commands
    command
    for path in sorted((ROOT / "conf/experiment").glob("*.yaml"))
    for command in re.findall(
        r"^#   python (train|eval)\.py(.*)$", path.read_text(encoding="utf-8").replace("\\\n#", ""), flags=re.MULTILINE
    )
]


def jobs(arguments: str) -> list[list[str]]:
    """The overrides of each job of a command; one unless it sweeps."""
    words = shlex.split(arguments, comments=True)
    if "-m" not in words:
        return [quote_prompt(words)]
    swept = [[f"{key}={value}" for value in values.split(",")] for key, _, values in
             (word.partition("=") for word in words if word != "-m")]  # fmt: skip
    return [list(job) for job in itertools.product(*swept)]


@pytest.mark.parametrize(("script", "arguments"), [*COMMANDS, *TABLE_COMMANDS, *HEADS])
def test_commands_compose(script: str, arguments: str, tmp_path: Path) -> None:
    for overrides in jobs(arguments):
        build.check(build.load_config(ROOT / "conf", script, overrides, tmp_path), SCHEMAS[script])


def test_commands_are_found_and_sweeps_taken_apart() -> None:
    assert {script for script, _ in COMMANDS} == set(SCHEMAS) and len(COMMANDS) > 10
    assert len(TABLE_COMMANDS) > 8 and len(HEADS) > 20
    assert jobs(" -m a=1,2 b=x,y  # remark") == [["a=1", "b=x"], ["a=1", "b=y"], ["a=2", "b=x"], ["a=2", "b=y"]]


@pytest.mark.parametrize("group", ["sampler", "objective"])
def test_tables_name_exactly_the_options_there_are(group: str) -> None:
    table = README.split(f"| {group} |")[1].split("\n\n")[0]
    named = {name for line in table.split("\n")[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_linked_files_are_there() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        if "assets/drafters" not in target or (ROOT / "src/specdiff2/assets").exists():
            assert (ROOT / target).exists(), target
