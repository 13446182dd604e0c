"""Every drafter in conf/model composes with both entry points: the authors' settings, a learning rate of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdiff2.models.lora import TARGETS
from specdiff2.runtime import build
from specdiff2.runtime.auto_settings import ADAPTER_LR, BLOCK_LR, FULL_LR, PACKED_WINDOWS, REPEATED_WINDOWS
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig
from specdiff2.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
PUBLISHED = [name for name in MODELS if not name.startswith(("smollm2", "masked_lm"))]


def compose(entry: str, *overrides: str) -> dict:
    schema = TrainConfig if entry == "train" else EvalConfig
    return build.check(build.load_config(CONF, entry, list(overrides)), schema)


@pytest.mark.parametrize("entry", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_composes(name: str, entry: str) -> None:
    source = ["model.source=some/folder"] if name == "masked_lm" else []
    config = compose(entry, f"model={name}", *source)
    assert config["model_name"] == name
    if entry == "train":
        assert config["optimizer"]["lr"] == (BLOCK_LR if name.startswith("smollm2") else ADAPTER_LR)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_authors_adapter(name: str) -> None:
    model = compose("train", f"model={name}", "verifier=qwen72b")["model"]
    assert model["lora"] == {"rank": 32, "alpha": 32, "dropout": 0.05, "targets": list(TARGETS)}
    assert "/" in model["source"] and model["denoising_steps"] == 1


def test_all_weights_get_a_smaller_learning_rate_and_a_given_one_stays() -> None:
    assert compose("train", "model=diffucoder", "model.lora=null")["optimizer"]["lr"] == FULL_LR
    assert compose("train", "model=diffucoder", "optimizer.lr=3e-5")["optimizer"]["lr"] == 3e-5


def test_a_source_is_asked_for_and_typos_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.source"):
        compose("train", "model=masked_lm")
    with pytest.raises(ConfigError, match=r"model\.gama.*gamma"):
        compose("train", "model=diffucoder", "+model.gama=8")


def test_windows_that_repeat_their_prefix_are_few() -> None:
    for overrides, expected in (
        (["model=diffucoder"], REPEATED_WINDOWS),
        (["model=diffucoder", "model.attention=causal_prefix"], PACKED_WINDOWS),
        (["model=sdar"], PACKED_WINDOWS),
        ([], PACKED_WINDOWS),
        (["model=diffucoder", "data.module.windows_per_rollout=7"], 7),
    ):
        assert compose("train", *overrides)["data"]["module"]["windows_per_rollout"] == expected
