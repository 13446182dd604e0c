"""Exports of masked-diffusion LMs: other programs read them back and compute the same."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILY_NAMES, read_tensors, write_checkpoint, write_parent_tokenizer
from helpers import byte_tokenizer, tiny_llama, tiny_verifier
from peft import PeftModel
from safetensors.torch import load_file
from tiny_training import resumable_run
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdiff2.models import masked_lm_export
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_files import load_eagle_checkpoint
from specdiff2.models.families import FAMILIES
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.lora import TARGETS
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.pretrained import load_drafter, read_training_info, save_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.export import main
from specdiff2.types import SamplingParams

TOKENS = torch.tensor([[4, 8, 15, 16, 23]])
LORA = {"rank": 3, "alpha": 6, "dropout": 0.05, "targets": list(TARGETS)}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def trained_drafter(folder: Path, family: str, lora: dict | None = LORA) -> MaskedLMDrafter:
    """A drafter whose trained weights were moved, saved in ``folder / "drafter"``; its base in ``folder / "base"``."""
    source = write_checkpoint(folder / "base", family)
    tokenizer = write_parent_tokenizer(folder / "tokenizer", family)
    kind = "qwen2" if FAMILIES[family].target.startswith("qwen") else "llama"
    verifier = tiny_verifier(vocab=len(tokenizer), tokenizer=tokenizer, family=kind)
    base = load_family_model(source, family=family, dtype="float32")
    drafter = MaskedLMDrafter.from_base(base, verifier, gamma=4, lora=lora).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_drafter(drafter, folder / "drafter")
    return drafter


def export(folder: Path, layout: str, *options: str) -> Path:
    out = folder / "out"
    assert main([str(folder / "drafter"), str(out), "--layout", layout, *options]) == 0
    return out


# ---------------------------------------------------------------- merged
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_transformers_reads_the_merged_folder(family: str, tmp_path: Path, capsys) -> None:
    drafter = trained_drafter(tmp_path, family)
    out = export(tmp_path, "merged", "--dtype", "float32")
    assert capsys.readouterr().out.strip() == str(out)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    assert type(model) is type(drafter.base.model)
    torch.testing.assert_close(logits(model), logits(drafter.model), rtol=1e-4, atol=1e-5)
    assert not any(path.suffix == ".py" for path in out.iterdir())
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    assert tokenizer.get_vocab() == drafter.base.tokenizer.get_vocab()


def test_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, "dream")
    tensors = load_file(export(tmp_path, "merged") / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    layer = drafter.model.get_submodule("model.layers.1.mlp.up_proj")
    delta = 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    merged = (layer.get_base_layer().weight + delta).bfloat16()
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], merged)


def test_all_weights_trained(tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, "llada", lora=None)
    model = AutoModelForCausalLM.from_pretrained(export(tmp_path, "merged", "--dtype", "float32"))
    assert torch.equal(logits(model), logits(drafter.model))


# ---------------------------------------------------------------- the authors' layout
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_authors_layout_is_a_checkpoint_again(family: str, tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, family)
    out = export(tmp_path, "family", "--dtype", "float32")
    again = load_family_model(out, family=family, dtype="float32")
    torch.testing.assert_close(logits(again.model), logits(drafter.model), rtol=1e-4, atol=1e-5)
    assert (again.mask_token_id, again.forbidden_ids) == (drafter.base.mask_token_id, drafter.base.forbidden_ids)
    base, written = read_tensors(tmp_path / "base"), read_tensors(out)
    assert {name: t.shape for name, t in written.items()} == {name: t.shape for name, t in base.items()}
    assert {p.name for p in (tmp_path / "base").glob("*.py")} == {p.name for p in out.glob("*.py")}


# ---------------------------------------------------------------- adapter only
@pytest.mark.parametrize("family", ["dream", "diffullama", "sdar"])
def test_peft_reads_the_exported_adapter(family: str, tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, family)
    out = export(tmp_path, "adapter")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = PeftModel.from_pretrained(load_family_model(tmp_path / "base", family=family, dtype="float32").model, out)
    assert torch.equal(logits(theirs.eval()), logits(drafter.model))
    assert theirs.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


class AuthorsLlada(nn.Module):
    """The module tree of LLaDA's own code, which its checkpoint's names spell: enough for peft to find its layers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = {"model_type": "llada"}
        for name, tensor in tensors.items():
            parent: nn.Module = self
            *path, leaf, _ = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if tensor.ndim == 2:
                linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
                linear.weight.data = tensor
                parent.add_module(leaf, linear)

    def prepare_inputs_for_generation(self) -> None: ...


