"""Drafters on disk: the same numbers come back, and nothing else is ever accepted in their place."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from helpers import byte_tokenizer, char_tokenizer, tiny_verifier
from safetensors.torch import load_file, save_file

from specdiff2.models import drafter_files, pretrained, safe_folder
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.packed_linear import PackedLinear, _available
from specdiff2.models.pretrained import load_drafter, read_training_info, save_drafter
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams, SpecDiffError


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(num_hidden_layers=3, tokenizer=char_tokenizer())


@pytest.fixture
def drafter(verifier) -> BlockDrafter:
    drafter = BlockDrafter.from_verifier(
        verifier,
        num_layers=2,
        gamma=3,
        attention="causal_prefix",
        shifted=True,
        denoising_steps=2,
        draft_vocab_ids=[5, 9, 11, 2],
        mask_token_id=40,
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


@pytest.fixture
def saved(drafter, tmp_path: Path) -> Path:
    return save_drafter(drafter, tmp_path / "drafter", {"steps": 12, "note": "ü\u2028"})


def draft_law(drafter: BlockDrafter) -> torch.Tensor:
    return drafter.start([4, 8, 15], SamplingParams(), 10).draft_law(3)


def rewrite_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        record["drafter"][key] = value
    path.write_text(json.dumps(record), encoding="utf-8")


def rewrite_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other tensors with a matching digest, as an honest but wrong exporter would write them."""
    save_file(tensors, folder / "model.safetensors")
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record["weights"]["sha256"] = drafter_files.weights_digest(folder)
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")


