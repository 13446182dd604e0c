"""``preflight=true`` through the configurations that ship: every model and verifier, and the commands of the issue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_checkpoints import write_checkpoint
from helpers import byte_tokenizer, tiny_llama

from specdiff2.runtime import build, preflight
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig
from specdiff2.runtime.preflight_advice import GIB
from specdiff2.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
SCHEMAS = {"train": TrainConfig, "eval": EvalConfig}
A100 = ["preflight=true", "hardware=a100_80gb"]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem not in ("base", "hf", "masked_lm"))


def plan(script: str, overrides: list[str], run: Path) -> dict[str, Any]:
    config = build.check(build.load_config(CONF, script, overrides, run), SCHEMAS[script])
    return preflight.make_plan(config, script)


def phase(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(p for p in found["phases"] if p["name"] == name)


def remedies(found: dict[str, Any], name: str) -> list[str]:
    """What the warning about a phase says to try."""
    warning = next(text for text in found["warnings"] if text.startswith(f"{name}:"))
    return [text.removeprefix(" try ") for text in warning.split(";")[1:]]


# ---------------------------------------------------------------- everything that ships
@pytest.mark.parametrize("hardware", names("hardware"))
def test_every_device_plans(hardware: str, tmp_path: Path) -> None:
    found = plan("eval", ["preflight=true", f"hardware={hardware}", "model=diffucoder", "verifier=qwen7b"], tmp_path)
    assert found["hardware"]["memory_gib"] > 1.0 and found["hardware"]["num_devices"] >= 1
    assert all(row["tokens_per_s_bound"] > row["tokens_per_s_estimate"] > 0 for row in found["decoding"][0]["rows"])


@pytest.mark.parametrize("model", names("model"))
@pytest.mark.parametrize("script", sorted(SCHEMAS))
def test_every_model_plans(script: str, model: str, tmp_path: Path) -> None:
    found = plan(script, [*A100, f"model={model}", "verifier=qwen7b"], tmp_path)
    assert found["drafter"]["parameters"] > 0 and found["phases"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("verifier", names("verifier"))
def test_every_verifier_plans(verifier: str, tmp_path: Path) -> None:
    found = plan("train", [*A100, "hardware.num_devices=8", f"verifier={verifier}", "model=diffucoder"], tmp_path)
    assert found["verifier"]["parameters"] > 1e8 and found["verifier"]["shape_from"]
    assert phase(found, "rollouts")["fits"] or remedies(found, "rollouts")


# ---------------------------------------------------------------- the commands
@pytest.mark.parametrize("script", sorted(SCHEMAS))
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize(("model", "verifier"), [("diffucoder", "qwen72b"), ("diffullama", "llama70b")])
def test_the_papers_pairs_on_a100s(script: str, model: str, verifier: str, devices: int, tmp_path: Path) -> None:
    """145 GB of verifier: no use on one A100; split over eight it leaves room for the drafter."""
    overrides = [*A100, f"hardware.num_devices={devices}", f"model={model}", f"verifier={verifier}"]
    found = plan(script, overrides, tmp_path)
    weights = {"qwen72b": 145_412_407_296, "llama70b": 2 * 68_976_648_192}[verifier]
    assert found["verifier"]["weights_gib"] == pytest.approx(weights / GIB)
    first = found["phases"][0]
    assert first["items_gib"]["verifier weights"] == pytest.approx(weights / GIB / devices)
    assert first["fits"] is (devices == 8) or devices == 2  # 77.3 GiB are just enough or just too little there
    if not first["fits"]:
        assert any("tp_plan=auto" in text for text in remedies(found, first["name"]))


def test_the_entry_point_prints_and_stops(tmp_path: Path) -> None:
    command = [
        sys.executable, "train.py", "model=diffucoder", "verifier=qwen72b", *A100, "hardware.num_devices=8",
        "trainer.devices=2", f"paths.outputs={tmp_path}", f"hydra.run.dir={tmp_path}/run",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "8 x NVIDIA A100-SXM4-80GB" in done.stdout and "72.706 B parameters" in done.stdout
    assert "mean streak" in done.stdout and "WARNING" in done.stdout
    assert "ddp on 1 node(s) of 2 device(s)" in done.stdout and "at most 75 GPU-hours" in done.stdout
    record = json.loads((tmp_path / "run" / "preflight.json").read_text(encoding="utf-8"))
    assert record["script"] == "train" and record["hours"]
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left <= {"preflight.json", ".hydra", "train.log", "status.json"}, left


def test_a_model_that_is_nowhere_is_an_error_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("hf download somebody/huge-900B config.json")):
        plan("eval", [*A100, "verifier=hf", "verifier.source=somebody/huge-900B", "model=diffucoder"], tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.num_devices=0", "hardware.num_devices=0: expected a number >= 1"),
        ("hardware.bandwidth_gb_s=0", "hardware.bandwidth_gb_s=0"),
        ("hardware.network_gb_s=0", "hardware.network_gb_s=0"),
        ("hardware.communication_share=-1", "hardware.communication_share=-1"),
        ("hardware.reserve_gib=100", "hardware.reserve_gib=100"),
        ("hardware.memory_gib=none", "hardware.memory_gib='none'"),
        ("+hardware.speed=1", "hardware.speed"),
        ("preflight=-1", "preflight=-1"),
        ("preflight=yes please", "preflight='yes please'"),
    ],
)
def test_wrong_settings_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan("eval", [*A100, override], tmp_path)


# ---------------------------------------------------------------- clusters
CLUSTER = [*A100, "model=diffucoder", "verifier=qwen72b", "trainer.devices=8", "max_steps=60000"]
READ_ONLY = ["load_verifier=false", "callbacks.decoding_probe=null", "data.folder=/somewhere"]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_command_for_nodes_of_eight_a100s(nodes: int, lora: bool, tmp_path: Path) -> None:
    """145 GB of verifier beside 8 ranks fit nowhere; with stored rollouts both ways of training fit on one node."""
    command = [*CLUSTER, "trainer=deepspeed_zero3", f"trainer.num_nodes={nodes}"]
    command += [] if lora else ["model.lora=null"]
    beside, alone = plan("train", command, tmp_path), plan("train", [*command, *READ_ONLY], tmp_path)
    assert not phase(beside, "training")["fits"] and any("load_verifier=false" in text for text in beside["warnings"])
    assert any("load_verifier=false" in text for text in remedies(beside, "training"))
    assert [p["name"] for p in alone["phases"]] == ["training", "held-out evaluation"]
    assert all(p["fits"] for p in alone["phases"])
    assert phase(alone, "training")["num_devices"] == 8 * nodes and list(alone["hours"]) == ["training 60000 steps"]
    cluster = alone["cluster"]
    assert (cluster["strategy"], [row["num_nodes"] for row in cluster["nodes"]]) == ("zero3", [1, 2, 4, 8])
    assert all(row["fits"] for row in cluster["nodes"])
    here = next(row for row in cluster["nodes"] if row["num_nodes"] == nodes)
    assert here["gib_each"] == pytest.approx(max(p["total_gib"] for p in alone["phases"]))
    assert alone["hours"]["training 60000 steps"] == pytest.approx(here["hours"][1])
    # 7.6 billion bfloat16 weights pass twice, up to (N - 1) / N of them
    gathered = cluster["exchanges"]["all-gather of weights"]["gb"]
    assert gathered == pytest.approx(2 * 2 * 7.6 * (8 * nodes - 1) / (8 * nodes), rel=0.02)


def test_one_gpu_stays_within_the_papers_gpu_hours(tmp_path: Path) -> None:
    """60,000 steps of 16 windows on one A100; on more devices every step trains more windows, so GPU-hours grow."""
    found = plan("train", [*CLUSTER, *READ_ONLY, "trainer.devices=1"], tmp_path)
    assert found["cluster"] is None and 20.0 < found["hours"]["training 60000 steps"] < 75.0
    eight = plan("train", [*CLUSTER, *READ_ONLY, "trainer=ddp"], tmp_path)["cluster"]
    assert eight["paper"]["our_gpu_hours"][0] == pytest.approx(8 * found["hours"]["training 60000 steps"])
    assert 10 < eight["paper"]["windows_at_that_cost"][0] < 75 / found["hours"]["training 60000 steps"] * 16


@pytest.mark.parametrize("trainer", names("trainer"))
def test_every_trainer_plans(trainer: str, tmp_path: Path) -> None:
    found = plan("train", [*CLUSTER, *READ_ONLY, f"trainer={trainer}"], tmp_path)
    kinds = {"deepspeed_zero1": "zero1", "deepspeed_zero2": "zero2", "deepspeed_zero3": "zero3", "fsdp": "fsdp"}
    assert found["cluster"]["strategy"] == kinds.get(trainer.removesuffix("_offload"), "ddp")
    offloads = trainer.endswith("offload")
    assert (found["cluster"]["nodes"][0]["host_gib_per_node"] > 1.0) is offloads
    json.dumps(found, allow_nan=False)


def test_weights_that_fit_in_parts_must_fit_whole_to_be_evaluated(tmp_path: Path) -> None:
    """7.6 billion float32 weights: a sixteenth of them and of their states on each GPU, but all for a while."""
    parts = [*CLUSTER, *READ_ONLY, "model.lora=null", "trainer.num_nodes=2", "hardware.memory_gib=36"]
    found = plan("train", [*parts, "trainer=fsdp"], tmp_path)
    assert phase(found, "training")["fits"] and not phase(found, "held-out evaluation")["fits"]
    assert any(text.startswith("held-out evaluation: ") and "all weights" in text for text in found["warnings"])
    assert not next(row for row in found["cluster"]["nodes"] if row["num_nodes"] == 2)["fits"]
    assert phase(plan("train", [*parts, "trainer=deepspeed_zero3"], tmp_path), "held-out evaluation")["fits"]


def test_more_devices_than_a_node_has_do_not_fit(tmp_path: Path) -> None:
    found = plan("train", [*CLUSTER, *READ_ONLY, "trainer=ddp", "hardware.num_devices=4"], tmp_path)
    assert any("needs 8 devices, here are 4" in text for text in found["warnings"])


# ---------------------------------------------------------------- streaks
def test_a_number_plans_for_that_streak(tmp_path: Path) -> None:
    common = ["hardware=a100_80gb", "hardware.num_devices=8", "verifier=qwen72b", "model=diffucoder"]
    rows = plan("eval", ["preflight=5.5", *common], tmp_path)["decoding"][0]["rows"]
    assert [row["streak"] for row in rows] == [5.5] and rows[0]["tau"] == 6.5
    all_rows = plan("eval", ["preflight=true", *common], tmp_path)["decoding"][0]["rows"]
    assert [row["streak"] for row in all_rows] == [0.0, 4.0, 8.0, 12.0, 16.0]
    speedups = [row["speedup"] for row in all_rows]
    assert speedups == sorted(speedups) and speedups[0] < 1.0 < speedups[2]


def test_methods_of_an_evaluation_are_planned_one_by_one(tmp_path: Path) -> None:
    tree = ["sampler=tree", "sampler.num_nodes=40"]
    one = plan("eval", [*A100, *tree], tmp_path)["decoding"]
    assert [(m["name"], m["num_nodes"]) for m in one] == [("tree", 41)]
    speed = plan("eval", [*A100, "experiment=speed", "methods.hf_assisted.assistant=x"], tmp_path)["decoding"]
    assert {"specdiff", "specdiff2", "tree_lookup"} <= {m["name"] for m in speed}
    assert not any(m["name"].startswith("hf_") for m in speed)


def test_several_drafters_cost_a_pass_each_and_their_weights(tmp_path: Path) -> None:
    common = [*A100, "verifier=qwen7b", "model=diffucoder"]
    two = "sampler.drafters=[{drafter: a, K: 4}, {drafter: b, K: 4}]"
    same = "sampler.drafters=[{drafter: a, K: 1, name: x}, {drafter: a, K: 7, name: y}]"
    one, both, twice = (
        plan("eval", [*common, *more], tmp_path)
        for more in (["sampler=tree_match", "sampler.K=8"], ["sampler=drafters", two], ["sampler=drafters", same])
    )
    assert one["decoding"][0]["num_nodes"] == both["decoding"][0]["num_nodes"] == 8 * 16 + 1
    for found, weights in ((both, 2), (twice, 1)):
        assert found["decoding"][0]["draft_ms"] == pytest.approx(2 * one["decoding"][0]["draft_ms"])
        held = [phase(p, "decoding")["items_gib"]["drafter weights"] for p in (found, one)]
        assert held[0] == pytest.approx(weights * held[1])


def test_a_drafter_that_cannot_pay_is_called_out(tmp_path: Path) -> None:
    """A 7B drafter for a 0.5B verifier costs more than it can ever save."""
    found = plan("eval", [*A100, "model=diffucoder", "verifier=qwen05b", "model.denoising_steps=16"], tmp_path)
    assert any("slower than no drafter even if all" in text for text in found["warnings"])


# ---------------------------------------------------------------- remedies do what they say
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A verifier and a Dream-style drafter small enough to plan in no time, on devices of a few MiB."""
    root = tmp_path_factory.mktemp("tiny")
    write_checkpoint(root / "dream", "dream", num_hidden_layers=4)
    tiny_llama(512, num_hidden_layers=8, num_key_value_heads=4).save_pretrained(root / "verifier")
    byte_tokenizer(root / "verifier")
    return [
        "preflight=true", "hardware=a100_80gb", "hardware.reserve_gib=0", "hardware.num_devices=4",
        "verifier=hf", f"verifier.source={root / 'verifier'}", "model=masked_lm", f"model.source={root / 'dream'}",
        "model.gamma=4", "data.module.max_length=64", "data.rollouts.max_new_tokens=32", "model.lora.rank=2",
        "loss_chunk_windows=1", "data.module.windows_per_rollout=32",
    ]  # fmt: skip


