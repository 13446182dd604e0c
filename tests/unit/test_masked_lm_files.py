"""Masked-diffusion LMs on disk: every family comes back with equal numbers, and onto nothing but its own base."""

from __future__ import annotations

import copy
import errno
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILY_NAMES, write_checkpoint, write_parent_tokenizer
from helpers import byte_tokenizer, tiny_verifier
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdiff2.models import drafter_files, masked_lm_files, safe_folder
from specdiff2.models.drafter_files import copy_drafter
from specdiff2.models.families import FAMILIES
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.lora import TARGETS, has_lora
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.packed_linear import PackedLinear, _available
from specdiff2.models.pretrained import (
    load_drafter,
    read_drafter_config,
    read_training_info,
    save_drafter,
)
from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams, SpecDiffError

LORA = {"rank": 3, "alpha": 6, "dropout": 0.05, "targets": list(TARGETS)}
PROMPT = [4, 8, 15, 16, 23]


def make_verifier(folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> HFVerifier:
    tokenizer = write_parent_tokenizer(folder, family)
    kind = "qwen2" if FAMILIES[family].target.startswith("qwen") else "llama"
    rows = len(tokenizer)
    return tiny_verifier(vocab=rows, dtype=dtype, tokenizer=tokenizer, family=kind, seed=seed)


def make_drafter(source: Path, verifier: HFVerifier, lora: dict | None = LORA, **changes) -> MaskedLMDrafter:
    base = load_family_model(source, dtype=changes.pop("dtype", "float32"))
    torch.manual_seed(3)
    return MaskedLMDrafter.from_base(base, verifier, gamma=4, lora=lora, **changes)


def train(drafter: MaskedLMDrafter, steps: int = 3) -> MaskedLMDrafter:
    """A few steps by hand on every trained weight; eval mode afterwards."""
    drafter.train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0.02)
    tokens = torch.tensor([PROMPT * 2])
    for _ in range(steps):
        drafter.model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def law(drafter: MaskedLMDrafter) -> Tensor:
    return drafter.start(PROMPT, SamplingParams(), 10).draft_law(4)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT]), use_cache=False).logits


@pytest.fixture(scope="module")
def dream(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "dream", "dream")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> HFVerifier:
    return make_verifier(tmp_path_factory.mktemp("tokenizer"), "dream")


@pytest.fixture(scope="module")
def trained(dream: Path, verifier: HFVerifier) -> MaskedLMDrafter:
    return train(make_drafter(dream, verifier))


@pytest.fixture
def saved(trained: MaskedLMDrafter, tmp_path: Path) -> Path:
    return save_drafter(trained, tmp_path / "drafter", {"run": "train/a", "step": 3})


def rewrite(folder: Path, **changes) -> None:
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["drafter"].update(changes)
    path.write_text(json.dumps(record), encoding="utf-8")


def rewrite_weights(folder: Path, tensors: dict[str, Tensor], name: str = "adapter_model.safetensors") -> None:
    """Other tensors with a matching digest, as an honest but wrong exporter would write them."""
    save_file(tensors, folder / name)
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record["weights"]["sha256"] = drafter_files.weights_digest(folder)
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")


# ---------------------------------------------------------------- round trips
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / family, family)
    verifier = make_verifier(tmp_path / "tokenizer", family)
    untrained = make_drafter(source, verifier)
    before = law(untrained)
    drafter = train(untrained)
    assert not torch.allclose(law(drafter), before, atol=1e-3), "training changes something"
    folder = save_drafter(drafter, tmp_path / "drafter", {"run": "a"})
    assert sorted(f.name for f in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "config.json",
    ]  # fmt: skip
    merged = load_drafter(folder, verifier)
    assert merged.config == drafter.config and not merged.training and not has_lora(merged.model)
    assert not any(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(law(merged), law(drafter), rtol=1e-4, atol=1e-5)
    again = load_drafter(folder, verifier, trainable=True)
    assert torch.equal(law(again), law(drafter)), "not merged: the same to the bit"
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in drafter.named_parameters() if p.requires_grad
    }


