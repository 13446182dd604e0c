"""Adapters: what they compute, what is trained, and a merge that is exact to the last place."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import tiny_llama, tiny_qwen2
from torch import Tensor
from transformers import PreTrainedModel

from specdiff2.models.lora import PREFIX, TARGETS, adapter_state, add_lora, has_lora, load_adapter_state, merge_lora
from specdiff2.models.packed_linear import PackedLinear, _available, pack_linears
from specdiff2.types import ConfigError, MismatchError

TOKENS = torch.tensor([[4, 8, 15, 16, 23, 42]])


def adapted(dtype: torch.dtype = torch.float32, *, seed: int = 1, **changes) -> PreTrainedModel:
    """A tiny model with adapters that compute something."""
    model = tiny_qwen2(dtype=dtype)
    torch.manual_seed(seed)
    add_lora(model, **{"rank": 4, "alpha": 6, "dropout": 0.0, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def train_step(model: PreTrainedModel, *, autocast: bool = False) -> dict[str, Tensor]:
    """Gradients by name after one backward pass of a next-token loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------- adding
def test_a_fresh_adapter_changes_nothing() -> None:
    model, plain = tiny_llama(), tiny_llama()
    add_lora(model)
    assert torch.equal(logits(model), logits(plain))


def test_paper_defaults_on_all_seven_projections() -> None:
    model = tiny_llama()
    add_lora(model)
    state = adapter_state(model)
    assert len(state) == 2 * 7 * len(model.model.layers)
    for target, width in (("self_attn.q_proj", 32), ("mlp.down_proj", 64)):
        name = f"{PREFIX}model.layers.1.{target}.lora_A.weight"
        assert state[name].shape == (32, width), "rank 32"
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 1.0 and layer.lora_dropout["default"].p == 0.05
    assert {name.split(".")[-3] for name in state} == set(TARGETS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_float32_adapters_are_trained(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert all(p.dtype == dtype for name, p in model.named_parameters() if "lora_" not in name)
    assert logits(model).dtype == dtype


def test_what_an_adapted_layer_computes() -> None:
    model = adapted(alpha=6)
    layer = model.model.layers[1].mlp.up_proj
    state = adapter_state(model)
    down, up = (state[f"{PREFIX}model.layers.1.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    x = torch.randn(3, 32)
    expected = layer.get_base_layer()(x) + (6 / 4) * (x @ down.T) @ up.T
    torch.testing.assert_close(layer(x), expected)


def test_dropout_only_while_training() -> None:
    model = adapted(dropout=0.5)  # around a model in eval mode, which it stays in
    assert torch.equal(logits(model), logits(model))
    assert not torch.equal(logits(model.train()), logits(model))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_and_without_autocast(dtype: torch.dtype, autocast: bool) -> None:
    grads = train_step(adapted(dtype).train(), autocast=autocast)
    exact = train_step(adapted().train())
    assert grads.keys() == exact.keys() and len(grads) == 2 * 7 * 2
    assert all(grad.dtype == torch.float32 and bool(grad.any()) for grad in grads.values())
    flat, reference = (torch.cat([g.flatten() for g in part.values()]) for part in (grads, exact))
    cosine = torch.nn.functional.cosine_similarity(flat, reference, dim=0)
    assert cosine > (0.9999 if dtype == torch.float32 and not autocast else 0.98)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = adapted().train()
    expected = train_step(model)
    again = adapted().train()
    again.gradient_checkpointing_enable({"use_reentrant": False})
    found = train_step(again)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"lora.rank=0: expected an integer >= 1"),
        ({"rank": True}, r"lora.rank=True"),
        ({"alpha": 0}, r"lora.alpha=0"),
        ({"alpha": float("nan")}, r"lora.alpha=nan"),
        ({"dropout": 1.0}, r"lora.dropout=1.0"),
        ({"targets": []}, r"lora.targets=\[\]"),
        ({"targets": "q_proj"}, r"lora.targets='q_proj'"),
        ({"targets": ["q_proj", "ff_proj"]}, r"no linear layer is called 'ff_proj'; expected some of .*down_proj"),
    ],
)
def test_wrong_settings_are_refused_and_the_model_stays_plain(settings, message: str) -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match=message):
        add_lora(model, **settings)
    assert not has_lora(model)


