"""DeepSpeed's ZeRO-1 to 3 and FSDP on two CPU processes (gloo): the real engines, float32 and bfloat16. Cases 22 to 26.

All runs happen in one child process that forks its ranks, so that torch and DeepSpeed are imported once. Run as a
script, this file is that child: ``python test_sharded_training.py OUT_FOLDER``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from entry_runs import metric, train_here
from family_checkpoints import write_checkpoint, write_parent_tokenizer
from helpers import tiny_qwen2
from tiny_training import GAMMA, language, make_drafter, make_module, make_trainer

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.windows import WindowCollator
from specdiff2.models.pretrained import load_drafter, read_drafter_config, save_drafter
from specdiff2.objectives import ObjectiveSchedule, Streak
from specdiff2.runtime.checkpoint_export import export_checkpoint
from specdiff2.training import ds_cpu
from specdiff2.training.callbacks import DrafterExport, StreakMonitor
from specdiff2.training.fsdp import Fsdp
from specdiff2.training.optim import warmup_cosine
from specdiff2.training.strategies import DeepSpeed
from specdiff2.types import WindowBatch

pytestmark = pytest.mark.distributed
SCHEDULER = partial(warmup_cosine, num_steps=6, warmup_steps=2)
STRATEGIES = {f"zero{stage}": partial(DeepSpeed, stage, persistence_threshold=0) for stage in (1, 2, 3)} | {
    "fsdp": Fsdp
}
HALF, WHOLE = ("zero2", "zero3", "fsdp"), ("zero3", "fsdp")  # WHOLE: those that partition weights


class Record(pl.Callback):
    """The loss of every step and, at the end, the whole weights and what this rank holds of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses, self.held = path, {}, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics
        if trainer.global_step and trainer.global_step not in self.losses and "train/loss" in metrics:
            self.losses[trainer.global_step] = float(metrics["train/loss"])
        # ZeRO-3 leaves nothing of a parameter but its place while it is not used, FSDP this rank's part
        self.held = max(self.held, numbers_here(module.drafter.stack.layers.parameters()))

    def on_train_end(self, trainer, module):
        flat = [part for group in trainer.optimizers[0].param_groups for part in group["params"]]
        record = {
            "losses": self.losses,
            "weights": trainer.strategy.lightning_module_state_dict(),
            "held": self.held,
            "optimized": numbers_here(flat),
            "steps": trainer.global_step,
        }
        torch.save(record, f"{self.path}-{trainer.global_rank}.pt")


def numbers_here(tensors) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)


def collate(rollouts) -> WindowBatch:
    return WindowCollator(GAMMA, 100)(rollouts, (0, 0))


def empty(batch: WindowBatch) -> WindowBatch:
    windows = (batch.window_row, batch.anchor, batch.targets, batch.valid, batch.revealed)
    return WindowBatch(batch.input_ids, batch.lengths, *(tensor[:0] for tensor in windows), batch.completion_start)


def uneven() -> list[list[WindowBatch]]:
    """Per rank, two to a step: unlike numbers of windows, a rank without any in a batch, a step without any at all."""
    a, b, c, d, e, f = (collate([rollout]) for rollout in language([3, 30, 7, 12, 5, 20]))
    return [[a, b, empty(a), empty(b), c, d], [empty(c), e, empty(a), empty(b), f, empty(d)]]


