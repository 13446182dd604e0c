"""Masked-diffusion families: each tiny checkpoint, in its authors' layout, computes what a forward of our own says."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import FAMILY_NAMES, read_tensors, write_checkpoint, write_tensors
from helpers import gap, random_tokens
from torch import Tensor

from specdiff2.models.families import FAMILIES, detect_family, get_family
from specdiff2.models.family_config import rope_parameters, to_target_config
from specdiff2.models.family_loading import load_family_model, read_family_config, skeleton
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

TOKENS = random_tokens(23, seed=3, vocab=300)
LLADA_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def model_logits(model: Any, tokens: list[int]) -> Tensor:
    """Bidirectional: an all-allowed additive 4D mask (None would make it causal)."""
    mask = torch.zeros(1, 1, len(tokens), len(tokens), dtype=model.dtype)
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]


def eager_logits(folder: Path, tokens: list[int], *, wrong: str = "") -> Tensor:
    """The architecture written out on the raw tensors of the files, in float64. ``wrong`` plants one mistake."""
    config = json.loads((folder / "config.json").read_text())
    raw = {name: tensor.double() for name, tensor in read_tensors(folder).items()}
    llada = config["model_type"] == "llada"
    heads = config["n_heads" if llada else "num_attention_heads"]
    groups = heads // config["n_kv_heads" if llada else "num_key_value_heads"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight

    def part(i: int, name: str, x: Tensor | None = None) -> Tensor:
        stem = f"model.layers.{i}.{name}"
        if llada:
            stem = f"model.transformer.blocks.{i}.{LLADA_PARTS.get(name, name.removeprefix('self_attn.'))}"
        if x is None:
            return raw[f"{stem}.weight"]
        bias = 0 if wrong == "bias" else raw.get(f"{stem}.bias", 0)
        return x @ raw[f"{stem}.weight"].T + bias

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(0, 1)  # [head, token, head_dim]

    def rotate(x: Tensor) -> Tensor:
        theta = config["rope_theta"] * (2 if wrong == "theta" else 1)
        frequencies = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        angles = torch.arange(len(tokens)).double()[:, None] * frequencies
        (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    head_dim = part(0, "self_attn.q_proj").shape[0] // heads
    x = raw["model.transformer.wte.weight" if llada else "model.embed_tokens.weight"][tokens]
    for i in range(config["n_layers" if llada else "num_hidden_layers"]):
        h = norm(x, part(i, "input_layernorm"))
        q, k, v = (split(part(i, f"self_attn.{name}_proj", h)) for name in "qkv")
        if config["model_type"] == "sdar" and wrong != "qk_norm":
            q, k = norm(q, part(i, "self_attn.q_norm")), norm(k, part(i, "self_attn.k_norm"))
        q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(head_dim)
        if wrong == "causal":
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        x = x + part(i, "self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        h = norm(x, part(i, "post_attention_layernorm"))
        gate, up = part(i, "mlp.gate_proj", h), part(i, "mlp.up_proj", h)
        gate, up = (up, gate) if wrong == "gate" else (gate, up)
        x = x + part(i, "mlp.down_proj", torch.nn.functional.silu(gate) * up)
    x = norm(x, raw["model.transformer.ln_f.weight" if llada else "model.norm.weight"])
    head = raw.get("model.transformer.ff_out.weight" if llada else "lm_head.weight")
    return (
        x @ (raw["model.transformer.wte.weight" if llada else "model.embed_tokens.weight"] if head is None else head).T
    )


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_logits_equal_an_independent_forward(tmp_path, name, attn):
    folder = write_checkpoint(tmp_path / name, name)
    base = load_family_model(folder, dtype="float32", attn_implementation=attn)
    assert base.family is FAMILIES[name] and base.model.config.model_type == base.family.target
    assert gap(model_logits(base.model, TOKENS).double(), eager_logits(folder, TOKENS)) < 1e-5


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name in FAMILY_NAMES for wrong in ("causal", "theta", "gate")]
    + [("dream", "bias"), ("fast_dllm_v2", "bias"), ("sdar", "qk_norm")],
)
def test_the_same_comparison_refuses_a_planted_mistake(tmp_path, name, wrong):
    folder = write_checkpoint(tmp_path / name, name)
    base = load_family_model(folder, dtype="float32")
    assert gap(model_logits(base.model, TOKENS).double(), eager_logits(folder, TOKENS, wrong=wrong)) > 1e-2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dream", {"tie_word_embeddings": True}),
        ("llada", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("sdar", {"head_dim": 16, "num_hidden_layers": 3}),
        ("diffullama", {"num_key_value_heads": 4, "num_shards": 1}),
        ("fast_dllm_v2", {"num_shards": 5, "rope_theta": 1e6}),
    ],
)
def test_other_shapes(tmp_path, name, options):
    folder = write_checkpoint(tmp_path / name, name, **options)
    model = load_family_model(folder, dtype="float32").model
    expected = eager_logits(folder, TOKENS)  # a tied head makes logits as large as 15
    assert gap(model_logits(model, TOKENS).double(), expected) < 1e-5 * max(1.0, expected.abs().max().item())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == options.get("tie_word_embeddings", False)


def test_a_tied_head_may_be_stored_too_but_must_be_the_same(tmp_path):
    folder = write_checkpoint(tmp_path / "dream", "dream", tie_word_embeddings=True)
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_tensors(folder, tensors)
    model = load_family_model(folder, dtype="float32").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][5, 3] += 1
    write_tensors(folder, tensors)
    with pytest.raises(MismatchError, match="ties head and embedding"):
        load_family_model(folder, dtype="float32")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_bin_files_hold_the_same_model(tmp_path, num_shards):
    safe = load_family_model(write_checkpoint(tmp_path / "safe", "diffullama"), dtype="float32")
    folder = write_checkpoint(tmp_path / "bin", "diffullama", bin_files=True, num_shards=num_shards)
    assert load_family_model(folder, dtype="float32").fingerprint == safe.fingerprint


def test_stored_rotary_frequencies_of_old_llama_files_are_no_unknown_tensors(tmp_path):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama")
    tensors = read_tensors(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_tensors(folder, tensors)
    assert (
        gap(model_logits(load_family_model(folder, dtype="float32").model, TOKENS), eager_logits(folder, TOKENS)) < 1e-5
    )


# ---------------------------------------------------------------- what a loaded model is
def test_bfloat16_keeps_float32_rotary_frequencies(tmp_path):
    folder = write_checkpoint(tmp_path / "dream", "dream")
    model = load_family_model(folder, dtype="bfloat16").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for buffer in model.buffers():
        assert buffer.dtype == torch.float32 and buffer.device.type == "cpu"
    expected = 10.0 ** -(torch.arange(0, 8, 2) / 8)
    assert gap(model.model.rotary_emb.inv_freq, expected) < 1e-6
    assert model.config.dtype == torch.bfloat16 and not model.training


def test_values_are_the_files_own_bits(tmp_path):
    folder = write_checkpoint(tmp_path / "llada", "llada", dtype=torch.bfloat16)
    raw, model = read_tensors(folder), load_family_model(folder, dtype="bfloat16").model
    down = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(down, raw["model.transformer.blocks.1.ff_out.weight"])
    assert torch.equal(model.lm_head.weight, raw["model.transformer.ff_out.weight"])


def test_fingerprint_is_of_the_weights_and_does_not_change_later(tmp_path):
    first = load_family_model(write_checkpoint(tmp_path / "a", "dream"), dtype="float32")
    moved = load_family_model(write_checkpoint(tmp_path / "b", "dream", num_shards=3), dtype="bfloat16")
    other = load_family_model(write_checkpoint(tmp_path / "c", "dream", seed=1), dtype="float32")
    before = first.fingerprint
    assert before == moved.fingerprint != other.fingerprint
    with torch.no_grad():
        first.model.lm_head.weight += 1
    assert first.fingerprint == before


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}),
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
    ],
)
def test_rope_parameters_from_old_and_new_keys(keys, expected):
    assert rope_parameters(keys) == expected


def test_rope_scaling_reaches_the_rotary_frequencies(tmp_path):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama", rope_theta=100.0)
    edit_config(folder, rope_scaling={"type": "linear", "factor": 4.0})
    rotary = load_family_model(folder, dtype="float32").model.model.rotary_emb
    assert gap(rotary.inv_freq, 100.0 ** -(torch.arange(0, 8, 2) / 8) / 4) < 1e-6


# ---------------------------------------------------------------- which family
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_config_alone_tells_family_and_shape(tmp_path, name):
    folder = write_checkpoint(tmp_path / name, name, num_hidden_layers=3)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config, family = read_family_config(folder)
    assert family.name == name and config.model_type == family.target
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 32, 64)
    assert not hasattr(config, "auto_map") and config.architectures is None


def test_published_sizes_come_out_of_published_shapes():
    """Qwen2.5-7B 7,615,616,512 (Dream, DiffuCoder, Fast-dLLM v2), Llama-2-7B 6,738,415,616, LLaDA-8B 16.03 GB bf16."""
    dream = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                 num_key_value_heads=4, vocab_size=152064, max_position_embeddings=131072, rms_norm_eps=1e-6,
                 rope_theta=1e6, tie_word_embeddings=False)  # fmt: skip
    llama = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                 num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096, rms_norm_eps=1e-5)  # fmt: skip
    llada = dict(d_model=4096, mlp_hidden_size=12288, mlp_ratio=4, n_layers=32, n_heads=32, n_kv_heads=32,
                 vocab_size=126464, embedding_size=126464, max_sequence_length=4096, rms_norm_eps=1e-5,
                 rope_theta=5e5, block_type="llama", activation_type="silu", layer_norm_type="rms", rope=True,
                 layer_norm_with_affine=True, weight_tying=False)  # fmt: skip
    published = {"dream": (dream, 7_615_616_512), "diffullama": (llama, 6_738_415_616), "llada": (llada, 8_015_581_184)}
    for name, (config, count) in published.items():
        model = skeleton(to_target_config(config, FAMILIES[name]))
        assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"]},
        {"model_type": "sdar_moe", "auto_map": {"AutoModel": "modeling_sdar_moe.SDARMoeForCausalLM"}},
        {},
    ],
)
def test_other_models_are_no_family(config):
    with pytest.raises(ConfigError, match=r"no known family.*dream, diffullama, llada, fast_dllm_v2, sdar"):
        detect_family(config)


def test_a_plain_llama_is_diffullama_by_name_only(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert detect_family(config, "diffusionfamily/diffullama").name == "diffullama"
    assert detect_family(config | {"_name_or_path": "output/DiffuLLaMA"}).name == "diffullama"
    folder = write_checkpoint(tmp_path / "mine", "diffullama")
    edit_config(folder, _name_or_path=None)
    with pytest.raises(ConfigError, match=r"Set family=\.\.\."):
        load_family_model(folder)
    assert load_family_model(folder, family="diffullama").family.name == "diffullama"
    with pytest.raises(ConfigError, match="family='diffulama'"):
        get_family("diffulama")


# ---------------------------------------------------------------- refusals
def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "DELETE"}))


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("dream", lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight"),
        ("dream", lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"missing: model\.layers\.1.*k_proj\.bias"),
        ("sdar", lambda t: t.update(adapter=torch.ones(2)), "unknown: adapter"),
        (
            "llada",
            lambda t: _renamed(
                t, "model.transformer.blocks.0.ff_proj.weight", "model.transformer.blocks.0.gate.weight"
            ),
            r"missing: model\.transformer\.blocks\.0\.ff_proj\.weight; unknown: model\.transformer\.blocks\.0\.gate",
        ),
        (
            "llada",
            lambda t: t.update({"model.transformer.ff_out.weight": torch.ones(9, 32)}),
            r"misshapen: model\.transformer\.ff_out\.weight is \[9, 32\], expected \[352, 32\]",
        ),
        ("llada", lambda t: t.update({"model.transformer.blocks.2.up_proj.weight": torch.ones(64, 32)}), r"blocks\.2"),
        ("diffullama", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), "q_proj.bias"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path, name, change, told, num_shards):
    folder = write_checkpoint(tmp_path / name, name)
    tensors = read_tensors(folder)
    change(tensors)
    write_tensors(folder, tensors, num_shards=num_shards)
    with pytest.raises(MismatchError, match=told):
        load_family_model(folder, dtype="float32")


def test_the_wrong_family_by_name_is_refused(tmp_path):
    with pytest.raises(MismatchError, match=r"unknown: .*q_proj\.bias"):
        load_family_model(write_checkpoint(tmp_path / "dream", "dream"), family="diffullama")
    with pytest.raises(ConfigError, match="block_type=None"):
        load_family_model(write_checkpoint(tmp_path / "sdar", "sdar"), family="llada")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (lambda f: _cut(f / "model-00001-of-00002.safetensors"), CorruptFileError, "00001-of-00002.*damaged"),
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), ConfigError, "lacks.*00002-of-00002"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), CorruptFileError, "no readable weight_map"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), CorruptFileError, "no readable weight_map"),
        (lambda f: _edit_index(f, {"more.weight": 2}), CorruptFileError, "lacks more.weight that the index"),
        (lambda f: _edit_index(f, {"x": "../../etc/passwd"}), CorruptFileError, "file name for each tensor"),
        (lambda f: (f / "config.json").write_text("[]"), CorruptFileError, "expected a JSON object"),
        (lambda f: (f / "config.json").write_text("{"), CorruptFileError, "not valid JSON"),
        (lambda f: (f / "config.json").unlink(), ConfigError, "holds no config.json"),
        (lambda f: edit_config(f, hidden_size="DELETE"), ConfigError, "lacks hidden_size"),
        (lambda f: edit_config(f, hidden_size="wide"), ConfigError, "does not describe a qwen2 model"),
        (lambda f: edit_config(f, use_sliding_window=True), ConfigError, "use_sliding_window"),
        (lambda f: edit_config(f, quantization_config={"bits": 4}), ConfigError, "quantised"),
        (lambda f: edit_config(f, pad_token_id=151643), ConfigError, "pad_token_id=151643 is not an id below"),
    ],
)
def test_damaged_or_unusual_folders(tmp_path, damage, error, told):
    folder = write_checkpoint(tmp_path / "dream", "dream")
    damage(folder)
    with pytest.raises(error, match=told):
        load_family_model(folder, dtype="float32")


def _edit_index(folder: Path, more: dict[str, Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {key: files[value - 1] if isinstance(value, int) else value for key, value in more.items()}
    path.write_text(json.dumps(index))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "dream", "dream")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(CorruptFileError, match="a second time"):
        load_family_model(folder, dtype="float32")


def test_pickled_code_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama", bin_files=True, num_shards=1)
    torch.save({"model.norm.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(CorruptFileError, match="cannot be read"):
        load_family_model(folder, dtype="float32")
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(CorruptFileError, match="is no table of tensors"):
        load_family_model(folder, dtype="float32")


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_type", "sequential"), ("include_qkv_bias", True), ("attention_layer_norm", True), ("alibi", True),
     ("layer_norm_type", "default"), ("activation_type", "swiglu"), ("scale_logits", True), ("block_group_size", 2)],
)  # fmt: skip
def test_llada_settings_that_are_no_llama(tmp_path, key, value):
    folder = write_checkpoint(tmp_path / "llada", "llada")
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        read_family_config(folder)


# ---------------------------------------------------------------- no network, no remote code
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_local_folder_touches_no_network_and_runs_no_code(tmp_path, name, monkeypatch):
    folder = write_checkpoint(tmp_path / name, name)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    before = set(sys.modules)
    base = load_family_model(folder, dtype="float32")
    read_family_config(folder)
    assert base.revision is None and base.folder == folder and base.name == str(folder)
    assert not [module for module in set(sys.modules) - before if "transformers_modules" in module]
