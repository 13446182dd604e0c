"""The authors' own layout written back: names, files and bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILY_NAMES, read_tensors, write_checkpoint
from torch import nn

from specdiff2.models import family_export
from specdiff2.models.families import FamilyModel
from specdiff2.models.family_export import write_family_layout
from specdiff2.models.family_loading import load_family_model
from specdiff2.types import ConfigError, MismatchError, SpecDiffError


def trained(folder: Path) -> FamilyModel:
    """The checkpoint with every weight changed, as training would."""
    base = load_family_model(folder, dtype="float32")
    with torch.no_grad():
        for number, parameter in enumerate(base.model.parameters()):
            parameter.add_(0.01 * (number + 1))
    return base


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_what_is_written_reads_back_bit_for_bit(tmp_path, name, limit):
    folder = write_checkpoint(tmp_path / "base", name)
    base = trained(folder)
    out = write_family_layout(base.model, base, tmp_path / "out", max_shard_bytes=limit)
    again = load_family_model(out, dtype="float32", family=name)
    for key, tensor in base.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], tensor), key
    old, new = read_tensors(folder), read_tensors(out)
    assert old.keys() == new.keys()
    assert not any(torch.equal(old[key], new[key]) for key in old)
    assert again.mask_token_id == base.mask_token_id and again.forbidden_ids == base.forbidden_ids
    for file in folder.iterdir():  # config.json with its auto_map, tokenizer and code files: the very bytes
        if "safetensors" not in file.name:
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    _check_shards(out, new, limit)


def _check_shards(out: Path, tensors: dict[str, torch.Tensor], limit: int) -> None:
    files = sorted(out.glob("*.safetensors"))
    assert not list(out.glob(".*"))
    if limit == 10**9:
        assert [file.name for file in files] == ["model.safetensors"] and not (out / family_export.SAFE_INDEX).exists()
        return
    assert len(files) > 2 and all(file.stat().st_size < limit + 4000 or len(_names(file)) == 1 for file in files)
    index = json.loads((out / family_export.SAFE_INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert index["weight_map"] == {name: file.name for file in files for name in _names(file)}
    assert {file.name for file in files} == {
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    }


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def test_a_tied_head_is_stored_once(tmp_path):
    base = trained(write_checkpoint(tmp_path / "base", "llada", tie_word_embeddings=True))
    out = write_family_layout(base.model, base, tmp_path / "out")
    assert "model.transformer.ff_out.weight" not in read_tensors(out)
    assert load_family_model(out, dtype="float32").fingerprint == base.fingerprint


def test_another_dtype_is_said_in_config_json(tmp_path):
    base = trained(write_checkpoint(tmp_path / "base", "dream"))
    out = write_family_layout(base.model.to(torch.bfloat16), base, tmp_path / "out")
    config, old = (json.loads((folder / "config.json").read_text()) for folder in (out, base.folder))
    assert config == old | {"torch_dtype": "bfloat16"}
    assert {tensor.dtype for tensor in read_tensors(out).values()} == {torch.bfloat16}


def test_links_of_a_hub_cache_become_files(tmp_path):
    folder = write_checkpoint(tmp_path / "blobs", "dream")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    base = load_family_model(snapshot, dtype="float32")
    out = write_family_layout(base.model, base, tmp_path / "out")
    assert not [file for file in out.iterdir() if file.is_symlink()] and (out / "modeling_dream.py").is_file()


def test_stale_weight_files_of_the_base_are_not_copied(tmp_path):
    folder = write_checkpoint(tmp_path / "base", "diffullama", bin_files=True)
    (folder / "LICENSE.txt").write_text("terms")
    (folder / "README.md").write_text("the card of the base")
    base = load_family_model(folder, dtype="float32")
    out = write_family_layout(base.model, base, tmp_path / "out")
    assert not list(out.glob("pytorch_model*")) and not (out / "README.md").exists()
    assert (out / "LICENSE.txt").read_text() == "terms"


def test_adapters_that_were_not_merged_are_refused(tmp_path):
    base = load_family_model(write_checkpoint(tmp_path / "base", "llada"), dtype="float32")
    base.model.model.layers[0].mlp.up_proj.lora_A = nn.Linear(32, 2, bias=False)
    with pytest.raises(MismatchError, match=r"unknown: model\.layers\.0\.mlp\.up_proj\.lora_A"):
        write_family_layout(base.model, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_and_a_full_disk(tmp_path, monkeypatch):
    base = load_family_model(write_checkpoint(tmp_path / "base", "dream"), dtype="float32")
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_family_layout(base.model, base, used)
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        write_family_layout(base.model, base, tmp_path / "out", max_shard_bytes=0)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(family_export, "save_file", full)
    with pytest.raises(SpecDiffError, match="No space left"):
        write_family_layout(base.model, base, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "used"}
