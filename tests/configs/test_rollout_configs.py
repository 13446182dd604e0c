"""``conf/rollout.yaml`` and its engines: what composes, what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdiff2.data.served import ServedEngine
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import RolloutConfig
from specdiff2.runtime.rollout_run import check_writer, train_command
from specdiff2.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
URL = "engine.url=http://host:8000/v1"


def config(*overrides: str):
    return build.check(build.load_config(CONF, "rollout", list(overrides)), RolloutConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["verifier=qwen72b", "engine=openai", URL],
        ["verifier=qwen72b", "data=mixed", "engine=openai", "engine.url=[http://a:8000/v1,http://b:8000/v1]",
         "engine.concurrency=512", "engine.interface=sglang", "engine.model=x"],
        ["verifier=qwen7b", "data=mixed_gsm8k", "data.train_prompts.sources.gsm8k.path=a.jsonl",
         "data.train_prompts.sources.alpaca.path=b.jsonl", "data.rollouts.temperatures=[0.5,1.0]"],
    ],
)  # fmt: skip
def test_composes(overrides):
    check_writer(config(*overrides))


def test_the_engine_is_built_from_its_section():
    engine = build.instantiate(config("engine=openai", "engine.url=[http://a:8000/v1,https://b/v1]")["engine"])
    assert isinstance(engine, ServedEngine) and engine.urls == ["http://a:8000/v1", "https://b/v1"]
    with pytest.raises(ConfigError, match=r"engine\.url='host:8000': expected one or a list like"):
        ServedEngine("host:8000")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["engine=openai"], "missing value for engine.url"),
        (["engine=openai", URL, "engine.concurrency=0"], r"engine\.concurrency=0: expected a number >= 1"),
        (["engine=openai", URL, "engine.max_retries=-1"], r"engine\.max_retries=-1"),
        (["engine=openai", URL, "engine.timeout_s=0"], r"engine\.timeout_s=0"),
        (["engine=openai", URL, "engine.interface=grpc"], r"engine\.interface='grpc': expected one of 'auto'"),
        (["engine=openai", URL, "+engine.modle=x"], r"unknown setting 'engine\.modle'; did you mean 'engine\.model'"),
        (["+max_steps=3"], "unknown setting 'max_steps'"),
        (["verifier.tp_plan=auto"], r"verifier\.tp_plan is for eval\.py.*engine=openai"),
    ],
)
def test_refused_before_anything_is_loaded(overrides, says):
    with pytest.raises(ConfigError, match=says):
        check_writer(config(*overrides))


def test_the_command_that_trains_on_them():
    typed = ["verifier=qwen72b", "engine=openai", URL, "data=mixed", "data.folder=old", "seed=3", "+data.never=[a b]"]
    assert train_command(typed, Path("x/served-1")) == (
        "python train.py verifier=qwen72b data=mixed '+data.never=[a b]' data.folder=x/served-1"
    )
    assert train_command(typed[:2], None) == "python train.py verifier=qwen72b"
