"""Several processes fill one store: no coordinator, no rollout twice, none missing, whoever is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from helpers import char_tokenizer

from specdiff2.data import rollout_files
from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts
from specdiff2.data.prompt import Prompt
from specdiff2.data.rollout_plan import RolloutPlan
from specdiff2.data.rollouts import RolloutStore
from specdiff2.types import Rollout

ROOT = Path(__file__).resolve().parents[2]
ENCODER = ChatEncoder(char_tokenizer())
PROMPTS = [Prompt(f"p{i:02d}", [{"role": "user", "content": "more " * (i % 4) + f"{i}"}]) for i in range(30)]
SETTINGS = dict(temperatures=(1.0, 0.0), samples_per_prompt=2, max_new_tokens=5, seed=1, progress=False)
NUM_ROLLOUTS = 90


class Dice:
    """Completions from the batch's generator alone; ``victim`` dies in its third batch with half a line written."""

    max_length = 512

    def __init__(self, delay_s: float = 0.0, victim: Path | None = None) -> None:
        self.delay_s, self.victim, self.num_calls = delay_s, victim, 0

    def sample_batch(self, prompts, sampling, max_new_tokens, generator):
        self.num_calls += 1
        time.sleep(self.delay_s)
        if self.victim is not None and self.num_calls == 3:
            own = [shard for shard in rollout_files.list_shards(self.victim) if _is_mine(shard)]
            with open(own[-1], "ab") as file:
                file.write(rollout_files.encode_rollout(Rollout("half", [1], [2], 1.0))[:25])
            (self.victim.parent / "hangs").touch()
            time.sleep(60)
        return torch.randint(0, 60, (len(prompts), max_new_tokens), generator=generator).tolist()


def _is_mine(shard: Path) -> bool:
    return rollout_files.shard_writer(shard) == _writer


_writer = -1


def _write(folder: Path, batch_size: int, delay_s: float, kill: bool) -> None:
    global _writer
    store = RolloutStore(folder, {}, max_shard_bytes=1500)
    _writer = store.lock()
    generate_rollouts(
        Dice(delay_s, folder if kill else None), ENCODER, PROMPTS, store, batch_size=batch_size, **SETTINGS
    )


def start(folder: Path, *, batch_size: int = 4, delay_s: float = 0.01, kill: bool = False):
    process = multiprocessing.get_context("fork").Process(
        target=_write, args=(folder, batch_size, delay_s, kill), daemon=True
    )
    process.start()
    return process


def contents(folder: Path) -> dict:
    rollouts = RolloutStore.open(folder).load()
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    return {r.rollout_id: (r.prompt_ids, r.completion_ids, r.temperature, r.meta) for r in rollouts}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """What one process samples."""
    folder = tmp_path_factory.mktemp("alone") / "store"
    store = RolloutStore(folder, {})
    generate_rollouts(Dice(), ENCODER, PROMPTS, store, batch_size=4, **SETTINGS)
    assert rollout_files.list_shards(folder) == [folder / "shard-00000.jsonl"]
    return contents(folder)


@pytest.mark.distributed
def test_writers_share_the_work_and_a_killed_ones_is_done_by_others(tmp_path, alone):
    folder = tmp_path / "store"
    victim = start(folder, kill=True)
    others = [start(folder) for _ in range(2)]
    try:
        until(lambda: (tmp_path / "hangs").exists() and len(RolloutStore.open(folder)) == NUM_ROLLOUTS - 4)
        assert all(process.is_alive() for process in others), "they wait for the batch that the victim holds"
        assert not RolloutStore.open(folder).is_complete()
        os.kill(victim.pid, signal.SIGKILL)
        for process in others:
            process.join(20)
            assert process.exitcode == 0
    finally:
        for process in (victim, *others):
            process.kill()
    assert contents(folder) == alone
    assert len({rollout_files.shard_writer(shard) for shard in rollout_files.list_shards(folder)}) == 3
    check_manifest(folder)
    rerun = start(folder, batch_size=7)  # nothing left to do, for any batch size
    rerun.join(20)
    assert rerun.exitcode == 0 and contents(folder) == alone