# ---------------------------------------------------------------- round trip
def test_round_trip_is_exact(drafter, verifier, saved: Path) -> None:
    loaded = load_drafter(saved, verifier)
    assert loaded.config == drafter.config and not loaded.training
    assert torch.equal(draft_law(loaded), draft_law(drafter))
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_training_info(saved) == {"steps": 12, "note": "ü\u2028"}
    assert sorted(f.name for f in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [f.name for f in saved.parent.iterdir()] == ["drafter"], "no temporary folder is left"


def test_without_a_draft_vocabulary_and_tokenizer(tmp_path: Path) -> None:
    verifier = tiny_verifier(family="qwen2")
    drafter = BlockDrafter.from_verifier(verifier, num_layers=2, gamma=3, attention="bidirectional")
    loaded = load_drafter(save_drafter(drafter, tmp_path / "d"), verifier)
    assert torch.equal(draft_law(loaded), draft_law(drafter))


def test_the_file_holds_no_verifier_tensor(drafter, verifier, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}
    largest = max(tensor.numel() for tensor in tensors.values())
    assert largest < verifier.model.get_input_embeddings().weight.numel() + 1
    assert not any("embed" in name and name != "mask_embedding" for name in tensors)


def test_dtype_options(drafter, verifier, tmp_path: Path) -> None:
    half = save_drafter(drafter, tmp_path / "half", dtype=torch.bfloat16)
    full = save_drafter(drafter, tmp_path / "full")
    size = {folder: (folder / "model.safetensors").stat().st_size for folder in (half, full)}
    assert size[half] < 0.6 * size[full]
    assert load_drafter(half, verifier).dtype == torch.float32, "the verifier's by default"
    bf16 = load_drafter(full, verifier, dtype=torch.bfloat16)
    assert bf16.dtype == torch.bfloat16
    exact = drafter.stack.rotary_emb.inv_freq
    assert torch.equal(bf16.stack.rotary_emb.inv_freq, exact) and exact.dtype == torch.float32


def test_loading_leaves_the_global_rng_untouched(verifier, saved: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_drafter(saved, verifier)
    assert torch.equal(torch.rand(1), expected)


# ---------------------------------------------------------------- other verifier, other tokenizer
def test_other_verifier_is_refused_naming_both(saved: Path) -> None:
    other = tiny_verifier(num_hidden_layers=3, tokenizer=char_tokenizer(), seed=1)
    other.name = "another-model"
    with pytest.raises(MismatchError, match=r"tiny-llama \(\w+\), got verifier another-model \(\w+\)"):
        load_drafter(saved, other)


def test_other_tokenizer_is_refused(saved: Path, verifier) -> None:
    config = pretrained.read_drafter_config(saved)
    other = tiny_verifier(num_hidden_layers=3, tokenizer=byte_tokenizer(), vocab_size=verifier.vocab_size)
    assert other.fingerprint == config.verifier_fingerprint
    with pytest.raises(MismatchError, match="trained for tokenizer"):
        load_drafter(saved, other)


# ---------------------------------------------------------------- missing, renamed, misshapen tensors (case 26)
@pytest.mark.parametrize("change", ["missing", "renamed", "misshapen", "one more"])
def test_tensors_that_do_not_fit_are_refused(verifier, saved: Path, change: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "stack.layers.1.mlp.up_proj.weight"
    tensor = tensors[name]
    if change in ("missing", "renamed"):
        del tensors[name]
    if change in ("renamed", "one more"):
        tensors["stack.layers.1.mlp.other.weight"] = tensor.clone()
    if change == "misshapen":
        tensors[name] = tensor[1:].contiguous()
    rewrite_weights(saved, tensors)
    expected = "mlp.other.weight is unknown" if change == "one more" else f"{name} (is missing|has shape)"
    with pytest.raises(MismatchError, match=expected):
        load_drafter(saved, verifier)


# ---------------------------------------------------------------- missing and damaged files
@pytest.mark.parametrize("name", [".", "config.json", "model.safetensors"])
def test_missing_folder_or_file(verifier, saved: Path, name: str) -> None:
    missing = saved / name
    os.rename(missing, saved.parent / "elsewhere")
    with pytest.raises(CorruptFileError, match=r"does not exist; expected a folder written by save_drafter"):
        load_drafter(saved, verifier)


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_truncated_weights(verifier, saved: Path, keep: float) -> None:
    path = saved / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(CorruptFileError, match=r"model.safetensors: not a complete safetensors file"):
        load_drafter(saved, verifier)


def test_one_flipped_bit(verifier, saved: Path) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match="SHA-256"):
        load_drafter(saved, verifier)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\x00\x01"])
def test_damaged_config(verifier, saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"config.json"):
        load_drafter(saved, verifier)


def test_config_values_are_checked_at_load(verifier, saved: Path) -> None:
    rewrite_config(saved, mask_token_id=64)  # case 19: beyond the embedding
    with pytest.raises(ConfigError, match="mask_token_id=64"):
        load_drafter(saved, verifier)
    rewrite_config(saved, mask_token_id=None, gamma=0)
    with pytest.raises(ConfigError, match="gamma=0"):
        load_drafter(saved, verifier)
    rewrite_config(saved, gamma=3, gama=3)
    with pytest.raises(CorruptFileError, match="gama"):
        load_drafter(saved, verifier)


def test_a_future_format_is_refused(verifier, saved: Path) -> None:
    path = saved / "config.json"
    text = path.read_text(encoding="utf-8").replace('"format_version": 2', '"format_version": 3')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MismatchError, match="format_version=3, expected 2"):
        load_drafter(saved, verifier)


def test_a_config_from_before_conditioning_loads_with_its_defaults(drafter, verifier, saved: Path) -> None:
    path = saved / "config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for key in ("conditioning", "feature_layers", "markov_rank"):
        del record["drafter"][key]
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CorruptFileError, match="conditioning, feature_layers, markov_rank"):  # version 2 has them
        load_drafter(saved, verifier)
    path.write_text(json.dumps(record | {"format_version": 1}), encoding="utf-8")
    loaded = load_drafter(saved, verifier)
    assert (loaded.config.conditioning, loaded.config.feature_layers, loaded.config.markov_rank) == ("none", [], 0)
    assert loaded.config == drafter.config and torch.equal(draft_law(loaded), draft_law(drafter))