def test_what_the_folder_says(trained: MaskedLMDrafter, saved: Path, dream: Path, verifier: HFVerifier) -> None:
    record = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    assert (record["format"], record["format_version"]) == ("specdiff2-masked-lm", 1)
    assert record["weights"]["dtype"] == "torch.float32" and len(record["weights"]["sha256"]) == 64
    kept = record["drafter"]
    assert kept["base_name"] == str(dream) and kept["base_fingerprint"] == trained.base.fingerprint
    assert kept["verifier_fingerprint"] == verifier.fingerprint and kept["gamma"] == 4 and kept["lora"] == LORA
    assert kept["attention"] == "bidirectional" and kept["mask_token_id"] == trained.base.mask_token_id
    config = read_drafter_config(saved)
    assert isinstance(config, MaskedLMConfig) and config == trained.config and config.to_dict() == kept
    assert read_training_info(saved) == {"run": "train/a", "step": 3}
    assert set(load_file(saved / "adapter_model.safetensors")) == set(
        f"base_model.model.model.layers.{i}.{part}.lora_{side}.weight"
        for i in range(2)
        for part in [f"self_attn.{n}" for n in TARGETS[:4]] + [f"mlp.{n}" for n in TARGETS[4:]]
        for side in "AB"
    ), "nothing of the base"


