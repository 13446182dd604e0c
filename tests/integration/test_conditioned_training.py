"""train.py and eval.py with a conditioned drafter: contexts kept on disk, resume, start_from, a grown tree, refusals.

The older kind of drafter, with a prefix of its own, goes the same way at the end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from entry_runs import Options, evaluate_here, metric, strict_json, train_here
from helpers import char_tokenizer, tiny_llama
from safetensors.torch import load_file

from specdiff2.data.context_memory import ContextMemory
from specdiff2.models.pretrained import read_drafter_config
from specdiff2.models.verifier_context import ContextSource
from specdiff2.types import ConfigError, MismatchError

CONDITIONED = ["model.conditioning=verifier_kv", "model.markov_rank=4", "model.layer_indices=[1]", "model.num_layers=1"]
PER_STEP = "callbacks.checkpoint.save_top_k=-1"  # keeps the checkpoint in the middle of the run
TREE = ["sampler=tree", "~sampler.K", "sampler.num_nodes=6"]  # experiment=tiny sets K, which a grown tree has not
QUIET = ["callbacks.decoding_probe=null", "publish=false"]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    run_script: Callable[..., subprocess.CompletedProcess[str]],
    tiny_options: Options,
) -> Path:
    """A folder in which ``python train.py`` has run (run_id a)."""
    folder = tmp_path_factory.mktemp("conditioned")
    done = run_script("train.py", *tiny_options["train"], *CONDITIONED, PER_STEP, "run_id=a", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "input regressed on" in done.stdout + done.stderr
    return folder


@pytest.fixture
def computed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the rollouts that the verifier has computed a context of, in runs in the folder ``trained``."""
    lengths: list[int] = []
    original = ContextSource.compute

    def spy(self: ContextSource, ids: list[int]) -> torch.Tensor:
        lengths.append(len(ids))
        return original(self, ids)

    monkeypatch.setattr(ContextSource, "compute", spy)
    monkeypatch.chdir(trained)
    return lengths


def test_the_first_run_keeps_a_context_of_every_rollout_it_has_seen(trained: Path) -> None:
    (folder,) = (trained / ".cache/contexts").iterdir()
    origin = strict_json(folder / "origin.json")
    assert origin["layer_indices"] == [1] and origin["dtype"] == "torch.float32"
    assert len(ContextMemory(folder, origin)) == 5 + 3  # rollouts to train on, held-out ones
    config = read_drafter_config(trained / "outputs/train/a/drafter/best")
    assert (config.conditioning, config.markov_rank, config.layer_indices) == ("verifier_kv", 4, [1])
    names = set(load_file(trained / "outputs/train/a/drafter/best/model.safetensors"))
    assert {"markov.token_out", "context_input.anchor.weight"} <= names and "mask_embedding" not in names
    assert metric(trained / "outputs/train/a", "probe/mean_streak")


def test_a_second_run_computes_nothing_and_repeats_the_first(
    trained: Path, computed: list[int], tiny_options: Options, tmp_path: Path
) -> None:
    run = train_here(tiny_options, tmp_path / "again", *CONDITIONED, *QUIET)
    assert computed == []
    losses = metric(trained / "outputs/train/a", "train/loss")
    assert len(losses) == 8 and metric(run, "train/loss") == pytest.approx(losses, rel=1e-5)
    train_here(tiny_options, tmp_path / "other", *CONDITIONED, *QUIET, "model.feature_layers=[2]", "max_steps=5")
    assert computed, "other layers are another memory, and the spy sees what is computed"


def test_resume_repeats_the_run(trained: Path, computed: list[int], tiny_options: Options, tmp_path: Path) -> None:
    middle = "resume=outputs/train/a/checkpoints/step-4.ckpt"
    run = train_here(tiny_options, tmp_path / "r", *CONDITIONED, *QUIET, middle)
    straight = trained / "outputs/train/a"
    assert computed == [] and len(set(metric(straight, "train/loss"))) == 8
    for name in ("train/loss", "val/streak"):
        assert metric(run, name) == pytest.approx(metric(straight, name), rel=1e-5)
    no_verifier = "verifier.source=/nowhere"  # refused before a model loads
    for change, name in (("model.markov_rank=3", "markov_rank=4"), ("model.conditioning=none", "conditioning=")):
        with pytest.raises(MismatchError, match=name):
            train_here(tiny_options, tmp_path / "s", *CONDITIONED, *QUIET, middle, change, no_verifier)