def test_a_second_adapter_is_refused() -> None:
    model = adapted()
    with pytest.raises(ConfigError, match="has adapters already"):
        add_lora(model)


# ---------------------------------------------------------------- merging
def test_a_merge_is_w_plus_scaled_product() -> None:
    model, plain = adapted(), tiny_qwen2()
    state = adapter_state(model)
    before = logits(model)
    merge_lora(model)
    assert not has_lora(model) and not any("lora" in name for name, _ in model.named_modules())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for name, weight in plain.named_parameters():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in state:
            down, up = (state[f"{module}.lora_{part}.weight"].double() for part in "AB")
            expected = (weight.double() + 6 / 4 * up @ down).float()
            torch.testing.assert_close(model.get_parameter(name), expected, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(model.get_parameter(name), weight)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_a_bf16_base_is_merged_in_float32_and_rounded_once() -> None:
    model, plain = adapted(torch.bfloat16), tiny_qwen2(dtype=torch.bfloat16)
    state = adapter_state(model)
    merge_lora(model)
    name = "model.layers.0.mlp.gate_proj"
    down, up = (state[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
    weight = plain.get_parameter(f"{name}.weight")
    once = (weight.float() + 1.5 * (up @ down)).bfloat16()
    assert torch.equal(model.get_parameter(f"{name}.weight"), once)
    careless = weight + (1.5 * (up @ down)).bfloat16()  # what a merge in bfloat16 gives
    assert not torch.equal(once, careless)


def test_small_updates_survive_in_a_float32_merge() -> None:
    model = adapted(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-4)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.float()
    merge_lora(twin)
    plain = tiny_qwen2(dtype=torch.bfloat16).float()
    assert not torch.equal(logits(twin), logits(plain))


def test_merging_nothing_is_refused() -> None:
    model = adapted()
    merge_lora(model)
    for plain in (model, tiny_llama()):
        with pytest.raises(ConfigError, match="cannot merge: no layer of the model has an adapter"):
            merge_lora(plain)
        with pytest.raises(ConfigError, match="cannot save adapters"):
            adapter_state(plain)


def test_a_merged_model_can_be_adapted_and_packed_again() -> None:
    model = adapted(torch.bfloat16)
    if _available():
        pack_linears(model)  # base layers packed before the merge must not keep their old packed weights
    merge_lora(model)
    fresh = copy.deepcopy(model)  # copies are unpacked
    torch.testing.assert_close(logits(model), logits(fresh), rtol=0.05, atol=0.05)
    if _available():
        assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    add_lora(model, rank=2)
    assert has_lora(model)


# ---------------------------------------------------------------- tensors in and out
def test_tensors_go_into_another_model() -> None:
    model = adapted()
    twin = tiny_qwen2()
    add_lora(twin, rank=4, alpha=6)
    load_adapter_state(twin, adapter_state(model))
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("change", ["missing", "renamed", "misshapen"])
def test_tensors_that_do_not_fit_are_refused(change: str) -> None:
    state = adapter_state(adapted())
    name = f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"
    tensor = state[name]
    if change in ("missing", "renamed"):
        del state[name]
    if change == "renamed":
        state[name.replace("lora_B", "lora_C")] = tensor
    if change == "misshapen":
        state[name] = tensor[:, :2].contiguous()
    model = tiny_qwen2()
    add_lora(model, rank=4)
    before = logits(model)
    with pytest.raises(MismatchError, match=rf"{name} (is missing|has shape \(64, 2\), expected \(64, 4\))"):
        load_adapter_state(model, state)
    assert torch.equal(logits(model), before)