class ByRank(pl.LightningDataModule):
    """One list of batches per rank."""

    def __init__(self, batches: list[list[WindowBatch]]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        return DataLoader(self.batches[self.trainer.global_rank], batch_size=None)


def rollouts(batch_size: int) -> RolloutDataModule:
    return RolloutDataModule(
        language([9, 14, 5, 20, 11, 8, 3]), language([6, 8, 4]), gamma=GAMMA, batch_size=batch_size,
        windows_per_rollout=4, seed=3, bucket_batches=2, steps_per_epoch=4,
    )  # fmt: skip


def fit(folder: Path, name: str, data, *, strategy="auto", ranks=1, max_steps=3, accumulate=2, start=None, **options):
    """One run, with its record, and where it reads rollouts with checkpoints and drafters beside it."""
    torch.manual_seed(0)
    verifier, drafter = make_drafter(shifted=True, markov_rank=3)  # 3: no rank count divides it
    schedule, more = ObjectiveSchedule.single(Streak()), dict(prefix_loss_weight=0.3, loss_chunk_windows=3)
    module = make_module(schedule, None, SCHEDULER, verifier, drafter, **more)
    callbacks = [Record(folder / name)]
    if isinstance(data, RolloutDataModule):
        saver = ModelCheckpoint(
            folder / f"{name}-saved", "step-{step}", auto_insert_metric_name=False, every_n_train_steps=2,
            save_top_k=-1,
        )  # fmt: skip
        export = DrafterExport(folder / f"{name}-drafter", save_drafter, monitor="val/streak_greedy")
        callbacks = [StreakMonitor(every_n_steps=2), export, saver, *callbacks]
    accelerator = {"accelerator": ds_cpu.NAME} if isinstance(strategy, DeepSpeed) else {}
    trainer = make_trainer(
        folder, strategy=strategy, devices=ranks, max_steps=max_steps, accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05, callbacks=callbacks, enable_checkpointing=len(callbacks) > 1, **accelerator, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)


def alone(rank: int, folder: Path) -> None:
    """One process without DeepSpeed, the same global batches: what the others must equal."""
    torch.set_num_threads(1)
    together = [batch for pair in zip(*uneven(), strict=True) for batch in pair]
    fit(folder, "one", ByRank([together]), accumulate=4)
    fit(folder, "plain", rollouts(2), max_steps=6)


def on_rank(rank: int, world: int, port: int, folder: Path) -> None:
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=0)
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    if world == 1:
        start = folder / "whole-zero3-saved" / "step-4.ckpt"
        fit(folder, "shrunk-zero3", rollouts(2), strategy=STRATEGIES["zero3"](), max_steps=6, start=start)
        start = folder / "whole-fsdp-saved" / "step-4.ckpt"
        fit(folder, "shrunk-fsdp", rollouts(2), strategy=STRATEGIES["fsdp"](), max_steps=6, start=start)
        return
    for name, strategy in STRATEGIES.items():
        fit(folder, name, ByRank(uneven()), strategy=strategy(), ranks=2)
    for name in HALF:
        fit(folder, f"bf16-{name}", ByRank(uneven()), strategy=STRATEGIES[name](), ranks=2, precision="bf16-mixed")
    for name in WHOLE:
        fit(folder, f"whole-{name}", rollouts(1), strategy=STRATEGIES[name](), ranks=2, max_steps=6)
    for name in HALF:
        start = folder / "plain-saved" / "step-4.ckpt"
        fit(folder, f"grown-{name}", rollouts(1), strategy=STRATEGIES[name](), ranks=2, max_steps=6, start=start)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def child(folder: Path) -> None:
    ds_cpu.prepare()
    start = partial(torch.multiprocessing.start_processes, start_method="fork")
    start(alone, args=(folder,), nprocs=1)
    start(on_rank, args=(2, free_port(), folder), nprocs=2)
    start(on_rank, args=(1, free_port(), folder), nprocs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, told = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a rank may still wait for another
    assert process.returncode == 0, told[-3000:]
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


def assert_equal(one, two, tolerance=1e-6):
    assert one["steps"] == two["steps"]
    assert one["weights"].keys() == two["weights"].keys() and one["weights"]
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, two["weights"][name], atol=tolerance, rtol=0)
    for step in one["losses"].keys() & two["losses"].keys():
        assert one["losses"][step] == pytest.approx(two["losses"][step], rel=1e-5), step


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_equal_one_process(runs, name):
    """Cases 22 to 24: float32, accumulation, clipping, batches and a whole step without a window."""
    one, two = runs["one-0"], runs[f"{name}-0"]
    assert len(one["losses"]) == 3 and one["losses"][3] != one["losses"][1]
    assert_equal(one, two)


@pytest.mark.parametrize("name", HALF)
def test_bfloat16_keeps_float32_weights(runs, name):
    one, two = runs["one-0"], runs[f"bf16-{name}-0"]
    for step, loss in one["losses"].items():
        assert two["losses"][step] == pytest.approx(loss, rel=0.01)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in two["weights"].values())
    assert_equal(runs["bf16-zero2-0"], runs["bf16-zero3-0"])


def test_strategies_partition_what_they_say(runs):
    whole = sum(weight.numel() for weight in runs["one-0"]["weights"].values())
    for name in STRATEGIES:
        if name != "zero3":  # whose parts are places in a buffer
            shares = [runs[f"{name}-{rank}"]["optimized"] for rank in (0, 1)]
            assert max(shares) <= whole / 2 + 32 and sum(shares) >= whole  # FSDP cuts each tensor by rows
    held = {name: [runs[f"{name}-{rank}"]["held"] for rank in (0, 1)] for name in STRATEGIES}
    all_layers = runs["one-0"]["held"]
    # between steps no layer is whole anywhere
    assert held["zero3"] == [0, 0] and sum(held["fsdp"]) == all_layers and max(held["fsdp"]) <= all_layers / 2
    assert held["zero1"] == held["zero2"] == [all_layers] * 2


def test_a_run_goes_on_with_another_number_of_processes_and_another_strategy(runs):
    """6 steps = 4 + 2: one process with a partitioning strategy after two, and two after one with none."""
    plain = runs["plain-0"]
    for name in WHOLE:
        assert_equal(plain, runs[f"whole-{name}-0"], 2e-6)
    for name in (*(f"shrunk-{one}" for one in WHOLE), *(f"grown-{one}" for one in HALF)):
        assert_equal(plain, runs[f"{name}-0"], 2e-6)
        assert 6 in runs[f"{name}-0"]["losses"] and 4 not in runs[f"{name}-0"]["losses"]


