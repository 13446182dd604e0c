"""A complete tiny training set-up: random Llama verifier, two-layer drafter, rollouts of a learnable language.

Run as a script it resumes a checkpoint in a process of its own:
``python tiny_training.py CHECKPOINT RUN_FOLDER OUT.json``.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

sys.path.insert(0, str(Path(__file__).parent))

from helpers import tiny_verifier

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.objectives import CrossEntropy, Mdm, ObjectiveSchedule, Stage, Streak
from specdiff2.training.module import DistillationModule
from specdiff2.training.optim import warmup_cosine
from specdiff2.types import Rollout

VOCAB, GAMMA = 64, 4


def language(lengths: list[int], prompt_length: int = 3) -> list[Rollout]:
    """Completions that count upwards in steps of 3 from the last prompt token."""
    rollouts = []
    for index, length in enumerate(lengths):
        prompt = [(index * 7 + k) % VOCAB for k in range(prompt_length)]
        rollouts.append(Rollout(f"r{index}", prompt, [(prompt[-1] + 3 * (k + 1)) % VOCAB for k in range(length)], 1.0))
    return rollouts


def make_drafter(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, BlockDrafter]:
    verifier = tiny_verifier(VOCAB, dtype)
    return verifier, BlockDrafter.from_verifier(verifier, num_layers=2, gamma=GAMMA, dtype=dtype, **changes)


def make_module(
    schedule: ObjectiveSchedule,
    optimizer: Any = None,
    scheduler: Any = None,
    verifier: Any = None,
    drafter: Any = None,
    **options: Any,
) -> DistillationModule:
    if drafter is None:
        verifier, drafter = make_drafter()
    optimizer = optimizer or partial(torch.optim.AdamW, lr=5e-3)
    return DistillationModule(drafter, verifier, schedule, optimizer, scheduler, **options)


def make_trainer(folder: Any, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        max_epochs=-1,
    )
    return pl.Trainer(**(settings | options))


class Recorder(pl.Callback):
    """Everything that has to repeat on resume: rows, masks, learning rates, losses, one entry per optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._pending: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._pending.append([batch.input_ids.tolist(), batch.anchor.tolist(), batch.revealed.int().tolist()])
        if trainer.global_step == len(self.steps) + self.first_step:
            return
        metrics = trainer.callback_metrics
        self.steps.append(
            {
                "batches": self._pending,
                "lr": float(metrics["train/lr"]),
                "loss": float(metrics["train/loss"]),
            }
        )
        self._pending = []

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.first_step = trainer.global_step


def resumable_run(
    folder: Any, max_steps: int, *, checkpoint: str | None = None, gamma: int = GAMMA, every_n: int = 5
) -> tuple[Recorder, DistillationModule]:
    """Random masks, then the streak; accumulation 2; the epoch ends in the middle; AdamW, warm-up and cosine."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.set_num_threads(1)
    torch.manual_seed(0)
    verifier = tiny_verifier(VOCAB)
    drafter = BlockDrafter.from_verifier(verifier, num_layers=2, gamma=gamma)
    schedule = ObjectiveSchedule([Stage(Mdm(), 4), Stage(CrossEntropy(0.8), 3), Stage(Streak())])
    module = make_module(
        schedule, scheduler=partial(warmup_cosine, num_steps=12, warmup_steps=3), verifier=verifier, drafter=drafter
    )
    data = RolloutDataModule(
        language([9, 14, 5, 20, 11, 8, 3]),
        gamma=gamma,
        batch_size=2,
        windows_per_rollout=3,
        masking="random",
        seed=3,
        bucket_batches=2,
    )
    recorder = Recorder()
    saver = ModelCheckpoint(
        dirpath=str(folder),
        filename="step-{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=every_n,
        save_top_k=-1,
    )
    trainer = make_trainer(
        folder,
        max_steps=max_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        callbacks=[recorder, saver],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return recorder, module


if __name__ == "__main__":
    run, _ = resumable_run(sys.argv[2], 12, checkpoint=sys.argv[1])
    Path(sys.argv[3]).write_text(json.dumps(run.steps), encoding="utf-8")