# ---------------------------------------------------------------- saving is all or nothing
def test_a_newer_drafter_replaces_an_older_one(drafter, verifier, saved: Path) -> None:
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)
    save_drafter(drafter, saved, {"steps": 13})
    assert torch.equal(load_drafter(saved, verifier).mask_embedding, drafter.mask_embedding)
    assert read_training_info(saved) == {"steps": 13}
    assert [f.name for f in saved.parent.iterdir()] == ["drafter"]


@pytest.mark.parametrize("failing", ["save_file", "_dump", "_swap_in", "last rename"])
def test_a_full_disk_leaves_the_old_drafter(drafter, verifier, saved: Path, monkeypatch, failing: str) -> None:
    before = draft_law(drafter)
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        if failing == "_dump" and len(calls) == 1:  # the check before anything is written
            return "{}"
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "last rename":
        rename = os.replace
        monkeypatch.setattr(safe_folder.os, "replace", lambda a, b: full() if str(a).endswith(".tmp") else rename(a, b))
    else:
        owner = {"save_file": pretrained, "_dump": drafter_files, "_swap_in": safe_folder}[failing]
        monkeypatch.setattr(owner, failing, full)
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)
    with pytest.raises(SpecDiffError, match="No space left on device; what was there before is untouched"):
        save_drafter(drafter, saved)
    monkeypatch.undo()
    assert torch.equal(draft_law(load_drafter(saved, verifier)), before)
    assert [f.name for f in saved.parent.iterdir()] == ["drafter"], "nothing half-written is left behind"


def test_diverged_weights_are_not_saved(drafter, verifier, saved: Path) -> None:
    with torch.no_grad():
        drafter.mask_embedding[3] = float("nan")
    with pytest.raises(SpecDiffError, match="mask_embedding holds NaN"):
        save_drafter(drafter, saved)
    assert torch.isfinite(load_drafter(saved, verifier).mask_embedding).all()


def test_other_folders_are_never_removed(drafter, saved: Path) -> None:
    (saved / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"saving would remove notes.txt"):
        save_drafter(drafter, saved)
    with pytest.raises(ConfigError, match="is a file"):
        save_drafter(drafter, saved / "notes.txt")


def test_training_info_is_strict_json(drafter, tmp_path: Path) -> None:
    for extra in ({"loss": float("nan")}, {"loss": torch.ones(1)}):
        with pytest.raises(ConfigError, match="strict JSON"):
            save_drafter(drafter, tmp_path / "d", extra)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- packed weights
def test_a_loaded_bf16_drafter_is_packed_and_stays_an_ordinary_module(saved: Path, tmp_path: Path) -> None:
    verifier = tiny_verifier(num_hidden_layers=3, tokenizer=char_tokenizer())
    verifier.model.to(torch.bfloat16)
    drafter = load_drafter(saved, verifier, torch.bfloat16)
    linears = [module for module in drafter.modules() if isinstance(module, torch.nn.Linear)]
    if not _available():
        pytest.skip("this CPU packs nothing")
    assert linears and all(type(module) is PackedLinear for module in linears)
    twin = copy.deepcopy(drafter)  # computes with its own, unpacked weights
    with torch.no_grad():
        assert torch.allclose(draft_law(drafter), draft_law(twin), atol=0.02)
    again = load_drafter(save_drafter(drafter, tmp_path / "again"), verifier, torch.bfloat16)
    assert all(
        torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), again.state_dict().values(), strict=True)
    )
    states = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    linears[0](states).sum().backward()  # with gradients on, packing does nothing
    assert states.grad is not None


def test_a_copy_is_byte_for_byte_and_needs_no_verifier(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copied = drafter_files.copy_drafter(saved, tmp_path / "copy")
    assert {f.name: f.read_bytes() for f in copied.iterdir()} == {f.name: f.read_bytes() for f in saved.iterdir()}
    (copied / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"saving would remove notes.txt"):
        drafter_files.copy_drafter(saved, copied)
    with pytest.raises(CorruptFileError, match="does not exist"):
        drafter_files.copy_drafter(tmp_path / "nowhere", tmp_path / "other")