@pytest.mark.parametrize("name", WHOLE)
def test_checkpoints_are_plain_and_hold_trained_tensors_only(folder, name):
    """Cases 25, 26: as those of one process, whole tensors, nothing of the verifier."""
    one, two = (
        torch.load(folder / f"{run}-saved" / "step-4.ckpt", weights_only=True) for run in ("plain", f"whole-{name}")
    )
    verifier, drafter = make_drafter(shifted=True, markov_rank=3)
    shapes = {f"drafter.{name}": parameter.shape for name, parameter in drafter.named_parameters()}
    lent = [verifier.model.get_input_embeddings().weight, verifier.model.get_output_embeddings().weight]
    for checkpoint in (one, two):
        assert {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()} == shapes
        for tensor in checkpoint["state_dict"].values():
            assert not any(tensor.shape == weight.shape and torch.equal(tensor, weight) for weight in lent)
    (left,), (right,) = one["optimizer_states"], two["optimizer_states"]
    assert left["param_groups"] == right["param_groups"] and left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(right["state"][index][key], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", WHOLE)
def test_drafters_leave_the_parts_whole(folder, runs, tmp_path, name):
    """Exported while training, and afterwards from a checkpoint: the same files, which load and compute the same."""
    verifier, _ = make_drafter()
    last = load_drafter(folder / f"whole-{name}-drafter" / "last", verifier)
    for key, weight in runs[f"whole-{name}-0"]["weights"].items():
        assert torch.equal(last.state_dict()[key.removeprefix("drafter.")], weight)
    made = load_drafter(export_checkpoint(folder / f"whole-{name}-saved" / "step-6.ckpt", tmp_path / "made"), verifier)
    batch = collate(language([9, 4]))
    assert torch.equal(made(batch), last(batch)) and made(batch).abs().sum() > 0
    assert made.config == last.config


def write_verifier(folder: Path, family: str) -> Path:
    tokenizer = write_parent_tokenizer(folder, family)
    size = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=0, max_position_embeddings=512)
    tiny_qwen2(max(tokenizer.get_vocab().values()) + 1, seed=5, **size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, prompt_file):
    """An adapter of a masked-diffusion LM, trained by one process: the options for that, and the run folder."""
    folder = tmp_path_factory.mktemp("adapter")
    base, verifier = write_checkpoint(folder / "base", "dream"), write_verifier(folder / "verifier", "dream")
    options = [
        "model=masked_lm", f"model.source={base}", "model.gamma=4", "model.dtype=float32", "model.lora.rank=4",
        "model.lora.dropout=0.0", "verifier=hf", f"verifier.source={verifier}", "verifier.dtype=float32", "threads=1",
        "data=jsonl", f"data.train_prompts.path={prompt_file}", "data.train_prompts.prompt_field=question",
        "data.train_prompts.skip=3", "data.val_prompts.limit=3", "data.rollouts.max_new_tokens=12",
        f"data.folder={folder / 'rollouts'}", "data.module.windows_per_rollout=2", "max_steps=4",
        "objective.warmup_steps=2", "scheduler.warmup_steps=1", "callbacks.decoding_probe=null",
        "callbacks.checkpoint.every_n_train_steps=2", "trainer.precision=32-true", "trainer.log_every_n_steps=1",
    ]  # fmt: skip
    return options, train_here({"train": options}, folder / "one", "data.module.batch_size=4", "trainer=cpu")


@pytest.mark.parametrize(
    "strategy",
    [
        ["trainer=deepspeed_zero3", "trainer.accelerator=ds_cpu", "trainer.strategy.persistence_threshold=0"],
        ["trainer=fsdp", "trainer.accelerator=cpu"],
    ],
    ids=["zero3", "fsdp"],
)
def test_train_py_without_a_verifier(tmp_path, adapter_run, run_script, strategy):
    """The plain command: Lightning starts the second process, the adapter trains, its frozen base partitioned with it,
    and the verifier is never loaded. Losses equal those of one process."""
    options, one = adapter_run
    done = run_script(
        "train.py", *options, "data.module.batch_size=2", *strategy, "trainer.devices=2", "load_verifier=false",
        f"paths.outputs={tmp_path / 'outputs'}", "run_id=two", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not loaded, nothing reads its weights" in done.stdout + done.stderr
    two = tmp_path / "outputs/train/two"
    assert metric(two, "train/loss") == pytest.approx(metric(one, "train/loss"), rel=1e-5)
    left, right = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (one, two))
    assert left["state_dict"].keys() == right["state_dict"].keys() and all("lora" in key for key in left["state_dict"])
    for name, weight in left["state_dict"].items():
        torch.testing.assert_close(right["state_dict"][name], weight, atol=1e-5, rtol=0)
    # one run folder, written by the first process; the drafter belongs to the verifier it never saw
    assert [path.name for path in (tmp_path / "outputs/train").iterdir()] == ["two"]
    assert (two / "run.json").is_file() and (two / "drafter/last/adapter_model.safetensors").is_file()
    made = export_checkpoint(two / "checkpoints/last.ckpt", tmp_path / "made")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (made / name).read_bytes() == (two / "drafter/last" / name).read_bytes()
    assert (
        read_drafter_config(made).verifier_fingerprint == read_drafter_config(one / "drafter/last").verifier_fingerprint
    )


if __name__ == "__main__":
    child(Path(sys.argv[1]))
