"""Every family through train.py and eval.py: rollouts, 20 LoRA steps, resume, adapter, merge, export, decoding.

The checkpoints are tiny and random, in the layout that the authors publish (``family_checkpoints``); the verifier has
the tokenizer of the model that the family comes from.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from entry_runs import Options, evaluate_here, metric, strict_json, train_here
from family_checkpoints import write_checkpoint, write_parent_tokenizer
from helpers import tiny_llama, tiny_qwen2
from safetensors.torch import load_file

from specdiff2.models.families import FAMILIES
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.pretrained import load_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.export import main as export
from specdiff2.types import ConfigError, MismatchError, SamplingParams

NAMES = sorted(FAMILIES)
STEPS = 20


def write_verifier(folder: Path, family: str, seed: int = 5) -> Path:
    tokenizer = write_parent_tokenizer(folder, family)
    rows = max(tokenizer.get_vocab().values()) + 1
    build = tiny_qwen2 if FAMILIES[family].target == "qwen2" else tiny_llama
    model = build(rows, seed=seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, max_position_embeddings=512)
    model.save_pretrained(folder)
    return folder


class Pair:
    """One family: its checkpoint, a verifier, a finished training run."""

    def __init__(self, root: Path, family: str, prompts: Path, tokenizer_of: str | None = None) -> None:
        self.root, self.family = root, family
        self.base = write_checkpoint(root / "base", family)
        self.verifier = write_verifier(root / "verifier", tokenizer_of or family)
        model = [f"model.source={self.base}", "model=masked_lm", "model.gamma=4"]
        common = ["verifier=hf", f"verifier.source={self.verifier}", "verifier.dtype=float32", *model, "threads=1"]
        common += [f"paths.outputs={root}/outputs", f"paths.cache={root}/cache"]
        question = "prompt_field=question"
        train = [
            *common, "data=jsonl", f"data.train_prompts.path={prompts}", f"data.train_prompts.{question}",
            "data.train_prompts.skip=3", "data.val_prompts.limit=3", "data.rollouts.max_new_tokens=16",
            "data.module.batch_size=2", "data.module.windows_per_rollout=2", f"max_steps={STEPS}", "model.lora.rank=4",
            "trainer.precision=32-true", "trainer.accelerator=cpu", "callbacks.checkpoint.every_n_train_steps=10",
            "callbacks.streak_monitor.every_n_steps=10", "callbacks.decoding_probe.every_n_steps=20",
            "callbacks.decoding_probe.max_new_tokens=6", "num_probe_prompts=1", "trainer.log_every_n_steps=1",
            "optimizer.lr=5e-3",
        ]  # fmt: skip
        evaluate = [*common, "benchmark=jsonl", f"benchmark.path={prompts}", f"benchmark.{question}",
                    "benchmark.limit=2", "max_new_tokens=10", "sampler.K=2"]  # fmt: skip
        self.options: Options = {"train": train, "eval": evaluate}
        self.run = train_here(self.options, root / "run")

    @property
    def adapter(self) -> Path:
        return self.run / "drafter" / "last"


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prompt_file: Path) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param, prompt_file)


def test_training_lowers_the_loss_and_writes_an_adapter(pair: Pair) -> None:
    losses = metric(pair.run, "train/loss")
    assert len(losses) == STEPS and sum(losses[-5:]) < sum(losses[:5])
    record = strict_json(pair.adapter / "config.json")
    assert record["format"] == "specdiff2-masked-lm"
    drafter = record["drafter"]
    assert drafter["family"] == pair.family and drafter["gamma"] == 4 and drafter["base_name"] == str(pair.base)
    assert drafter["lora"]["rank"] == 4 and drafter["mask_token_id"] == load_family_model(pair.base).mask_token_id
    names = set(load_file(pair.adapter / "adapter_model.safetensors"))
    assert len(names) == 2 * 2 * 7 and all(".lora_A." in name or ".lora_B." in name for name in names)
    checkpoint = torch.load(pair.run / "checkpoints/last.ckpt", weights_only=True)
    assert all(".lora_" in name for name in checkpoint["state_dict"]), "a checkpoint holds the adapter alone"


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(pair: Pair, tmp_path: Path) -> None:
    halves = [*pair.options["train"], "scheduler=constant", "objective.warmup_steps=5", "publish=false",
              "callbacks.decoding_probe=null"]  # fmt: skip
    whole = train_here({"train": halves}, tmp_path / "whole")
    first = train_here({"train": halves}, tmp_path / "first", f"max_steps={STEPS // 2}")
    second = train_here({"train": halves}, tmp_path / "second", f"resume={first}")
    assert metric(second, "train/loss") == pytest.approx(metric(whole, "train/loss"), abs=1e-5)
    one, two = (load_file(run / "drafter/last/adapter_model.safetensors") for run in (whole, second))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.parametrize("attention", ["bidirectional", "causal_prefix"])
def test_eval_is_lossless_with_the_published_checkpoint(pair: Pair, attention: str, tmp_path: Path) -> None:
    """``drafter=shipped``: what the authors ship."""
    run = evaluate_here(pair.options, tmp_path / "run", f"model.attention={attention}")
    rows = strict_json(run / "summary.json")["rows"]
    method = next(row for row in rows if row["method"] == "specdiff2")
    assert method["lossless_check"]["identical"] == method["lossless_check"]["checked"] == 2


def test_eval_with_the_trained_adapter_and_from_python(pair: Pair, tmp_path: Path) -> None:
    run = evaluate_here(pair.options, tmp_path / "run", f"drafter={pair.adapter}", "sampler=tree_match")
    method = next(row for row in strict_json(run / "summary.json")["rows"] if row["method"] == "tree_match")
    assert method["lossless_check"]["identical"] == 2
    verifier = HFVerifier.from_pretrained(str(pair.verifier), dtype="float32")
    trained, again = load_drafter(pair.adapter, verifier), load_drafter(pair.adapter, verifier, trainable=True)
    start = [40, 41, 42]
    merged = trained.start(start, SamplingParams(temperature=0.0), 8).window_logits(4)
    apart = again.start(start, SamplingParams(temperature=0.0), 8).window_logits(4)
    assert float((merged - apart).abs().max()) < 1e-4, "merged weights compute what the adapter computes"


@pytest.mark.parametrize("layout", ["merged", "adapter", "family"])
def test_exports_compute_the_same(pair: Pair, layout: str, tmp_path: Path) -> None:
    out = tmp_path / layout
    assert export([str(pair.adapter), str(out), "--layout", layout, "--dtype", "float32"]) == 0
    verifier = HFVerifier.from_pretrained(str(pair.verifier), dtype="float32")
    drafter = load_drafter(pair.adapter, verifier)
    ids = torch.tensor([[40, 41, drafter.config.mask_token_id, 43]])
    expected = drafter.model(ids).logits
    if layout == "family":
        kept = json.loads((out / "config.json").read_text())
        assert kept.get("auto_map") == json.loads((pair.base / "config.json").read_text()).get("auto_map")
        found = load_family_model(out, family=pair.family, dtype="float32").model
    elif layout == "merged":
        from transformers import AutoModelForCausalLM

        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    elif pair.family == "llada":  # named as in the authors' class, which peft adapts there
        names = load_file(out / "adapter_model.safetensors")
        assert len(names) == 28 and all(".model.transformer.blocks." in name for name in names)
        return
    else:
        from peft import PeftModel

        found = PeftModel.from_pretrained(load_family_model(pair.base, dtype="float32").model, out).eval()
    with torch.no_grad():
        assert float((found(ids).logits - expected).abs().max()) < 1e-4


def test_training_goes_on_from_an_adapter(pair: Pair, tmp_path: Path) -> None:
    run = train_here(pair.options, tmp_path / "run", f"start_from={pair.adapter}", "max_steps=2", "publish=false")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (pair.adapter, run / "drafter/last"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    block = [option for option in pair.options["train"] if "model" not in option]
    with pytest.raises(ConfigError, match="another kind of drafter"):
        train_here({"train": block}, tmp_path / "other", f"start_from={pair.adapter}")


def test_another_base_is_refused(pair: Pair, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", pair.family, seed=9)
    verifier = HFVerifier.from_pretrained(str(pair.verifier), dtype="float32")
    with pytest.raises(MismatchError, match="base"):
        load_drafter(pair.adapter, verifier, source=other)


def test_all_weights_can_be_trained(pair: Pair, tmp_path: Path) -> None:
    options = [o for o in pair.options["train"] if not o.startswith("model.lora")]
    run = train_here({"train": options}, tmp_path / "run", "model.lora=null", "max_steps=3", "publish=false",
                     "optimizer.lr=1e-3")  # fmt: skip
    verifier = HFVerifier.from_pretrained(str(pair.verifier), dtype="float32")
    trained = load_drafter(run / "drafter/last", verifier)
    untrained = load_family_model(pair.base, dtype="float32").model
    names = [name for name, p in untrained.named_parameters() if not torch.equal(p, trained.model.get_parameter(name))]
    assert len(names) == len(list(untrained.named_parameters()))


# ---------------------------------------------------------------- another tokenizer
@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, prompt_file: Path) -> Pair:
    """LLaDA, with its own tokenizer, drafts for a verifier with that of LLaMA-2."""
    return Pair(tmp_path_factory.mktemp("foreign"), "llada", prompt_file, tokenizer_of="diffullama")


def test_a_drafter_with_another_tokenizer_trains_on_its_own_tokens(foreign: Pair) -> None:
    losses = metric(foreign.run, "train/loss")
    assert len(losses) == STEPS and sum(losses[-5:]) < sum(losses[:5])
    drafter = strict_json(foreign.adapter / "config.json")["drafter"]
    assert drafter["other_tokenizer"] and drafter["tokenizer_fingerprint"] != drafter["drafter_tokenizer_fingerprint"]
    with pytest.raises(ConfigError, match="objective=streak"):
        train_here(foreign.options, foreign.root / "probs", "objective=streak_expected", "publish=false")
    with pytest.raises(ConfigError, match="draft_vocab_size=null"):
        train_here(foreign.options, foreign.root / "size", "data.draft_vocab_size=50", "publish=false")


@pytest.mark.parametrize("sampler", ["specdiff", "specdiff2", "tree_match"])
def test_a_drafter_with_another_tokenizer_is_lossless(foreign: Pair, sampler: str, tmp_path: Path) -> None:
    options = [option for option in foreign.options["eval"] if not option.startswith("sampler.K")]
    run = evaluate_here({"eval": options}, tmp_path / "run", f"drafter={foreign.adapter}", f"sampler={sampler}")
    method = next(row for row in strict_json(run / "summary.json")["rows"] if row["method"] == sampler)
    assert method["lossless_check"]["identical"] == method["lossless_check"]["checked"] == 2


@pytest.mark.parametrize("sampler", ["block", "tree"])
def test_what_needs_the_drafters_law_refuses_another_tokenizer(foreign: Pair, sampler: str, tmp_path: Path) -> None:
    options = [option for option in foreign.options["eval"] if not option.startswith("sampler.K")]
    with pytest.raises(ConfigError):
        evaluate_here({"eval": options}, tmp_path / "run", f"sampler={sampler}")


# ---------------------------------------------------------------- as on a GPU: bfloat16 base, float32 adapter
def test_a_bfloat16_base_trains_a_float32_adapter(tmp_path_factory: pytest.TempPathFactory, prompt_file: Path) -> None:
    root = tmp_path_factory.mktemp("bf16")
    pair = Pair(root, "dream", prompt_file)
    changes = ["trainer.precision=bf16-mixed", "model.dtype=bfloat16", "publish=false", "callbacks.decoding_probe=null"]
    run = train_here(pair.options, root / "bf16", *changes)
    losses = metric(run, "train/loss")
    assert len(losses) == STEPS and sum(losses[-5:]) < sum(losses[:5])
    tensors = load_file(run / "drafter/last/adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    verifier = HFVerifier.from_pretrained(str(pair.verifier), dtype="bfloat16")
    drafter = load_drafter(run / "drafter/last", verifier)
    assert drafter.dtype == torch.bfloat16
    session = drafter.start([40, 41, 42], SamplingParams(temperature=0.0), 8)
    assert bool(torch.isfinite(session.window_logits(4)).all())
