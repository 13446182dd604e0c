"""EAGLE heads on disk: our format, the layout of published checkpoints and back, and everything that is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gap, make_batch, random_tokens, tiny_verifier
from safetensors.torch import load_file, save_file

from specdiff2.models import eagle_files
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_files import check_eagle_source, export_eagle, is_eagle_source, load_eagle_checkpoint
from specdiff2.models.eagle_start import fit_fc
from specdiff2.models.pretrained import load_drafter, read_drafter_config, save_drafter
from specdiff2.runtime.drafters import config_class
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

ROWS = [random_tokens(20, seed) for seed in range(3)]
BATCH = make_batch(ROWS, [(0, 3), (1, 9), (2, 0)], gamma=3)
# names and shapes of published heads, written out: hidden 32, 4 heads of 8, 2 of them for keys and values
PUBLIC = {
    "fc.weight": (32, 64), "layers.0.self_attn.q_proj.weight": (32, 32), "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32), "layers.0.self_attn.o_proj.weight": (32, 32),
    "layers.0.mlp.gate_proj.weight": (64, 32), "layers.0.mlp.up_proj.weight": (64, 32),
    "layers.0.mlp.down_proj.weight": (32, 64), "layers.0.post_attention_layernorm.weight": (32,),
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256, "model_type": "llama",
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
    "vocab_size": 64, "rope_theta": 10.0, "bias": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> Any:
    return tiny_verifier(64, seed=3)


def make_head(verifier: Any, **changes: Any) -> EagleDrafter:
    drafter = EagleDrafter.from_verifier(verifier, gamma=3, **changes)
    fit_fc(drafter, [(row, 2) for row in ROWS])
    return drafter.eval()


def public_tensors(verifier: Any, *, embedding: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in PUBLIC.items()}
    if embedding:
        tensors["embed_tokens.weight"] = verifier.model.get_input_embeddings().weight.detach().half()
    return tensors


def write_public(folder: Path, tensors: dict[str, Any], *, safe: bool = True, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    if safe:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


# ---------------------------------------------------------------- our format
def test_save_and_load(verifier: Any, tmp_path: Path) -> None:
    drafter = make_head(verifier, num_layers=2, draft_vocab_ids=list(range(40)), feature_loss_weight=0.5)
    save_drafter(drafter, tmp_path / "d", {"step": 3})
    again = load_drafter(tmp_path / "d", verifier)
    assert isinstance(again, EagleDrafter) and again.config == drafter.config == read_drafter_config(tmp_path / "d")
    with torch.no_grad():
        assert torch.equal(drafter(BATCH), again(BATCH))
    record = json.loads((tmp_path / "d/config.json").read_text())
    assert record["format"] == "specdiff2-eagle" and record["training"] == {"step": 3}
    assert not is_eagle_source(tmp_path / "d")  # that is for published ones
    names = set(load_file(tmp_path / "d/model.safetensors"))
    assert names == {name for name, _ in drafter.named_parameters()} and not any("embed" in name for name in names)


def test_a_head_of_another_verifier_or_with_a_renamed_tensor_is_refused(verifier: Any, tmp_path: Path) -> None:
    save_drafter(make_head(verifier), tmp_path / "d")
    with pytest.raises(MismatchError, match="trained for verifier"):
        load_drafter(tmp_path / "d", tiny_verifier(64, seed=4))
    record = json.loads((tmp_path / "d/config.json").read_text())
    record["drafter"]["gama"] = record["drafter"].pop("gamma")
    (tmp_path / "d/config.json").write_text(json.dumps(record))
    with pytest.raises(CorruptFileError, match="gama, gamma"):
        read_drafter_config(tmp_path / "d")


def test_the_section_model_says_which_config_fits() -> None:
    target = "specdiff2.models.eagle_drafter.EagleDrafter.from_verifier"
    assert config_class({"_target_": target}).__name__ == "EagleConfig"
    block = "specdiff2.models.block_drafter.BlockDrafter.from_verifier"
    assert config_class({"_target_": block}).__name__ == "BlockDrafterConfig"


# ---------------------------------------------------------------- the public layout
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_published_heads_load(verifier: Any, tmp_path: Path, safe: bool, bias: bool) -> None:
    tensors = public_tensors(verifier)
    if bias:
        tensors["fc.bias"] = torch.arange(32.0)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # old versions stored it
    folder = write_public(tmp_path / "head", tensors, safe=safe, bias=bias)
    assert is_eagle_source(folder) and is_eagle_source(str(folder))
    head = load_eagle_checkpoint(folder, verifier)
    assert not head.training and len(head.draft_vocab_ids) == 64 and head.max_gamma is None and head.gamma == 5
    assert (head.fc.bias is not None) == bias and head.stack.config.rope_parameters["rope_theta"] == 10.0
    for name, tensor in head.named_parameters():
        assert torch.equal(tensor, tensors[name.removeprefix("stack.")]), name


def test_heads_with_biases_for_queries_keys_and_values(verifier: Any, tmp_path: Path) -> None:
    """``qkv_bias``, as heads of Qwen2 have it."""
    tensors = public_tensors(verifier)
    tensors |= {f"layers.0.self_attn.{n}_proj.bias": torch.ones(32 if n == "q" else 16) for n in "qkv"}
    head = load_eagle_checkpoint(write_public(tmp_path / "h", tensors, qkv_bias=True), verifier)
    assert head.stack.layers[0].self_attn.o_proj.bias is None
    export_eagle(head, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["qkv_bias"] is True


@pytest.mark.parametrize("num_layers", [1, 2])
def test_export_and_back(verifier: Any, tmp_path: Path, num_layers: int) -> None:
    """A head of ours in the public layout computes the same; it drafts all tokens there."""
    drafter = make_head(verifier, num_layers=num_layers, draft_vocab_ids=list(range(5, 50)))
    export_eagle(drafter, tmp_path / "public")
    found = load_file(tmp_path / "public/model.safetensors")
    assert found.keys() >= PUBLIC.keys() | {"fc.bias", "embed_tokens.weight"}
    assert "layers.0.input_layernorm.weight" not in found
    assert ("layers.1.input_layernorm.weight" in found) == (num_layers == 2)
    again = load_eagle_checkpoint(tmp_path / "public", verifier)
    with torch.no_grad():
        assert gap(drafter(BATCH), again(BATCH)[..., 5:50]) < 1e-6  # a wider head may round otherwise
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_eagle(drafter, tmp_path / "public")


def test_a_hub_id_in_the_local_cache(verifier: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_public(tmp_path / "snapshot", public_tensors(verifier))
    monkeypatch.setattr(eagle_files, "cached_folder", lambda repo: folder if repo == "someone/EAGLE-tiny" else None)
    assert is_eagle_source("someone/EAGLE-tiny") and not is_eagle_source("someone/else")
    assert load_eagle_checkpoint("someone/EAGLE-tiny", verifier).gamma == 5
    with pytest.raises(ConfigError, match="hf download someone/else"):
        check_eagle_source("someone/else")


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), MismatchError, r"layers\.0\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.update({"layers.0.extra": torch.ones(1)}), MismatchError, r"layers\.0\.extra is unknown"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), MismatchError, r"fc\.weight has shape \(32, 32\)"),
        (lambda t: t.update({"midlayer.x": torch.ones(1)}), ConfigError, "EAGLE-3"),
        (lambda t: t.update({"d2t": torch.ones(1)}), ConfigError, "EAGLE-3"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(64, 32)}), MismatchError, "not the embedding"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(60, 32)}), MismatchError, r"shape \(60, 32\)"),
    ],
)
def test_other_tensors(verifier: Any, tmp_path: Path, change: Any, error: type, named: str) -> None:
    tensors = public_tensors(verifier)
    change(tensors)
    with pytest.raises(error, match=named):
        load_eagle_checkpoint(write_public(tmp_path / "h", tensors), verifier)


def test_without_an_embedding_the_sizes_decide(verifier: Any, tmp_path: Path) -> None:
    folder = write_public(tmp_path / "h", public_tensors(verifier, embedding=False))
    load_eagle_checkpoint(folder, verifier)
    with pytest.raises(MismatchError, match=r"hidden_size=32.*has 48"):
        load_eagle_checkpoint(folder, tiny_verifier(64, hidden_size=48))


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"hidden_size": None}, CorruptFileError, "hidden_size=None"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, ConfigError, "rope_scaling=.*yarn"),
    ],
)
def test_other_configs(verifier: Any, tmp_path: Path, config: dict, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        check_eagle_source(write_public(tmp_path / "h", public_tensors(verifier), **config))
    scaled = write_public(tmp_path / "s", public_tensors(verifier), rope_scaling={"type": "linear", "factor": 2.0})
    rope = load_eagle_checkpoint(scaled, verifier).stack.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 2.0, 10000.0)


def test_damaged_files_and_pickles_that_would_run_something(verifier: Any, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "harm").touch, ())

    folder = write_public(tmp_path / "h", public_tensors(verifier), safe=False)
    torch.save({"fc.weight": Harm()}, folder / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin"):
        load_eagle_checkpoint(folder, verifier)
    assert not (tmp_path / "harm").exists() and not is_eagle_source(folder)
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    with pytest.raises(CorruptFileError, match="a table of tensors"):
        load_eagle_checkpoint(folder, verifier)
    safe = write_public(tmp_path / "s", public_tensors(verifier))
    whole = (safe / "model.safetensors").read_bytes()
    (safe / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match="not a complete"):
        check_eagle_source(safe)
    (safe / "model.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"no model\.safetensors"):
        check_eagle_source(safe)
    (safe / "config.json").unlink()
    assert not is_eagle_source(safe) and not is_eagle_source(tmp_path / "nowhere")
    with pytest.raises(CorruptFileError, match=r"config\.json does not exist"):
        check_eagle_source(safe)


def test_causal_language_models_are_no_heads(verifier: Any, tmp_path: Path) -> None:
    verifier.model.save_pretrained(tmp_path / "lm")
    assert not is_eagle_source(tmp_path / "lm")


def test_layers_that_the_public_layout_has_no_place_for(tmp_path: Path) -> None:
    wide = tiny_verifier(64, seed=3, head_dim=16)
    with pytest.raises(ConfigError, match="head_dim=16"):
        export_eagle(EagleDrafter.from_verifier(wide), tmp_path / "w")