def overrides_of(text: str) -> list[str]:
    """``a=1 b=2 with c=3 (why): 1.0 GiB, fits`` -> the settings in it."""
    return [token for token in re.sub(r"\([^)]*\)", "", text).replace("'", "").split() if re.match(r"[a-z_.]+=", token)]


def clean(overrides: list[str]) -> list[str]:
    return [override.rstrip(":,") for override in overrides]


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3, 0.15])
def test_remedies_for_training_make_it_fit(tiny: list[str], share: float, tmp_path: Path) -> None:
    """On a device with a share of what the step needs, what the warning says to set is enough, as it says."""
    options = [*tiny, "model.gradient_checkpointing=false"]
    needed = phase(plan("train", options, tmp_path), "training")["total_gib"]
    options.append(f"hardware.memory_gib={needed * share}")
    found = plan("train", options, tmp_path)
    assert not phase(found, "training")["fits"]
    settings = [text for text in remedies(found, "training") if overrides_of(text) and "still does not" not in text]
    helpful = [clean(overrides_of(text)) for text in settings if "verifier." not in text]
    assert helpful
    for changed in helpful:
        assert phase(plan("train", [*options, *changed], tmp_path), "training")["fits"], changed


def test_remedies_for_the_verifier_make_it_fit(tiny: list[str], tmp_path: Path) -> None:
    needed = phase(plan("eval", tiny_eval(tiny), tmp_path), "decoding")
    weights = needed["items_gib"]["verifier weights"]
    options = [*tiny_eval(tiny), f"hardware.memory_gib={needed['total_gib'] - 0.6 * weights}"]
    found = plan("eval", options, tmp_path)
    assert not phase(found, "decoding")["fits"]
    settings = [clean(overrides_of(text)) for text in remedies(found, "decoding") if "quantization" not in text]
    assert [s for s in settings if "verifier.device_map=auto" in s] and [
        s for s in settings if "verifier.tp_plan=auto" in s
    ]
    for changed in settings:
        assert phase(plan("eval", [*options, *changed], tmp_path), "decoding")["fits"], changed


