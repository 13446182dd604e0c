"""Streaming through ``StepLoader``: what runs drew before it, any number of ranks, exact resume."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from other_tokenizers import byte_bpe, spm_bpe

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.lazy_rollouts import FACTS, joined_ids_digest, row_facts
from specdiff2.data.retokenize import RetokenizedRollouts
from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.step_loader import StepLoader
from specdiff2.data.windows import WindowCollator
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.types import MismatchError, Rollout, WindowBatch

FIELDS = ("input_ids", "lengths", "window_row", "anchor", "targets", "valid", "revealed", "completion_start")


def rollout(index: int, prompt: int, completion: int) -> Rollout:
    ids = [1000 * index + position for position in range(prompt + completion)]
    return Rollout(f"r{index}", ids[:prompt], ids[prompt:], 1.0)


ROWS = [rollout(index, 3 + index % 3, 5 + index) for index in range(23)]

# rows and batches of the first seven steps, recorded with commit 2bffc49, which loaded every rollout into a list
OLD_ROWS = {
    1: [
        [20, 8, 6, 19],
        [7, 11, 17, 15],
        [22, 18, 0, 5],
        [14, 3, 16, 9],
        [4, 21, 13, 2],
        [12, 10, 1, 19],
        [20, 18, 1, 9],
    ],
    3: [
        [17, 19, 20, 22],
        [0, 6, 5, 7],
        [8, 11, 15, 18],
        [1, 3, 2, 4],
        [14, 16, 19, 21],
        [9, 10, 12, 13],
        [12, 11, 13, 14],
    ],
}
OLD_BATCHES = {
    ("full", 1): "626fde550bb7 aec2e69a1ea0 cfe833f6abba fe55bad8c56a 2b369c455d7e 5b58607dc988 2c788c4b07d4",
    ("full", 3): "8e528fae49e9 9eeb3140c6a2 9ab5dac7b58c 97b3a4549359 7c8c555a1e21 2072fb7089d9 4fe9d6d3a62e",
    ("random", 1): "293d5740c6cb 19b0e5b06a64 519801a1dd1d ac5c9b756e13 75c0de4b204f 6d09dd3bfe32 713b3c08ab3c",
    ("random", 3): "7b86a195967b d97ffac43da2 518ce7e8c72f 1d972aadc893 bcfbe273c6b1 3d4e79fc2f1a 0b9832fdbc86",
}
OLD_IDS = "714fe943bc6df723"


@pytest.fixture
def index(tmp_path):
    store = RolloutStore(tmp_path / "store", {"verifier": "v"}, max_shard_bytes=900)
    for row in ROWS:
        store.append([row])
    store.close()
    return open_index(store.folder)


def loader(rollouts=ROWS, *, masking="random", batch_size: int = 4, **changes) -> StepLoader:
    settings = dict(steps_per_epoch=6, seed=7, bucket_batches=3)
    return StepLoader(rollouts, WindowCollator(4, 3, masking, seed=5), batch_size=batch_size, **(settings | changes))


def digest(batch: WindowBatch) -> str:
    whole = hashlib.sha256()
    for name in FIELDS:
        value = getattr(batch, name)
        whole.update(f"{name}{value.dtype}{tuple(value.shape)}".encode() + value.numpy().tobytes())
    return whole.hexdigest()[:12]


@pytest.mark.parametrize(("masking", "bucket_batches"), OLD_BATCHES)
def test_golden_one_rank_draws_what_it_always_drew(index, masking, bucket_batches):
    for rollouts in (ROWS, index):
        source = loader(rollouts, masking=masking, bucket_batches=bucket_batches)
        assert [source.rows(step) for step in range(7)] == OLD_ROWS[bucket_batches]
        batches = " ".join(digest(source.batch(step)) for step in range(7))
        assert batches == OLD_BATCHES[masking, bucket_batches]


def test_golden_the_order_of_a_pass_is_that_of_64_bits():
    for num in (1, 10, 100_003):
        narrow, wide = (
            torch.randperm(num, generator=torch.Generator().manual_seed(3), dtype=dtype)
            for dtype in (torch.int32, torch.int64)
        )
        assert torch.equal(narrow.long(), wide)


def test_golden_old_checkpoints_go_on(index):
    state = loader().state_dict() | {"step": 5}
    assert list(state["settings"]) == [
        "gamma",
        "windows_per_rollout",
        "batch_size",
        "world_size",
        "bucket_batches",
        "seed",
        "masking",
        "num_rollouts",
        "rollout_ids",
        "steps_per_epoch",
    ]
    old = {"step": 5, "settings": state["settings"] | {"rollout_ids": OLD_IDS}}
    assert joined_ids_digest(ROWS) == OLD_IDS != state["settings"]["rollout_ids"]
    for rollouts in (ROWS, index):
        for known in (state, old):
            source = loader(rollouts)
            source.load_state_dict(known)
            assert digest(next(iter(source))) == digest(loader().batch(5))
        with pytest.raises(MismatchError, match="rollout_ids was"):
            loader([*ROWS[1:], ROWS[0]]).load_state_dict(old)


# ---------------------------------------------------------------- ranks
def windows(batch: WindowBatch) -> list[tuple]:
    """Of each row: its tokens, where its completion starts and its windows."""
    rows = []
    for row, length in enumerate(batch.lengths.tolist()):
        mine = batch.window_row == row
        parts = [getattr(batch, name)[mine].tolist() for name in ("anchor", "targets", "valid", "revealed")]
        rows.append((batch.input_ids[row, :length].tolist(), int(batch.completion_start[row]), parts))
    return rows


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_out_what_one_rank_trains_on(index, world_size):
    """Rows, windows and masks of each step; over two passes of 23 rows, across pools and epochs."""
    whole = loader()
    ranks = [loader(index, batch_size=4 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(13):
        parts = [windows(rank.batch(step)) for rank in ranks]
        together = [parts[place % world_size][place // world_size] for place in range(4)]
        assert together == windows(whole.batch(step))
        rows = [rank.rows(step) for rank in ranks]
        assert sorted(row for mine in rows for row in mine) == sorted(whole.rows(step))


def test_every_row_once_in_a_pass_and_no_rank_has_anothers():
    rows = [rollout(index, 2, 1 + index % 9) for index in range(24)]
    for bucket_batches in (1, 3):
        ranks = [loader(rows, rank=r, world_size=2, bucket_batches=bucket_batches) for r in (0, 1)]
        for first in (0, 3, 6):
            zero, one = ({row for step in range(first, first + 3) for row in rank.rows(step)} for rank in ranks)
            assert not zero & one and zero | one == set(range(24))


@pytest.mark.parametrize("step", [0, 1, 5, 6, 14])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_ranks_goes_on_at_the_row(index, step, world_size):
    """Written by two ranks with batches of 2; with one, two or four ranks each row of each later step is the same."""
    before = loader(index, batch_size=2, world_size=2, rank=1)
    before.step = step
    ranks = [loader(index, batch_size=4 // world_size, world_size=world_size, rank=r) for r in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(before.state_dict())
    for expected in range(step, step + 3):
        batches = [windows(next(iter(rank))) for rank in ranks]
        together = [batches[place % world_size][place // world_size] for place in range(4)]
        assert together == windows(loader().batch(expected))


@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 2), (2, 1), (1, 2)])
def test_other_rows_in_a_step_are_refused(batch_size, world_size):
    now = batch_size * world_size
    with pytest.raises(MismatchError, match=rf"batch_size \* world_size was 4 in the checkpoint, now it is {now}"):
        loader(batch_size=batch_size, world_size=world_size).load_state_dict(loader().state_dict())


def test_two_ranks_of_a_data_module_resume_on_one(index):
    """``steps_per_epoch`` follows from the rollouts and is the same for the same rows in a step."""
    for masking in ("full", "random"):
        data = RolloutDataModule(index.folder, gamma=4, batch_size=2, masking=masking, max_length=24)
        data._place = lambda: (1, 2)
        data.setup()
        state = data.train_dataloader().state_dict() | {"step": 4}
        other = RolloutDataModule(index.folder, gamma=4, batch_size=4, masking=masking, max_length=24)
        other.setup()
        assert len(other.train_rollouts) < len(ROWS)
        resumed = other.train_dataloader()
        resumed.load_state_dict(state)
        assert windows(next(iter(resumed)))[1::2] == windows(data.train_dataloader().batch(4))


# ---------------------------------------------------------------- another tokenizer
def test_retokenized_rollouts_are_read_lazily(tmp_path):
    bridge = TokenizerBridge(spm_bpe(), byte_bpe())
    texts = ["hi you", "the sum is 42 apples", "a", "hello there, you"]
    rows = []
    for number, text in enumerate(texts * 3):
        ids = byte_bpe()(text)["input_ids"]
        rows.append(Rollout(f"r{number}", ids[:1], ids[1:] or [1], 1.0))  # of "a", nothing is left to see
    store = RolloutStore(tmp_path, {"verifier": "v"})
    store.append(rows)
    store.close()
    lazy, listed = RetokenizedRollouts(open_index(tmp_path), bridge), RetokenizedRollouts(rows, bridge)
    assert len(lazy) == 9 and list(lazy) == list(listed) == lazy[:]
    assert lazy.facts(np.arange(9))[list(FACTS.names)].tolist() == row_facts(list(listed), np.arange(9)).tolist()
    one, other = (loader(source, masking="full") for source in (lazy, list(listed)))
    assert one.state_dict() == other.state_dict()
    assert all(digest(one.batch(step)) == digest(other.batch(step)) for step in range(4))