def test_a_drafter_with_another_tokenizer_comes_back(dream: Path, tmp_path: Path) -> None:
    verifier = tiny_verifier(vocab=300, tokenizer=byte_tokenizer())
    drafter = train(make_drafter(dream, verifier))
    assert drafter.config.other_tokenizer
    loaded = load_drafter(save_drafter(drafter, tmp_path / "drafter"), verifier)
    assert loaded.config == drafter.config and loaded.vocab_size != verifier.vocab_size
    torch.testing.assert_close(logits(loaded.model), logits(drafter.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
def test_peft_reads_the_adapter(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / family, family)
    drafter = train(make_drafter(source, make_verifier(tmp_path / "tokenizer", family)))
    folder = save_drafter(drafter, tmp_path / "drafter")
    model = load_family_model(source, dtype="float32").model
    plain = logits(model)
    theirs = PeftModel.from_pretrained(model, folder).eval()
    assert torch.equal(logits(theirs), logits(drafter.model)) and not torch.equal(logits(theirs), plain)
    torch.testing.assert_close(logits(theirs.merge_and_unload()), logits(load_merged(folder)), rtol=1e-4, atol=1e-5)


def load_merged(folder: Path) -> torch.nn.Module:
    return masked_lm_files.load_merged_model(folder, torch.float32).model


def test_going_on_with_training_goes_on_from_the_same_numbers(
    trained: MaskedLMDrafter, saved: Path, verifier: HFVerifier
) -> None:
    again, twin = load_drafter(saved, verifier, trainable=True), copy.deepcopy(trained)
    torch.manual_seed(5)
    train(twin, 2)
    torch.manual_seed(5)
    train(again, 2)
    assert torch.equal(law(again), law(twin)) and not torch.equal(law(again), law(trained))


@pytest.mark.parametrize("trainable", [False, True])
def test_dtypes(dream: Path, tmp_path: Path, trainable: bool) -> None:
    verifier = make_verifier(tmp_path / "tokenizer", "dream", dtype=torch.bfloat16)
    drafter = train(make_drafter(dream, verifier, dtype="bfloat16"))
    folder = save_drafter(drafter, tmp_path / "drafter")
    assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {torch.float32}
    loaded = load_drafter(folder, verifier, trainable=trainable)
    adapters = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert bool(adapters) == trainable and all(p.dtype == torch.float32 for p in adapters.values())
    assert all(p.dtype == torch.bfloat16 for n, p in loaded.named_parameters() if n not in adapters)
    assert loaded.stack.rotary_emb.inv_freq.dtype == torch.float32, "rounded frequencies misplace distant tokens"
    torch.testing.assert_close(law(loaded), law(drafter), rtol=0.1, atol=0.05)
    wide = load_drafter(folder, verifier, torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16])
def test_the_merge_rounds_once(tmp_path: Path, stored_dtype: torch.dtype) -> None:
    dream = write_checkpoint(tmp_path / "base", "dream", dtype=stored_dtype)
    verifier = make_verifier(tmp_path / "tokenizer", "dream", dtype=torch.bfloat16)
    drafter = train(make_drafter(dream, verifier, dtype="bfloat16"))
    loaded = load_drafter(save_drafter(drafter, tmp_path / "drafter"), verifier)
    stored = load_family_model(dream, dtype="float32").model.get_submodule("model.layers.1.mlp.down_proj").weight
    layer = drafter.model.get_submodule("model.layers.1.mlp.down_proj")
    delta = 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    found = loaded.model.get_submodule("model.layers.1.mlp.down_proj").weight
    assert torch.equal(found, (stored + delta).bfloat16())
    assert not torch.equal(found, stored.bfloat16() + delta.bfloat16()), "a merge in bfloat16 would differ"


def test_a_bf16_drafter_is_packed_and_not_while_training(dream: Path, tmp_path: Path) -> None:
    if not _available():
        pytest.skip("this CPU packs nothing")
    verifier = make_verifier(tmp_path / "tokenizer", "dream", dtype=torch.bfloat16)
    folder = save_drafter(make_drafter(dream, verifier, dtype="bfloat16"), tmp_path / "drafter")
    linears = [m for m in load_drafter(folder, verifier).modules() if isinstance(m, torch.nn.Linear)]
    assert linears and all(type(module) is PackedLinear for module in linears)
    assert not any(type(m) is PackedLinear for m in load_drafter(folder, verifier, trainable=True).modules())


@pytest.mark.parametrize("trainable", [False, True])
def test_loading_leaves_the_global_rng_untouched(saved: Path, verifier: HFVerifier, trainable: bool) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_drafter(saved, verifier, trainable=trainable)
    assert torch.equal(torch.rand(1), expected)


# ---------------------------------------------------------------- all weights trained
@pytest.mark.parametrize("family", ["dream", "llada"])
@pytest.mark.parametrize("shard_bytes", [10**9, 60_000])
def test_full_fine_tuning(family: str, shard_bytes: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(masked_lm_files, "MAX_SHARD_BYTES", shard_bytes)
    source = write_checkpoint(tmp_path / family, family, tie_word_embeddings=family == "dream")
    verifier = make_verifier(tmp_path / "tokenizer", family)
    drafter = train(make_drafter(source, verifier, lora=None))
    folder = save_drafter(drafter, tmp_path / "drafter")
    names = {f.name for f in folder.iterdir()}
    if shard_bytes == 10**9:
        assert names == {"config.json", "model.safetensors"}
    else:
        assert len(names) > 3 and "model.safetensors.index.json" in names
    loaded = load_drafter(folder, verifier)
    assert torch.equal(law(loaded), law(drafter)) and not any(p.requires_grad for p in loaded.parameters())
    again = load_drafter(folder, verifier, trainable=True)
    assert torch.equal(law(again), law(drafter)) and all(p.requires_grad for p in again.parameters())


def test_a_missing_shard(dream: Path, verifier: HFVerifier, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(masked_lm_files, "MAX_SHARD_BYTES", 60_000)
    folder = save_drafter(make_drafter(dream, verifier, lora=None), tmp_path / "drafter")
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(CorruptFileError, match="SHA-256"):
        load_drafter(folder, verifier)


def test_all_weights_go_on_in_float32(dream: Path, tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "tokenizer", "dream", dtype=torch.bfloat16)
    folder = save_drafter(make_drafter(dream, verifier, lora=None), tmp_path / "drafter")
    assert load_drafter(folder, verifier, trainable=True).dtype == torch.float32
    assert load_drafter(folder, verifier).dtype == torch.bfloat16


# ---------------------------------------------------------------- the base
def test_another_base_is_refused_naming_both(saved: Path, dream: Path, verifier: HFVerifier, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "dream", seed=9)
    with pytest.raises(MismatchError, match=rf"for base {dream} \(\w+\), got base {other} \(\w+\)"):
        load_drafter(saved, verifier, source=other)


def test_one_changed_weight_of_the_base_is_refused(saved: Path, dream: Path, verifier: HFVerifier, tmp_path) -> None:
    other = Path(shutil.copytree(dream, tmp_path / "moved"))
    assert torch.equal(law(load_drafter(saved, verifier, source=other)), law(load_drafter(saved, verifier)))
    shard = next(other.glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name][3, 5] += 0.5
    save_file(tensors, shard)
    with pytest.raises(MismatchError, match="got base"):
        load_drafter(saved, verifier, source=other)


def test_a_base_of_another_family_is_refused(saved: Path, verifier: HFVerifier, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "fast_dllm_v2")
    with pytest.raises(MismatchError, match="for base family dream, got base family fast_dllm_v2"):
        load_drafter(saved, verifier, source=other)
    rewrite(saved, family="fast_dllm_v2")
    with pytest.raises(MismatchError, match="for base family fast_dllm_v2, got base family dream"):
        load_drafter(saved, verifier)


def test_another_mask_id_is_refused(saved: Path, verifier: HFVerifier, trained: MaskedLMDrafter) -> None:
    rewrite(saved, mask_token_id=7)
    with pytest.raises(MismatchError, match=f"mask id 7, got mask id {trained.base.mask_token_id}"):
        load_drafter(saved, verifier)


def test_another_tokenizer_of_the_base_is_refused(saved: Path, verifier: HFVerifier) -> None:
    rewrite(saved, drafter_tokenizer_fingerprint="0" * 32)
    with pytest.raises(MismatchError, match="for base tokenizer 0000"):
        load_drafter(saved, verifier)


def test_a_base_that_is_gone(saved: Path, verifier: HFVerifier, tmp_path: Path) -> None:
    rewrite(saved, base_name=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"its base cannot be loaded.*nowhere.*source=FOLDER"):
        load_drafter(saved, verifier)


# ---------------------------------------------------------------- the verifier
def test_another_verifier_of_the_same_tokenizer_is_served_and_told(
    saved: Path, trained: MaskedLMDrafter, verifier: HFVerifier, tmp_path: Path, caplog
) -> None:
    other = make_verifier(tmp_path / "tokenizer", "dream", seed=4)
    other.name = "another-model"
    assert other.fingerprint != verifier.fingerprint
    with caplog.at_level(logging.INFO):
        loaded = load_drafter(saved, other)
    told = [r.levelname for r in caplog.records if "tiny-qwen2" in r.message and "another-model" in r.message]
    assert told == ["INFO"]
    torch.testing.assert_close(law(loaded), law(trained), rtol=1e-4, atol=1e-5)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load_drafter(saved, verifier)
    assert not caplog.records


def test_another_tokenizer_of_the_verifier_is_refused(saved: Path, verifier: HFVerifier) -> None:
    other = tiny_verifier(vocab=512, tokenizer=byte_tokenizer(), vocab_size=verifier.vocab_size)
    with pytest.raises(MismatchError, match="was trained for tokenizer"):
        load_drafter(saved, other)


# ---------------------------------------------------------------- damaged files
@pytest.mark.parametrize("change", ["missing", "renamed", "misshapen", "one more"])
def test_tensors_that_do_not_fit_are_refused(saved: Path, verifier: HFVerifier, change: str) -> None:
    tensors = load_file(saved / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    tensor = tensors[name]
    if change in ("missing", "renamed"):
        del tensors[name]
    if change in ("renamed", "one more"):
        tensors[name.replace("up_proj", "other")] = tensor.clone()
    if change == "misshapen":
        tensors[name] = tensor[:2].contiguous()
    rewrite_weights(saved, tensors)
    expected = "mlp.other.lora_A.weight is unknown" if change == "one more" else f"{name} (is missing|has shape)"
    with pytest.raises(MismatchError, match=expected):
        load_drafter(saved, verifier)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "adapter_model.safetensors"])
def test_missing_files(saved: Path, verifier: HFVerifier, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CorruptFileError, match=rf"{name} does not exist; expected a folder written by save_drafter"):
        load_drafter(saved, verifier)


def test_one_flipped_bit_and_a_truncated_file(saved: Path, verifier: HFVerifier) -> None:
    path = saved / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(data[:-40]))
    with pytest.raises(CorruptFileError, match="not a complete safetensors file"):
        load_drafter(saved, verifier)
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match="SHA-256"):
        load_drafter(saved, verifier)


