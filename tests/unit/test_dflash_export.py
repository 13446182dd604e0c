"""Block drafters as DFlash drafters: an independent reading of the exported files, the public way, gives equal logits.

``dflash_logits`` follows the forward pass of z-lab/dflash (dflash/model.py) and of vllm-project/speculators with plain
tensor operations; it shares no code with our drafters.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import byte_tokenizer, random_tokens, tiny_llama
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.dflash_export import REMEDY, dflash_differences
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.pretrained import save_drafter
from specdiff2.models.published_shapes import published_shape
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import TrainConfig
from specdiff2.runtime.export import main
from specdiff2.types import SamplingParams

CONF = Path(__file__).resolve().parents[2] / "conf"
LAYOUTS = ["dflash", "speculators"]
DRAFT_IDS = [9, 3, 77, 40, 41, 250, 8]  # in no order: the layout's tables are ascending


# ---------------------------------------------------------------- the public reading
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [head, token, size]; halves are rotated against each other."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def layer_output(t: dict[str, Tensor], config: dict[str, Any], name: str, block: Tensor, context: Tensor, start: int):
    """One decoder layer: queries of the block, keys and values of the injected context and of the block."""
    eps, size = config["rms_norm_eps"], config["head_dim"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]

    def heads(x: Tensor, part: str) -> Tensor:
        return (x @ t[f"{name}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)

    inner = rms_norm(block, t[f"{name}.input_layernorm.weight"], eps)
    both = torch.cat([context, inner])
    query = rms_norm(heads(inner, "q"), t[f"{name}.self_attn.q_norm.weight"], eps)
    key = rms_norm(heads(both, "k"), t[f"{name}.self_attn.k_norm.weight"], eps)
    positions = torch.arange(len(both), dtype=torch.float32)
    query = rotate(query, positions[start:], config["rope_theta"])
    key = rotate(key, positions, config["rope_theta"]).repeat_interleave(groups, 0)
    weights = (query @ key.transpose(-1, -2) / size**0.5).softmax(-1)  # no mask: everything sees everything
    mixed = weights @ heads(both, "v").repeat_interleave(groups, 0)
    block = block + mixed.transpose(0, 1).flatten(1) @ t[f"{name}.self_attn.o_proj.weight"].T
    inner = rms_norm(block, t[f"{name}.post_attention_layernorm.weight"], eps)
    gate, up = (inner @ t[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return block + (functional.silu(gate) * up) @ t[f"{name}.mlp.down_proj.weight"].T


@torch.no_grad()
def dflash_logits(folder: Path, target: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """(logits [block_size - 1, draft vocabulary], verifier ids of its columns) of the block after ``tokens``, whose
    last one is the anchor."""
    config, t = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    size, layers = config["block_size"], config.get("transformer_layer_config", config)
    if "dflash_config" in config:
        mask_id, layer_ids = config["dflash_config"]["mask_token_id"], config["dflash_config"]["target_layer_ids"]
    else:  # as vLLM converts a speculators config (transformers_utils/configs/speculators/algos.py)
        mask_id, layer_ids = config["mask_token_id"], [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    hidden = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    start = len(tokens) - 1
    features = torch.cat([hidden[i + 1][0, :start] for i in layer_ids], -1)
    context = rms_norm(features @ t["fc.weight"].T, t["hidden_norm.weight"], layers["rms_norm_eps"])
    block = target.get_input_embeddings()(torch.tensor([tokens[-1]] + [mask_id] * (size - 1)))
    mask = torch.load(folder / "mask_embedding.pt", weights_only=True)  # vLLM: DFlashQwen3ForCausalLM
    assert mask["mask_token_id"] == mask_id
    block[1:] = mask["embedding"]
    for index in range(layers["num_hidden_layers"]):
        block = layer_output(t, layers, f"layers.{index}", block, context, start)
    head = t.get("lm_head.weight", target.get_output_embeddings().weight)
    ids = torch.arange(len(head)) + t.get("d2t", 0)
    if "t2d" in t:
        assert torch.equal(t["t2d"].nonzero()[:, 0], ids)
    return (rms_norm(block, t["norm.weight"], layers["rms_norm_eps"]) @ head.T)[1:], ids


# ---------------------------------------------------------------- round trips
@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> HFVerifier:
    """A Qwen3 whose embedding has padded rows, on disk; rope_theta is small, so that wrong positions show."""
    folder = tmp_path_factory.mktemp("qwen3")
    byte_tokenizer(folder)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10.0}
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = Qwen3Config(
        vocab_size=320, num_hidden_layers=3, rope_parameters=rope, initializer_range=0.3, tie_word_embeddings=False,
        **sizes, **ids,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return HFVerifier.from_pretrained(str(folder), dtype="float32", device="cpu")


def saved(verifier: HFVerifier, folder: Path, **changes: Any) -> BlockDrafter:
    """A drafter whose weights were all moved, in ``folder``."""
    settings = {"num_layers": 1, "gamma": 5, "shifted": False, **changes}
    drafter = BlockDrafter.from_verifier(verifier, **settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_drafter(drafter, folder)
    return drafter


@pytest.mark.parametrize("attention", ["causal_prefix", "bidirectional"])
@pytest.mark.parametrize(("layout", "ids"), [("dflash", None), ("speculators", None), ("speculators", DRAFT_IDS)])
def test_the_exported_tensors_compute_the_same(
    verifier: HFVerifier, layout: str, ids: list[int] | None, attention: str, tmp_path: Path
) -> None:
    drafter = saved(verifier, tmp_path / "drafter", attention=attention, draft_vocab_ids=ids)
    out = tmp_path / "out"
    assert main([str(tmp_path / "drafter"), str(out), "--layout", layout, "--dtype", "float32"]) == 0
    target = AutoModelForCausalLM.from_pretrained(verifier.name, dtype=torch.float32)
    for length in (1, 2, 23):
        tokens = random_tokens(length, vocab=verifier.vocab_size)
        found, columns = dflash_logits(out, target, tokens)
        expected = drafter.start(tokens, SamplingParams(), 8).window_logits(drafter.gamma)
        place = {int(i): k for k, i in enumerate(columns)}
        order = [place[int(i)] for i in drafter.draft_vocab_ids]
        torch.testing.assert_close(found[:, order], expected, rtol=1e-4, atol=1e-4)
    assert len(columns) == (len(drafter.draft_vocab_ids) if layout == "speculators" else 320)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configs_say_what_engines_read(verifier: HFVerifier, layout: str, tmp_path: Path) -> None:
    saved(verifier, tmp_path / "drafter", mask_token_id=7)
    out = tmp_path / "out"
    assert main([str(tmp_path / "drafter"), str(out), "--layout", layout]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "mask_embedding.pt", "model.safetensors"]
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6
    layers = config.get("transformer_layer_config", config)
    assert (layers["model_type"], layers["num_hidden_layers"], layers["vocab_size"]) == ("qwen3", 1, 320)
    assert Qwen3Config(**layers).rope_parameters["rope_theta"] == 10.0
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= tensors.keys()
    if layout == "speculators":
        assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash"
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
        assert config["speculators_config"]["verifier"]["name_or_path"] == verifier.name
        assert (config["draft_vocab_size"], config["mask_token_id"]) == (verifier.vocab_size - 1, 7)
    else:
        assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [-1]}
        assert config["num_target_layers"] == 3


def test_the_reading_sees_a_changed_tensor(verifier: HFVerifier, tmp_path: Path) -> None:
    """The comparison above can fail: with another input norm for the context, logits differ."""
    saved(verifier, tmp_path / "drafter")
    main([str(tmp_path / "drafter"), str(tmp_path / "out"), "--layout", "dflash", "--dtype", "float32"])
    tokens = random_tokens(9, vocab=verifier.vocab_size)
    before, _ = dflash_logits(tmp_path / "out", verifier.model, tokens)

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    save_file(
        {**tensors, "hidden_norm.weight": tensors["hidden_norm.weight"] * 1.5}, tmp_path / "out/model.safetensors"
    )
    after, _ = dflash_logits(tmp_path / "out", verifier.model, tokens)
    assert (before - after).abs().max() > 1e-3


# ---------------------------------------------------------------- refusals
CONDITIONED = {"conditioning": "verifier_kv", "shifted": True, "markov_rank": 4, "num_layers": 2}


@pytest.mark.parametrize(
    ("changes", "layout", "reasons"),
    [
        ({"num_layers": 2}, "speculators", ["num_layers=2"]),
        ({"shifted": True, "denoising_steps": 2}, "dflash", ["shifted=true", "denoising_steps=2"]),
        (CONDITIONED, "speculators", ["conditioning=verifier_kv", "shifted=true", "markov_rank=4"]),
        ({"draft_vocab_ids": DRAFT_IDS}, "dflash", ["a draft vocabulary (only --layout speculators"]),
    ],
)
def test_other_drafters_are_refused_with_every_difference(
    verifier: HFVerifier, changes: dict[str, Any], layout: str, reasons: list[str], tmp_path: Path, capsys
) -> None:
    drafter = saved(verifier, tmp_path / "drafter", **changes)
    assert len(dflash_differences(drafter.config, layout)) == len(reasons)
    assert main([str(tmp_path / "drafter"), str(tmp_path / "out"), "--layout", layout]) == 1
    message = capsys.readouterr().err
    assert all(reason in message for reason in reasons) and "model.num_layers=1 model.shifted=false" in message
    assert not (tmp_path / "out").exists()


def test_the_remedy_composes_and_would_be_exported(verifier: HFVerifier) -> None:
    command = shlex.split(REMEDY.split("`")[1])
    assert command[:2] == ["python", "train.py"]
    config = build.check(build.load_config(CONF, "train", command[2:]), TrainConfig)
    values = {key: config["model"][key] for key in ("num_layers", "gamma", "attention", "shifted", "denoising_steps")}
    assert published_shape(config["verifier"]["source"]).model_type == "qwen3"  # type: ignore[union-attr]
    drafter = BlockDrafter.from_verifier(verifier, **values)
    assert dflash_differences(drafter.config, "speculators") == []


def test_other_layers_no_mask_id_other_kinds_and_full_folders(verifier: HFVerifier, tmp_path: Path, capsys) -> None:
    def refused(drafter: str, out: str = "out") -> str:
        assert main([str(tmp_path / drafter), str(tmp_path / out), "--layout", "speculators"]) == 1
        return str(capsys.readouterr().err)

    byte_tokenizer(tmp_path / "llama")
    tiny_llama(verifier.vocab_size).save_pretrained(tmp_path / "llama")
    llama = HFVerifier.from_pretrained(str(tmp_path / "llama"), dtype="float32", device="cpu")
    saved(llama, tmp_path / "of_llama")
    assert "layers of 'llama' (DFlash layers are Qwen3's" in refused("of_llama")
    save_drafter(EagleDrafter.from_verifier(verifier), tmp_path / "eagle")
    assert "EagleConfig instead of a block drafter" in refused("eagle")
    saved(verifier, tmp_path / "drafter")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine", encoding="utf-8")
    assert "it is not empty" in refused("drafter", "used")
    verifier.model.resize_token_embeddings(verifier.vocab_size)
    verifier.model.save_pretrained(tmp_path / "tight")
    byte_tokenizer(tmp_path / "tight")
    tight = HFVerifier.from_pretrained(str(tmp_path / "tight"), dtype="float32", device="cpu")
    saved(tight, tmp_path / "of_tight")
    assert "no id is left for masks" in refused("of_tight")
