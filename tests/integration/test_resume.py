"""Checkpoints and exact resume. Cases 26 and 27."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_training import GAMMA, make_drafter, resumable_run

from specdiff2.training.checkpointing import CONFIG_KEYS, signature_of, verify_signature
from specdiff2.types import MismatchError


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    recorder, module = resumable_run(folder, 12)
    return folder, recorder.steps, module.state_dict()


def test_resume_in_a_new_process_repeats_the_run(tmp_path, straight):
    """Case 27: 12 steps = 5 + resume + 7: rows, anchors, masks, learning rates, losses."""
    _, expected, _ = straight
    first, _ = resumable_run(tmp_path, 5)
    script = Path(__file__).parents[1] / "tiny_training.py"
    out = tmp_path / "resumed.json"
    arguments = [str(script), str(tmp_path / "step-5.ckpt"), str(tmp_path / "second"), str(out)]
    subprocess.run([sys.executable, *arguments], check=True)
    steps = first.steps + json.loads(out.read_text(encoding="utf-8"))
    assert len(expected) == len(steps) == 12
    for index, (one, two) in enumerate(zip(expected, steps, strict=True)):
        assert one["batches"] == two["batches"], index
        assert one["lr"] == two["lr"], index
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6), index
    assert len({step["lr"] for step in steps}) > 8 and len({json.dumps(step["batches"]) for step in steps}) == 12


def test_resume_at_the_last_step_and_in_the_middle_of_an_epoch(tmp_path, straight):
    folder, expected, weights = straight
    resumed, module = resumable_run(tmp_path, 12, checkpoint=str(folder / "step-10.ckpt"))
    assert [step["loss"] for step in resumed.steps] == pytest.approx([step["loss"] for step in expected[10:]], rel=1e-6)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, weights[name])


def test_checkpoint_is_plain_trainable_only_and_strict(tmp_path, straight):
    """Case 26; and a changed gamma is refused (27)."""
    folder, _, _ = straight
    path = folder / "step-10.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    verifier, drafter = make_drafter()
    assert set(checkpoint["state_dict"]) == {f"drafter.{name}" for name, _ in drafter.named_parameters()}
    lent = [verifier.model.get_input_embeddings().weight, verifier.model.get_output_embeddings().weight]
    for tensor in checkpoint["state_dict"].values():
        assert not any(tensor.shape == weight.shape and torch.equal(tensor, weight) for weight in lent)
    assert checkpoint["specdiff2"]["gamma"] == GAMMA
    assert checkpoint["specdiff2"]["schedule"][0]["objective"] == "Mdm()"
    assert checkpoint["specdiff2"]["verifier_fingerprint"] == verifier.fingerprint
    with pytest.raises(MismatchError, match="gamma"):
        resumable_run(tmp_path, 12, checkpoint=str(path), gamma=GAMMA + 1)
    key = next(key for key in checkpoint["state_dict"] if key.endswith("mask_embedding"))
    checkpoint["state_dict"][key + "_renamed"] = checkpoint["state_dict"].pop(key)
    torch.save(checkpoint, tmp_path / "renamed.ckpt")
    with pytest.raises(MismatchError, match="mask_embedding"):
        resumable_run(tmp_path, 12, checkpoint=str(tmp_path / "renamed.ckpt"))


@pytest.mark.parametrize(
    "change", [{"shifted": True}, {"attention": "bidirectional"}, {"denoising_steps": 2}, {"markov_rank": 3}]
)
def test_a_checkpoint_of_another_window_layout_is_refused(change):
    _, drafter = make_drafter()
    recorded = signature_of(drafter)
    verify_signature(drafter, recorded)
    verify_signature(drafter, {key: value for key, value in recorded.items() if key not in CONFIG_KEYS})  # an older one
    with pytest.raises(MismatchError, match=next(iter(change))):
        verify_signature(make_drafter(**change)[1], recorded)
