"""train.py and eval.py with an EAGLE head: contexts, the regression's own curve, resume, start_from, publish, trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from entry_runs import Options, evaluate_here, metric, strict_json, train_here
from safetensors.torch import load_file

from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.pretrained import read_drafter_config
from specdiff2.types import ConfigError, MismatchError

EAGLE = ["model=smollm2_eagle", "model.num_layers=1", "model.gamma=3"]
PER_STEP = "callbacks.checkpoint.save_top_k=-1"  # keeps the checkpoint in the middle of the run
QUIET = ["callbacks.decoding_probe=null", "publish=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_options: Options) -> Path:
    """A folder in which a head has been trained (run ``a``) and published."""
    folder = tmp_path_factory.mktemp("eagle")
    train_here(tiny_options, folder / "outputs/train/a", *EAGLE, PER_STEP, f"paths.root={folder}")
    return folder


def test_the_run_trains_logs_both_losses_and_exports(trained: Path) -> None:
    run = trained / "outputs/train/a"
    total, feature = metric(run, "train/loss"), metric(run, "train/loss_feature")
    parts = metric(run, "train/loss_ce")[:4] + metric(run, "train/loss_streak")[-4:]
    assert len(total) == len(feature) == 8 and min(feature) > 0
    assert total == pytest.approx([part + f for part, f in zip(parts, feature, strict=True)], rel=1e-5)
    assert metric(run, "probe/mean_streak")
    config = read_drafter_config(trained / "outputs/drafters/smollm2_eagle/best")
    assert isinstance(config, EagleConfig) and (config.gamma, config.layer_indices) == (3, [1])
    names = set(load_file(trained / "outputs/drafters/smollm2_eagle/best/model.safetensors"))
    assert "fc.weight" in names and not any("embed" in name or "lm_head" in name for name in names)


def test_resume_repeats_the_run(trained: Path, tiny_options: Options, tmp_path: Path) -> None:
    middle = f"resume={trained / 'outputs/train/a/checkpoints/step-4.ckpt'}"
    run = train_here(tiny_options, tmp_path / "r", *EAGLE, *QUIET, middle, f"paths.root={trained}")
    straight = trained / "outputs/train/a"
    for name in ("train/loss", "train/loss_feature", "val/streak"):
        assert metric(run, name) == pytest.approx(metric(straight, name), rel=1e-5)
    with pytest.raises(MismatchError, match="gamma=3"):
        train_here(tiny_options, tmp_path / "s", *EAGLE, *QUIET, middle, "model.gamma=2", "verifier.source=/nowhere")


def test_start_from_goes_on_with_a_head_and_only_as_one(trained: Path, tiny_options: Options, tmp_path: Path) -> None:
    start = f"start_from={trained / 'outputs/drafters/smollm2_eagle/best'}"
    run = train_here(tiny_options, tmp_path / "f", *EAGLE, *QUIET, start, "max_steps=5", f"paths.root={trained}")
    before = max(metric(trained / "outputs/train/a", "val/streak_greedy")[2:])
    assert metric(run, "val/streak_greedy")[0] == pytest.approx(before, rel=1e-5)
    with pytest.raises(ConfigError, match="a Eagle, but model=smollm2_block"):
        train_here(tiny_options, tmp_path / "g", "model=smollm2_block", *QUIET, start, "verifier.source=/nowhere")


def test_without_the_regression_no_part_is_logged(trained: Path, tiny_options: Options, tmp_path: Path) -> None:
    off = ["model.feature_loss_weight=0", "max_steps=5", f"paths.root={trained}"]
    run = train_here(tiny_options, tmp_path / "o", *EAGLE, *QUIET, *off)
    assert metric(run, "train/loss") and not metric(run, "train/loss_feature")
    with pytest.raises(ConfigError, match="feature_loss_weight=-1"):
        train_here(tiny_options, tmp_path / "n", *EAGLE, *QUIET, "model.feature_loss_weight=-1", *off[1:])


@pytest.mark.parametrize("sampler", ["eagle", "eagle2", "specdiff", "leviathan"])
def test_the_trained_head_decodes(trained: Path, tiny_options: Options, tmp_path: Path, sampler: str) -> None:
    drafter = f"drafter={trained / 'outputs/drafters/smollm2_eagle/best'}"
    chain = sampler in ("specdiff", "leviathan")
    options = [f"sampler={sampler}", "sampler.K=1" if chain else "~sampler.K", "sampler.gamma=4"]
    run = evaluate_here(tiny_options, tmp_path, *EAGLE, drafter, *options)
    row = strict_json(run / "summary.json")["rows"][1]
    assert row["method"] == sampler and row["gamma"] == 4 and row["mean_streak"] > 0
    assert row["lossless_check"]["identical"] == row["lossless_check"]["checked"] == 3


def test_a_wrong_pair_is_refused(trained: Path, tiny_options: Options, tmp_path: Path) -> None:
    drafter = f"drafter={trained / 'outputs/drafters/smollm2_eagle/best'}"
    with pytest.raises(ConfigError, match=r"sampler tree.*EagleDrafter"):
        evaluate_here(tiny_options, tmp_path, *EAGLE, drafter, "sampler=tree", "~sampler.K")
    with pytest.raises(ConfigError, match=r"BlockDrafter.*smollm2_eagle"):
        evaluate_here(tiny_options, tmp_path, "drafter=untrained", "sampler=eagle", "~sampler.K")