def tiny_eval(options: list[str]) -> list[str]:
    return [o for o in options if not o.startswith(("data.", "loss_chunk"))]


def test_smaller_rollout_batches_are_proposed_where_they_help(tiny: list[str], tmp_path: Path) -> None:
    needed = phase(plan("train", tiny, tmp_path), "rollouts")["total_gib"]
    options = [*tiny, f"hardware.memory_gib={needed * 0.8}"]
    text = next(t for t in remedies(plan("train", options, tmp_path), "rollouts") if "batch_size" in t)
    assert phase(plan("train", [*options, *clean(overrides_of(text))], tmp_path), "rollouts")["fits"]


def test_checkpointing_and_fewer_windows_shrink_a_plan_and_zero_divides_it(tiny: list[str], tmp_path: Path) -> None:
    def training(*more: str) -> dict[str, Any]:
        return phase(plan("train", [*tiny, *more], tmp_path), "training")

    keep_all = "model.gradient_checkpointing=false"
    base = training(keep_all)["total_gib"]
    assert training("model.gradient_checkpointing=true")["total_gib"] < base
    assert training(keep_all, "data.module.windows_per_rollout=8")["total_gib"] < base
    full = ["model.lora=null", "trainer.devices=4"]
    two, three = (training(*full, f"trainer.strategy=deepspeed_stage_{stage}")["items_gib"] for stage in (2, 3))
    assert three["drafter weights"] == pytest.approx(two["drafter weights"] / 4)
    assert three["optimizer"] == two["optimizer"]


