"""One verifier split over two processes (``tp_plan``, gloo on the CPU) says what the whole one says.

The two ranks are started by ``torchrun``, as a user would. Run as a script, this file is one of them:
``torchrun --nproc-per-node 2 test_tensor_parallel.py MODELS_FOLDER OUT_FOLDER``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import RandomDrafter, byte_tokenizer, tiny_llama, tiny_qwen2

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[1, 5, 9, 33, 20], [7, 7, 8]]
MODELS = {"llama": tiny_llama, "qwen2": tiny_qwen2}  # qwen2: biases in the projections


def everything(verifier: HFVerifier) -> dict[str, Any]:
    """What a verifier decodes and samples, and what it is."""
    tree = SpeculativeDecoder(verifier, RandomDrafter(verifier.vocab_size), rule=make_rule("tree_match"), num_drafts=3)
    decoders = {"alone": AutoregressiveDecoder(verifier), "tree": tree}
    found: dict[str, Any] = {
        name: [decoder.generate(prompt, max_new_tokens=24, rng=TorchRandomSource(3)).tokens for prompt in PROMPTS]
        for name, decoder in decoders.items()
    }
    found["batch"] = [done.tokens for done in tree.generate_batch(PROMPTS, max_new_tokens=24)]
    generator = torch.Generator().manual_seed(5)
    found["sampled"] = verifier.sample_batch(PROMPTS, SamplingParams(temperature=1.0), 12, generator)
    found["fingerprint"] = verifier.fingerprint
    return found


def share(verifier: HFVerifier) -> dict[str, Any]:
    """What one rank holds of a split verifier, and what it refuses to do with it."""
    verifier.move_to("meta")  # stays where and as it is
    weight = verifier.model.model.layers[0].self_attn.q_proj.weight.to_local()
    found = {"ranks": verifier.num_ranks, "local_shape": list(weight.shape), "device": str(weight.device)}
    found["cache_shape"] = list(verifier.allocate_cache(1, 8).layers[0].keys.shape)
    try:
        BorrowedEmbeddings(verifier.model, torch.arange(4))
    except ConfigError as error:
        found["borrowed"] = str(error)
    return found


def as_rank(source: Path, out: Path) -> None:
    """One process of ``torchrun``: writes what it found."""
    record: dict[str, Any] = {}
    for family in MODELS:
        verifier = HFVerifier.from_pretrained(str(source / family), dtype="float32", tp_plan="auto")
        record[family] = everything(verifier) | {"share": share(verifier)}
        verifier.release()
    try:
        HFVerifier.from_pretrained(str(source / "one_head"), dtype="float32", tp_plan="auto")
    except ConfigError as error:
        record["one_head"] = str(error)
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(record), encoding="utf-8")
    torch.distributed.destroy_process_group()


def save(folder: Path, family: str, **changes: Any) -> None:
    model = MODELS[family](320, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a fresh model
            parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The models, and what the two ranks found: both are started once for all tests here."""
    source, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    for family in MODELS:
        save(source / family, family)
    save(source / "one_head", "llama", num_key_value_heads=1)
    done = torchrun(__file__, str(source), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return source, [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(MODELS))
def test_two_ranks_decode_and_sample_like_the_whole_model(ranks, family):
    source, found = ranks
    whole = HFVerifier.from_pretrained(str(source / family), dtype="float32", device="cpu")
    expected = everything(whole)
    assert expected["tree"] == expected["batch"] == expected["alone"]
    for rank in found:
        assert {name: rank[family][name] for name in expected} == expected
        own = rank[family]["share"]
        assert (own["ranks"], own["device"]) == (2, "cpu")
        assert own["local_shape"] == [16, 32] and own["cache_shape"] == [1, 1, 8, 8]  # half of 4 heads, of 2 heads
        assert "spread over devices or processes" in own["borrowed"]
    assert found[0]["llama"]["fingerprint"] != found[0]["qwen2"]["fingerprint"]


@pytest.mark.slow
def test_heads_that_cannot_be_shared_are_refused_by_every_rank(ranks):
    for rank in ranks[1]:
        assert "num_key_value_heads=1, which 2 processes cannot share evenly" in rank["one_head"]


@pytest.mark.slow
def test_eval_under_torchrun_writes_and_says_everything_once(ranks, tmp_path):
    """The command of the README, killed after its first record and continued."""
    questions, run = tmp_path / "q.jsonl", tmp_path / "out" / "eval" / "r"
    questions.write_text('{"question": "42 apples"}\n{"question": "the rest"}\n', encoding="utf-8")
    arguments = [
        str(ROOT / "eval.py"), "verifier=hf", f"verifier.source={ranks[0] / 'llama'}", "verifier.dtype=float32",
        "verifier.tp_plan=auto", "sampler=hf_prompt_lookup", "benchmark=jsonl", f"benchmark.path={questions}",
        "benchmark.prompt_field=question", "max_new_tokens=8", f"paths.outputs={tmp_path / 'out'}", "run_id=r",
        f"paths.cache={tmp_path / 'cache'}", "threads=1", "num_warmup=0",
    ]  # fmt: skip
    first = torchrun(*arguments)
    assert first.returncode == 0, first.stderr[-3000:]
    assert first.stdout.count("lossless check at T=0: 2 of 2 outputs equal") == 1
    records = (run / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(records) == 4
    (run / "records.jsonl").write_text(records[0] + "\n" + records[1][:20], encoding="utf-8")
    (run / "status.json").unlink()
    second = torchrun(*arguments)
    assert second.returncode == 0, second.stderr[-3000:]
    again = (run / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert again[0] == records[0]
    assert [json.loads(line)["tokens"] for line in again] == [json.loads(line)["tokens"] for line in records]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_plan": "auto"}, r"torchrun --nproc-per-node \d+ \S+ \.\.\. \(or set verifier.device_map=auto"),
        ({"tp_plan": "columns"}, "tp_plan='columns': expected null, auto, or"),
        ({"tp_plan": "auto", "device_map": "auto"}, "both set: choose one"),
        (
            {"tp_plan": "auto", "device": "cpu"},
            "device='cpu' and tp_plan='auto': expected device=auto",
        ),
    ],
)
def test_a_single_process_is_told_the_command(options, message, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=message):
        HFVerifier.from_pretrained("/nowhere", **options)


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
