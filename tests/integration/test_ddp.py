"""Two DDP ranks on the CPU (gloo). Cases 22 and 24.

All runs happen in one child process that forks its two ranks, so that torch is imported once. Run as a script, this
file is that child: ``python test_ddp.py OUT_FOLDER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_training import GAMMA, language, make_drafter, make_module, make_trainer

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.windows import WindowCollator
from specdiff2.objectives import CrossEntropy, ObjectiveSchedule, Streak
from specdiff2.training.callbacks import StreakMonitor
from specdiff2.types import WindowBatch

pytestmark = pytest.mark.distributed
SGD = partial(torch.optim.SGD, lr=1.0)


class SaveAtEnd(pl.Callback):
    """Weights, metrics and the batches seen, one file per rank."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.seen = folder, name, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append([batch.input_ids.tolist(), batch.anchor.tolist(), batch.revealed.tolist()])

    def on_train_end(self, trainer, module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record = {"weights": module.state_dict(), "metrics": metrics, "seen": self.seen, "steps": trainer.global_step}
        torch.save(record, self.folder / f"{self.name}-{trainer.global_rank}.pt")


def collate(rollouts) -> WindowBatch:
    return WindowCollator(GAMMA, 100)(rollouts, (0, 0))


class ByRank(pl.LightningDataModule):
    """One list of batches per rank."""

    def __init__(self, *batches: list[WindowBatch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        return DataLoader(self.batches[self.trainer.global_rank if len(self.batches) > 1 else 0], batch_size=None)


def without_windows(batch: WindowBatch) -> WindowBatch:
    return WindowBatch(
        batch.input_ids,
        batch.lengths,
        batch.window_row[:0],
        batch.anchor[:0],
        batch.targets[:0],
        batch.valid[:0],
        batch.revealed[:0],
    )


def fit(folder: Path, name: str, data, *, max_steps: int, ranks: int, objective=None, callbacks=(), **options) -> None:
    verifier, drafter = make_drafter(torch.float64)
    module = make_module(ObjectiveSchedule.single(objective or CrossEntropy()), SGD, None, verifier, drafter)
    ddp = dict(strategy="ddp_fork", devices=2) if ranks == 2 else {}
    trainer = make_trainer(
        folder, max_steps=max_steps, callbacks=[*callbacks, SaveAtEnd(folder, name)], **ddp, **options
    )
    trainer.fit(module, data)


def child(folder: Path) -> None:
    torch.set_num_threads(1)
    short, long = language([3, 30])
    one, two = collate([short]), collate([long])
    fit(folder, "uneven", ByRank([one], [two]), max_steps=1, ranks=2, objective=Streak())
    fit(folder, "unusable", ByRank([one, two], [without_windows(one)] * 2), max_steps=2, ranks=2)
    data = RolloutDataModule(
        language([5, 9, 7]), language([6, 8, 4]), gamma=GAMMA, batch_size=1, windows_per_rollout=2, masking="random"
    )
    monitor = StreakMonitor(every_n_steps=2)
    fit(folder, "odd", data, max_steps=4, ranks=2, callbacks=[monitor])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


def assert_equal_weights(one, two, tolerance=1e-6):
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=tolerance, rtol=0)


def test_two_ranks_with_3_and_30_tokens_equal_one_batch(tmp_path, runs):
    """Case 22: SGD with rate 1, so equal weights are equal gradients."""
    batch = collate(language([3, 30]))
    fit(tmp_path, "whole", ByRank([batch]), max_steps=1, ranks=1, objective=Streak())
    whole = torch.load(tmp_path / "whole-0.pt", weights_only=True)
    assert_equal_weights(whole["weights"], runs["uneven-0"]["weights"])
    assert_equal_weights(runs["uneven-0"]["weights"], runs["uneven-1"]["weights"], 0.0)
    for name in ("train/loss", "train/streak", "train/num_windows"):
        assert whole["metrics"][name] == pytest.approx(runs["uneven-0"]["metrics"][name], rel=1e-6)


def test_a_rank_with_only_unusable_rows_adds_nothing(tmp_path, runs):
    """Case 24: both ranks finish, and the result is that of the usable rows alone."""
    short, long = language([3, 30])
    fit(tmp_path, "alone", ByRank([collate([short]), collate([long])]), max_steps=2, ranks=1)
    alone = torch.load(tmp_path / "alone-0.pt", weights_only=True)
    assert runs["unusable-0"]["steps"] == runs["unusable-1"]["steps"] == 2
    assert_equal_weights(alone["weights"], runs["unusable-0"]["weights"])
    assert_equal_weights(runs["unusable-0"]["weights"], runs["unusable-1"]["weights"], 0.0)
    assert runs["unusable-0"]["metrics"]["train/empty_batches"] == 1


def test_odd_number_of_rollouts_finishes_with_different_windows_everywhere(runs):
    """Case 24: three rollouts on two ranks; rows, anchors and masks differ by rank and by step."""
    first, second = runs["odd-0"], runs["odd-1"]
    assert first["steps"] == second["steps"] == 4
    assert len({str(batch) for batch in first["seen"] + second["seen"]}) == 8
    # held-out metrics are reduced over ranks
    assert first["metrics"]["val/streak"] == second["metrics"]["val/streak"]
    assert_equal_weights(first["weights"], second["weights"], 0.0)


if __name__ == "__main__":
    child(Path(sys.argv[1]))