def test_a_released_verifier_leaves_the_training_plan(tiny: list[str], tmp_path: Path) -> None:
    with_probe = phase(plan("train", tiny, tmp_path), "training")["items_gib"]
    without = phase(plan("train", [*tiny, "callbacks.decoding_probe=null"], tmp_path), "training")["items_gib"]
    law = ["callbacks.decoding_probe=null", "objective=streak_expected"]
    reads = phase(plan("train", [*tiny, *law], tmp_path), "training")["items_gib"]
    assert "verifier weights" in with_probe and "verifier weights" not in without and "verifier weights" in reads
    assert reads["loss chunk"] == pytest.approx(2 * without["loss chunk"])


def test_a_block_drafter_beside_a_spread_verifier_is_called_out(tmp_path: Path) -> None:
    found = plan("eval", [*A100, "hardware.num_devices=2", "verifier=qwen72b", "model=smollm2_block"], tmp_path)
    assert any("block drafter borrows" in text for text in found["warnings"])
    head = plan("eval", [*A100, "hardware.num_devices=2", "verifier=qwen72b", "model=smollm2_eagle"], tmp_path)
    assert head["drafter"]["kind"] == "eagle"
    assert any("EAGLE head borrows" in text for text in head["warnings"])


def test_auto_precision_is_that_of_the_planned_device(tiny: list[str], tmp_path: Path) -> None:
    """Planned on a CPU for a GPU with bfloat16 units: the frozen base is planned in bfloat16."""
    assert plan("train", tiny, tmp_path)["drafter"]["dtype"] == "bfloat16"
    old = [*tiny, "hardware.bf16_tflops=1", "hardware.fp32_tflops=10"]
    assert plan("train", old, tmp_path)["drafter"]["dtype"] == "float32"
