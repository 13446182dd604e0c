"""Windows of rollouts and the step-addressed loader: cases 22 (collation), 23, 24 and 27 (rows and masks)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

from specdiff2.data.fixed_loader import FixedLoader
from specdiff2.data.step_loader import StepLoader
from specdiff2.data.windows import WindowCollator, draft_vocabulary, usable_rollouts
from specdiff2.types import ConfigError, MismatchError, Rollout, WindowBatch

FIELDS = ("input_ids", "lengths", "window_row", "anchor", "targets", "valid", "revealed")


def rollout(index: int, prompt: int = 4, completion: int = 12) -> Rollout:
    """Every token says where it is: 1000 * index + position."""
    ids = [1000 * index + position for position in range(prompt + completion)]
    return Rollout(f"r{index}", ids[:prompt], ids[prompt:], 1.0)


def same(one: WindowBatch, other: WindowBatch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def loader(num: int = 9, *, batch_size: int = 2, steps_per_epoch: int = 4, masking="random", **kwargs) -> StepLoader:
    rows = [rollout(index, prompt=3 + index % 3, completion=5 + index) for index in range(num)]
    collator = WindowCollator(kwargs.pop("gamma", 4), 3, masking, seed=5)
    return StepLoader(rows, collator, batch_size=batch_size, steps_per_epoch=steps_per_epoch, **kwargs)


# ---------------------------------------------------------------- collation
def test_layout_of_a_batch():
    rows = [rollout(1, prompt=4, completion=6), rollout(2, prompt=2, completion=3)]
    batch = WindowCollator(gamma=4, windows_per_rollout=100)(rows)
    assert batch.lengths.tolist() == [10, 5] and batch.input_ids.shape == (2, 10)
    # every completion token is the first target of one window; the first anchor is the last prompt token
    assert batch.anchor.tolist() == [3, 4, 5, 6, 7, 8, 1, 2, 3]
    assert batch.window_row.tolist() == [0] * 6 + [1] * 3
    for window in range(batch.num_windows):
        row, anchor = int(batch.window_row[window]), int(batch.anchor[window])
        inside = max(0, min(4, int(batch.lengths[row]) - 1 - anchor))
        assert batch.valid[window].tolist() == [True] * inside + [False] * (4 - inside) and inside >= 1
        expected = [1000 * (row + 1) + anchor + 1 + k for k in range(inside)]
        assert batch.targets[window, :inside].tolist() == expected
    assert not batch.revealed.any()


def test_anchors_are_drawn_without_replacement_and_cover_everything():
    seen: Counter[int] = Counter()
    collator = WindowCollator(gamma=4, windows_per_rollout=5)
    for step in range(60):
        anchors = collator([rollout(0)], (0, step)).anchor.tolist()
        assert len(set(anchors)) == 5 and anchors == sorted(anchors)
        seen.update(anchors)
    assert set(seen) == set(range(3, 15)) and min(seen.values()) > 10


def test_fixed_anchors_are_even_and_never_change():
    collator = WindowCollator(gamma=4, windows_per_rollout=4, fixed=True)
    one = collator([rollout(0), rollout(1, completion=2)])
    assert one.anchor.tolist() == [3, 6, 9, 12, 3, 4]
    assert same(one, WindowCollator(4, 4, seed=99, fixed=True)([rollout(0), rollout(1, completion=2)], (7,)))


def test_random_masking_reveals_only_valid_targets_and_keeps_one_masked():
    rows = [rollout(index, completion=3) for index in range(20)]
    random, full = (WindowCollator(6, 3, masking, seed=1)(rows, (0, 0)) for masking in ("random", "full"))
    assert torch.equal(random.anchor, full.anchor), "the mask does not move the windows"
    assert random.revealed.any() and not (random.revealed & ~random.valid).any()
    assert (random.valid & ~random.revealed).any(-1).all()
    assert not full.revealed.any()


def test_case_22_a_batch_holds_the_same_windows_however_it_is_cut():
    """3 and 30 trainable tokens: batch 2 and 2 x batch 1 have the same windows (evenly spaced ones)."""
    rows = [rollout(0, completion=3), rollout(1, completion=30)]
    collator = WindowCollator(gamma=8, windows_per_rollout=6, fixed=True)
    together, apart = collator(rows), [collator([row]) for row in rows]
    assert together.num_windows == sum(batch.num_windows for batch in apart) == 3 + 6
    assert torch.equal(together.targets, torch.cat([batch.targets for batch in apart]))
    assert torch.equal(together.valid, torch.cat([batch.valid for batch in apart]))
    assert torch.equal(together.anchor, torch.cat([batch.anchor for batch in apart]))


def test_case_23_rollouts_without_a_token_are_dropped_and_counted():
    rows = [rollout(0), rollout(1, completion=0), rollout(2, completion=1), rollout(3, completion=40)]
    usable, drops = usable_rollouts(rows, max_length=20)
    assert [row.rollout_id for row in usable] == ["r0", "r2"]
    assert (drops.num_empty, drops.num_too_long, drops.total) == (1, 1, 2)
    batch = WindowCollator(8, 4)(usable)
    assert batch.valid.any(-1).all(), "every window has something to predict"
    with pytest.raises(ConfigError, match="no rollout to train on: of 2, 2 have no completion token"):
        usable_rollouts([rollout(0, completion=0)] * 2)
    with pytest.raises(ConfigError, match="1 are longer than max_length=5"):
        usable_rollouts([rollout(0)], max_length=5)
    for unusable in ([], [rollout(0), rollout(1, completion=0)]):
        with pytest.raises(ConfigError, match="drop those first"):
            WindowCollator(8, 4)(unusable)


def test_rollout_without_a_prompt():
    batch = WindowCollator(3, 10)([Rollout("r", [], [5, 6, 7], 1.0)])
    assert batch.anchor.tolist() == [0, 1] and batch.targets[0].tolist() == [6, 7, 0]
    assert usable_rollouts([Rollout("r", [], [5, 6], 1.0), Rollout("s", [], [5], 1.0)])[1].num_empty == 1


@pytest.mark.parametrize(
    ("args", "named"), [((0, 1), "gamma"), ((1, 0), "windows_per_rollout"), ((1, 1, "half"), "masking")]
)
def test_collator_refuses(args, named):
    with pytest.raises(ConfigError, match=named):
        WindowCollator(*args)


def test_draft_vocabulary():
    rows = [Rollout("a", [50, 51], [7, 7, 9, 3], 1.0), Rollout("b", [52], [9, 7, 3, 8, 2], 1.0)]
    assert draft_vocabulary(rows) == [2, 3, 7, 8, 9]
    assert draft_vocabulary(rows, 3) == [3, 7, 9], "by frequency, prompts do not count"
    assert draft_vocabulary(rows, 3, eos_ids={2, 60}) == [2, 7, 60], "EOS always"
    assert draft_vocabulary(rows, 1) == [7] and draft_vocabulary(rows, 2) == [3, 7], "ties: the smaller id"
    for rollouts, limit, eos in ((rows, 1, (1, 2)), ([], None, ()), (rows, 0, ())):
        with pytest.raises(ConfigError):
            draft_vocabulary(rollouts, limit, eos)


# ---------------------------------------------------------------- steps
def test_every_row_is_used_once_per_pass():
    for bucket_batches in (1, 2):
        source = loader(8, batch_size=2, bucket_batches=bucket_batches)
        for start in (0, 4, 8):
            rows = [row for step in range(start, start + 4) for row in source.rows(step)]
            assert sorted(rows) == list(range(8))
    assert source.rows(0) != source.rows(4) or source.rows(1) != source.rows(5), "passes differ"


def test_bucketing_puts_similar_lengths_together():
    def padding(source: StepLoader) -> int:
        batches = [source.batch(step) for step in range(32)]
        return sum(int(batch.input_ids.numel() - batch.lengths.sum()) for batch in batches)

    bucketed, unsorted = (loader(64, batch_size=4, bucket_batches=count) for count in (16, 1))
    assert padding(bucketed) < 0.3 * padding(unsorted)


def test_case_24_ranks_share_steps_not_rows():
    """Odd number of rollouts, one usable row only, fewer rows than ranks: both ranks always have the same steps."""
    for num in (1, 3, 9):
        ranks = [loader(num, rank=rank, world_size=2, bucket_batches=2) for rank in (0, 1)]
        batches = [list(one) for one in ranks]
        assert len(batches[0]) == len(batches[1]) == 4
        for step, (a, b) in enumerate(zip(*batches, strict=True)):
            assert a.lengths.shape == b.lengths.shape == (2,)
            if num == 9 and step < 2:  # within the first pass
                assert not set(ranks[0].rows(step)) & set(ranks[1].rows(step))
    # one row only: both ranks and all steps train on it, with other windows and other masks
    one = [loader(1, rank=rank, world_size=2) for rank in (0, 1)]
    keys = {(tuple(b.anchor.tolist()), tuple(b.revealed.flatten().tolist())) for source in one for b in source}
    assert len(keys) == 8


def test_case_27_resume_gives_the_same_rows_windows_and_masks():
    straight, twelve = loader(), []
    for _ in range(3):  # three epochs of four steps
        twelve += list(straight)
    first = loader()
    iterator = iter(first)
    five = [next(iterator) for _ in range(4)] + [next(iter(first))]
    state = first.state_dict()
    assert state["step"] == 5
    second = loader()
    second.load_state_dict(state)
    seven = list(second) + list(second)
    assert len(seven) == 7 and all(same(a, b) for a, b in zip(twelve, five + seven, strict=True))
    assert any(not same(a, b) for a, b in pairwise(twelve))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (dict(gamma=5), "gamma was 4 in the checkpoint, now it is 5"),
        (dict(batch_size=3), "batch_size"),
        (dict(world_size=2), "world_size"),
        (dict(num=8), "num_rollouts"),
        (dict(seed=1), "seed"),
        (dict(masking="full"), "masking"),
        (dict(steps_per_epoch=6), "steps_per_epoch"),
    ],
)
def test_case_27_changed_settings_are_refused(change, key):
    with pytest.raises(MismatchError, match=key):
        loader(**change).load_state_dict(loader().state_dict())


def test_changed_rollouts_are_refused():
    one, other = loader(), loader()
    other.set_rollouts([*other.rollouts[:-1], rollout(77)])
    with pytest.raises(MismatchError, match="rollout_ids"):
        other.load_state_dict(one.state_dict())


def test_held_out_windows_are_shared_out_evenly():
    rows = [rollout(index) for index in range(7)]
    collator = WindowCollator(4, 2, fixed=True)
    assert [len(FixedLoader(rows, collator, batch_size=2, rank=rank, world_size=2)) for rank in (0, 1)] == [2, 2]
    whole = FixedLoader(rows, collator, batch_size=2)
    assert sum(batch.num_windows for batch in whole) == 14, "one process leaves nothing out"
    assert all(same(a, b) for a, b in zip(whole, whole, strict=True))
    fewer = [FixedLoader(rows[:1], collator, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    assert list(map(len, fewer)) == [1, 1, 1], "fewer rows than ranks"
    with pytest.raises(ConfigError, match="empty list"):
        FixedLoader([], collator, batch_size=2)