@pytest.mark.parametrize(("key", "value"), [("r", 4), ("lora_alpha", 3), ("target_modules", ["q_proj"])])
def test_peft_and_we_must_be_told_the_same(saved: Path, verifier: HFVerifier, key: str, value) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CorruptFileError, match=f"adapter_config.json: {key} is not"):
        load_drafter(saved, verifier)


def test_damaged_configs(saved: Path, verifier: HFVerifier) -> None:
    (saved / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"adapter_config.json: not valid JSON"):
        load_drafter(saved, verifier)
    rewrite(saved, gamma=0)
    with pytest.raises(ConfigError, match="gamma=0"):
        load_drafter(saved, verifier)
    rewrite(saved, gamma=4, gama=4)
    with pytest.raises(CorruptFileError, match="gama"):
        read_drafter_config(saved)
    path = saved / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(MismatchError, match="format_version=2, expected 1"):
        load_drafter(saved, verifier)


# ---------------------------------------------------------------- saving is all or nothing
def test_a_newer_drafter_replaces_an_older_one_of_either_kind(
    trained: MaskedLMDrafter, saved: Path, dream: Path, verifier: HFVerifier
) -> None:
    save_drafter(make_drafter(dream, verifier, lora=None), saved, {"step": 4})
    assert sorted(f.name for f in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [f.name for f in saved.parent.iterdir()] == ["drafter"]
    save_drafter(trained, saved)
    torch.testing.assert_close(law(load_drafter(saved, verifier)), law(trained), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("failing", ["save_file", "_swap_in"])
def test_a_full_disk_leaves_the_old_drafter(
    trained: MaskedLMDrafter, saved: Path, verifier: HFVerifier, monkeypatch, failing: str
) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = law(load_drafter(saved, verifier))
    monkeypatch.setattr(masked_lm_files if failing == "save_file" else safe_folder, failing, full)
    with pytest.raises(SpecDiffError, match="No space left on device; what was there before is untouched"):
        save_drafter(train(copy.deepcopy(trained)), saved)
    monkeypatch.undo()
    assert torch.equal(law(load_drafter(saved, verifier)), before)
    assert [f.name for f in saved.parent.iterdir()] == ["drafter"], "nothing half-written is left behind"


def test_diverged_weights_are_not_saved(trained: MaskedLMDrafter, saved: Path) -> None:
    broken = copy.deepcopy(trained)
    next(p for p in broken.parameters() if p.requires_grad).data[0, 0] = float("nan")
    before = (saved / "adapter_model.safetensors").read_bytes()
    with pytest.raises(SpecDiffError, match=r"lora_A.weight holds NaN"):
        save_drafter(broken, saved)
    assert (saved / "adapter_model.safetensors").read_bytes() == before


def test_a_merged_drafter_is_copied_not_saved_again(saved: Path, verifier: HFVerifier, tmp_path: Path) -> None:
    merged = load_drafter(saved, verifier)
    with pytest.raises(ConfigError, match=r"no layer of the model has an adapter.*trainable=True"):
        save_drafter(merged, tmp_path / "again")
    copied = copy_drafter(saved, tmp_path / "again")
    assert torch.equal(law(load_drafter(copied, verifier)), law(merged))
    again = save_drafter(load_drafter(saved, verifier, trainable=True), tmp_path / "again", {"step": 9})
    assert (again / "adapter_model.safetensors").read_bytes() == (saved / "adapter_model.safetensors").read_bytes()