@pytest.mark.distributed
def test_all_writers_killed_then_one_goes_on(tmp_path, alone):
    folder = tmp_path / "store"
    writers = [start(folder, delay_s=0.05) for _ in range(3)]
    try:
        until(lambda: folder.exists() and (folder / "manifest.json").exists() and len(RolloutStore.open(folder)) > 20)
    finally:
        for process in writers:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    before = contents(folder)
    assert 20 < len(before) < NUM_ROLLOUTS and before.items() <= alone.items()
    last = start(folder)
    last.join(20)
    assert last.exitcode == 0 and contents(folder) == alone
    check_manifest(folder)


def check_manifest(folder: Path) -> None:
    """Exactly what is in the shards."""
    said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["complete"]
    shards = rollout_files.list_shards(folder)
    lines = {shard.name: shard.read_bytes().splitlines() for shard in shards}
    assert said["num_rollouts"] == NUM_ROLLOUTS and said["num_tokens"] == 5 * NUM_ROLLOUTS
    assert said["shards"] == {
        name: {"num_rollouts": len(rows), "num_tokens": 5 * len(rows), "bytes": sum(len(row) + 1 for row in rows)}
        for name, rows in lines.items()
    }
    assert RolloutStore.open(folder).is_complete(NUM_ROLLOUTS)


def until(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.02)


def test_a_complete_store_is_not_read_again(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path, {})
    generate_rollouts(Dice(), ENCODER, PROMPTS, store, batch_size=4, **SETTINGS)
    monkeypatch.setattr(RolloutStore, "lock", None)  # any writer reads all of it
    report = generate_rollouts(Dice(), ENCODER, PROMPTS, RolloutStore(tmp_path, {}), batch_size=4, **SETTINGS)
    assert (report.num_reused, report.num_new) == (NUM_ROLLOUTS, 0)


def test_a_plan_of_millions_takes_no_memory():
    plan = RolloutPlan(ENCODER, PROMPTS, [0.5, 0.0, 1.0], 1_000_000)
    assert len(plan) == 60_000_030
    tracemalloc.start()
    first, middle, last = plan[0], plan[30_000_029], plan[len(plan) - 1]
    assert sum(len(rows) for rows in plan.batches(50_000)) == len(plan)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert (first.temperature, middle.temperature, last.temperature) == (0.5, 0.0, 1.0)
    assert middle.rollout_id.endswith("/T0/0") and last.rollout_id.endswith("/T1/999999")
    with pytest.raises(IndexError):
        plan[len(plan)]


@pytest.mark.distributed
def test_torchrun_of_the_entry_point(tmp_path, tiny_folder, prompt_file):
    """Two writers of both stores; one of them speaks."""
    overrides = ["verifier=hf", f"verifier.source={tiny_folder}", "verifier.dtype=float32", "data=jsonl",
                 f"data.train_prompts.path={prompt_file}", "data.train_prompts.prompt_field=question",
                 "data.train_prompts.skip=3", "data.val_prompts.limit=3", "data.rollouts.samples_per_prompt=6",
                 "data.rollouts.temperatures=[1.0]", "data.rollouts.max_new_tokens=8", "data.rollouts.batch_size=1",
                 "threads=1"]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(ROOT / "rollout.py"),
        *overrides,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("train on them: python train.py verifier=hf") == 1
    rollouts = tmp_path / "outputs" / "rollouts" / "jsonl"
    for split, count in (("train", 30), ("val", 18)):
        (folder,) = rollouts.glob(f"{split}-*")
        store = RolloutStore.open(folder)
        assert len(store) == count and store.is_complete(count)
        assert {shard.name for shard in rollout_files.list_shards(folder)} == {
            "shard-00000.jsonl",
            "shard-w001-00000.jsonl",
        }