def test_start_from_goes_on_with_the_weights_and_settings_of_a_drafter(
    trained: Path, computed: list[int], tiny_options: Options, tmp_path: Path
) -> None:
    best = trained / "outputs/train/a/drafter/best"
    # nothing of this section counts: the drafter is what it is
    ignored = ["model=smollm2_prefix", "model.gamma=2"]
    options = [*ignored, *QUIET, f"start_from={best}", "max_steps=5"]
    run = train_here(tiny_options, tmp_path / "f", *options)
    assert computed == []
    assert read_drafter_config(run / "drafter/best") == read_drafter_config(best)
    best_streak = max(metric(trained / "outputs/train/a", "val/streak_greedy")[2:])  # exported from step 4 on
    assert metric(run, "val/streak_greedy")[0] == pytest.approx(best_streak, rel=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (best, run / "drafter/last"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_start_from_a_drafter_of_another_verifier_is_refused_before_anything_is_sampled(
    trained: Path, tiny_options: Options, tmp_path: Path
) -> None:
    char_tokenizer(tmp_path / "other")
    other = tiny_llama(64, bos_token_id=1, eos_token_id=2, pad_token_id=0, seed=9)
    other.save_pretrained(tmp_path / "other")
    start = f"start_from={trained / 'outputs/train/a/drafter/best'}"
    source, root = f"verifier.source={tmp_path / 'other'}", f"paths.root={tmp_path}"
    with pytest.raises(MismatchError, match=r"trained for verifier .*, got verifier"):
        train_here(tiny_options, tmp_path / "run", start, source, root)
    assert not (tmp_path / "outputs/rollouts").exists()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_grown_tree_decodes_with_it(
    trained: Path, tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.chdir(trained)
    options = ["drafter=outputs/train/a/drafter/best", *TREE]
    run = evaluate_here(tiny_options, tmp_path, *options, f"verifier.temperature={temperature}")
    rows = strict_json(run / "summary.json")["rows"]
    assert [row["method"] for row in rows] == ["autoregressive", "tree"]
    assert rows[1]["gamma"] == 4 and rows[1]["num_prompts"] == 3
    if temperature == 0.0:
        assert rows[1]["lossless_check"]["identical"] == rows[1]["lossless_check"]["checked"] == 3


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["prefix_loss_weight=0.05"], r"prefix_loss_weight=0\.05.*model\.conditioning=verifier_kv"),
        (["model.attention=bidirectional"], "conditioning=verifier_kv.*'bidirectional'"),
        (["model.shifted=false"], "conditioning=verifier_kv.*shifted=False"),
        (["model.conditioning=kv"], "conditioning='kv'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_a_model_loads(
    tiny_options: Options, tmp_path: Path, overrides: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        train_here(tiny_options, tmp_path, *CONDITIONED, *overrides, "verifier.source=/nowhere")


def test_the_prefix_loss_is_that_of_the_drafter_to_start_from(
    trained: Path, tiny_options: Options, tmp_path: Path
) -> None:
    start = f"start_from={trained / 'outputs/train/a/drafter/best'}"
    with pytest.raises(ConfigError, match=r"prefix_loss_weight=0\.05"):
        train_here(tiny_options, tmp_path, start, "model=smollm2_prefix", "prefix_loss_weight=0.05")


# ---------------------------------------------------------------- a prefix of its own
def test_a_drafter_with_its_own_prefix_trains_and_decodes(
    trained: Path, computed: list[int], tiny_options: Options, tmp_path: Path
) -> None:
    run = train_here(tiny_options, tmp_path / "t", "model=smollm2_prefix", *QUIET)
    assert len(metric(run, "train/loss_prefix")) == 8 and computed == []
    drafter = run / "drafter/best"
    assert "mask_embedding" in load_file(drafter / "model.safetensors")
    done = evaluate_here(tiny_options, tmp_path / "e", f"drafter={drafter}", *TREE)
    check = strict_json(done / "summary.json")["rows"][1]["lossless_check"]
    assert check["identical"] == check["checked"] == 3