def test_the_llada_adapter_fits_the_authors_own_layer_names(tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, "llada")
    authors = AuthorsLlada(read_tensors(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(authors, export(tmp_path, "adapter")).eval()
    merged = theirs.merge_and_unload()
    names = {"blocks.1.ff_out": "layers.1.mlp.down_proj", "blocks.0.attn_out": "layers.0.self_attn.o_proj"}
    states = torch.randn(3, 64)
    for own, ours in names.items():
        inputs = states[:, : merged.get_submodule(f"model.transformer.{own}").in_features]
        found = merged.get_submodule(f"model.transformer.{own}")(inputs)
        torch.testing.assert_close(found, drafter.model.get_submodule(f"model.{ours}")(inputs), rtol=1e-4, atol=1e-5)
    head = read_tensors(tmp_path / "base")["model.transformer.ff_out.weight"]
    assert torch.equal(merged.get_submodule("model.transformer.ff_out").weight, head), "called ff_out too, not adapted"


def test_an_adapter_export_needs_no_base(tmp_path: Path) -> None:
    trained_drafter(tmp_path, "dream")
    (tmp_path / "base").rename(tmp_path / "moved")
    export(tmp_path, "adapter")


# ---------------------------------------------------------------- refusals
def refused(folder: Path, layout: str, *options: str) -> str:
    """The one message of a refused export; nothing is written."""
    result = subprocess.run(
        [sys.executable, "-m", "specdiff2.runtime.export", "drafter", "out", "--layout", layout, *options],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not any((folder / "out").glob("*.safetensors"))
    return result.stderr


def test_a_base_that_moved_is_named(tmp_path: Path) -> None:
    drafter = trained_drafter(tmp_path, "dream")
    (tmp_path / "base").rename(tmp_path / "moved")
    assert "its base cannot be loaded" in refused(tmp_path, "merged")
    out = export(tmp_path, "merged", "--base", str(tmp_path / "moved"), "--dtype", "float32")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(out)), logits(drafter.model), rtol=1e-4, atol=1e-5
    )


def test_another_base_is_refused(tmp_path: Path, capsys) -> None:
    trained_drafter(tmp_path, "dream")
    other = write_checkpoint(tmp_path / "other", "dream", seed=9)
    arguments = [str(tmp_path / "drafter"), str(tmp_path / "out"), "--base", str(other), "--layout"]
    for layout in ("merged", "family"):
        assert main([*arguments, layout]) == 1
        assert f"got base {other}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_a_wrong_layout_and_other_drafters(tmp_path: Path, capsys) -> None:
    trained_drafter(tmp_path, "dream", lora=None)
    arguments = [str(tmp_path / "drafter"), str(tmp_path / "out"), "--layout"]
    assert main([*arguments, "adapter"]) == 1
    assert "it has no adapter; use merged or family" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    assert main([*arguments, "merged"]) == 1
    assert "it is not empty" in capsys.readouterr().err
    verifier = tiny_verifier()
    save_drafter(BlockDrafter.from_verifier(verifier, num_layers=1, gamma=3), tmp_path / "block")
    assert main([str(tmp_path / "block"), str(tmp_path / "new"), "--layout", "adapter"]) == 1
    assert "a block drafter; expected a masked-diffusion LM" in capsys.readouterr().err
    with pytest.raises(masked_lm_export.ConfigError, match="layout='onnx': expected one of merged, adapter, family"):
        masked_lm_export.export_masked_lm(tmp_path / "drafter", tmp_path / "new", "onnx")


@pytest.mark.parametrize("layout", ["merged", "adapter"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch, capsys, layout: str) -> None:
    trained_drafter(tmp_path, "dream")

    def full(*args, **kwargs):
        Path(args[-1]).joinpath("half").write_text("half", encoding="utf-8")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(masked_lm_export, f"_write_{layout}", full)
    assert main([str(tmp_path / "drafter"), str(tmp_path / "out"), "--layout", layout]) == 1
    assert "export not saved" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "drafter", "tokenizer"]


def test_a_damaged_adapter_is_not_exported(tmp_path: Path, capsys) -> None:
    trained_drafter(tmp_path, "dream")
    path = tmp_path / "drafter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 8}))
    assert main([str(tmp_path / "drafter"), str(tmp_path / "out"), "--layout", "adapter"]) == 1
    assert "r is not 3" in capsys.readouterr().err


def test_a_training_checkpoint_becomes_a_drafter_folder(tmp_path: Path, capsys) -> None:
    _, module = resumable_run(tmp_path / "run", 5)
    (checkpoint,) = (tmp_path / "run").rglob("*step*5*.ckpt")
    assert main([str(checkpoint), str(tmp_path / "out"), "--layout", "drafter"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    again = load_drafter(tmp_path / "out", module.verifier)
    expected = module.drafter.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert read_training_info(tmp_path / "out")["step"] == 5
    assert main([str(tmp_path / "nothing.ckpt"), str(tmp_path / "new"), "--layout", "drafter"]) == 1
    assert not (tmp_path / "new").exists()


def test_drafters_beside_a_verifier_are_exported_from_the_command_line(tmp_path, capsys):
    source = tmp_path / "verifier"
    byte_tokenizer(source)
    tiny_llama(300).save_pretrained(source)
    verifier = HFVerifier.from_pretrained(str(source), dtype="float32", device="cpu")
    block = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=1, shifted=True)
    save_drafter(block, tmp_path / "block")
    save_drafter(EagleDrafter.from_verifier(verifier), tmp_path / "eagle")
    assert main([str(tmp_path / "block"), str(tmp_path / "a"), "--layout", "causal", "--dtype", "float32"]) == 0
    prompt = [5, 6, 7]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    expected = block.start(prompt, SamplingParams(), 4).window_logits(1)[0]
    torch.testing.assert_close(model(torch.tensor([prompt])).logits[0, -1][block.draft_vocab_ids], expected)
    assert main([str(tmp_path / "eagle"), str(tmp_path / "b"), "--layout", "eagle"]) == 0
    assert load_eagle_checkpoint(tmp_path / "b", verifier).config.num_layers == 1
    assert main([str(tmp_path / "block"), str(tmp_path / "c"), "--layout", "eagle"]) == 1
    assert "holds a BlockDrafter: layout eagle is for a EagleDrafter" in capsys.readouterr().err
