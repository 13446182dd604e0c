"""Sampling rollouts into a store: case 28 and its relatives."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from helpers import char_tokenizer, tiny_verifier

from specdiff2.data import rollout_files
from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts, rollout_fingerprint
from specdiff2.data.online import OnlineRollouts
from specdiff2.data.prompts import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.types import ConfigError, MismatchError, StorageError

ENCODER = ChatEncoder(char_tokenizer())
PROMPTS = [Prompt(f"p{i}", [{"role": "user", "content": "one more " * (i % 3) + f"and {i}"}]) for i in range(5)]
SAMPLING = dict(temperatures=(1.0, 0.5), samples_per_prompt=1, max_new_tokens=6, seed=3)


class Dice:
    """Completions from the batch's generator alone: wrong seeding or batching shows at once."""

    max_length = 512

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[int, float]] = []
        self.stop_after = stop_after

    def sample_batch(self, prompts, sampling, max_new_tokens, generator):
        if self.stop_after is not None and len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((len(prompts), sampling.temperature))
        return torch.randint(0, 60, (len(prompts), max_new_tokens), generator=generator).tolist()


def fingerprint(**changes):
    return rollout_fingerprint(
        verifier="v", tokenizer="t", chat_template="c", prompts={"source": "test"}, **(SAMPLING | changes)
    )


def run(folder, verifier=None, *, batch_size: int = 4, **changes):
    store = RolloutStore(folder, fingerprint(**changes))
    report = generate_rollouts(
        verifier or Dice(), ENCODER, PROMPTS, store, batch_size=batch_size, progress=False, **(SAMPLING | changes)
    )
    return store, report


def contents(store: RolloutStore):
    return [(r.rollout_id, r.prompt_ids, r.completion_ids, r.temperature) for r in store.load()]


def test_plan_and_records(tmp_path):
    verifier = Dice()
    store, report = run(tmp_path, verifier)
    rollouts = store.load()
    assert (report.num_reused, report.num_new, report.num_tokens) == (0, 10, 60)
    assert len({r.rollout_id for r in rollouts}) == 10
    assert verifier.calls == [(4, 1.0), (1, 1.0), (4, 0.5), (1, 0.5)], "a batch has one temperature"
    by_id = {prompt.prompt_id: prompt for prompt in PROMPTS}
    for rollout in rollouts:
        assert rollout.prompt_ids == ENCODER.encode(by_id[rollout.meta["prompt_id"]])
    lengths = [len(r.prompt_ids) for r in rollouts[:5]]
    assert lengths == sorted(lengths, reverse=True), "batched by length"


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 10])
def test_case_28_killed_at_4_of_10_with_half_a_line_then_resumed_twice(tmp_path, batch_size):
    whole, _ = run(tmp_path / "whole", batch_size=batch_size)
    data = (tmp_path / "whole" / "shard-00000.jsonl").read_bytes()
    lines = data.split(b"\n")
    store = RolloutStore(tmp_path / "killed", fingerprint())
    half = b"\n".join([*lines[:4], lines[4][: len(lines[4]) // 2]])
    (store.folder / "shard-00000.jsonl").write_bytes(half)

    store, first = run(tmp_path / "killed", batch_size=batch_size)
    assert (first.num_reused, first.num_new) == (4, 6)
    assert contents(store) == contents(whole) and len(store.ids()) == 10
    untouched = Dice(stop_after=0)
    store, second = run(tmp_path / "killed", untouched, batch_size=batch_size)
    assert (second.num_reused, second.num_new) == (10, 0) and not untouched.calls
    assert contents(store) == contents(whole)

    with pytest.raises(MismatchError, match=r"temperatures was \[1.0, 0.5\], now it is \[1.0, 0.7\]"):
        run(tmp_path / "killed", temperatures=(1.0, 0.7))
    assert contents(store) == contents(whole)


def test_killed_at_any_byte(tmp_path):
    whole, _ = run(tmp_path / "whole")
    data = (tmp_path / "whole" / "shard-00000.jsonl").read_bytes()
    for number, cut in enumerate(range(0, len(data), 151)):
        store = RolloutStore(tmp_path / str(number), fingerprint())
        (store.folder / "shard-00000.jsonl").write_bytes(data[:cut])
        assert contents(run(store.folder)[0]) == contents(whole)


def test_interrupted_run_keeps_complete_batches(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", Dice(stop_after=2))
    assert len(RolloutStore(tmp_path / "a", fingerprint())) == 5
    assert contents(run(tmp_path / "a")[0]) == contents(run(tmp_path / "b")[0])


def test_a_lost_line_in_the_middle_is_sampled_again(tmp_path):
    store, _ = run(tmp_path)
    before = dict((row[0], row) for row in contents(store))
    shard = tmp_path / "shard-00000.jsonl"
    lines = shard.read_bytes().split(b"\n")
    shard.write_bytes(b"\n".join(lines[:2] + lines[3:]))
    store, report = run(tmp_path)
    assert report.num_new == 1 and dict((row[0], row) for row in contents(store)) == before


def test_full_disk_then_more_room(tmp_path, monkeypatch):
    verifier, real = Dice(), os.fsync

    def fsync(descriptor):
        if len(verifier.calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(rollout_files.os, "fsync", fsync)
        with pytest.raises(StorageError, match="No space left"):
            run(tmp_path / "a", verifier)
    assert len(RolloutStore(tmp_path / "a", fingerprint())) == 5
    assert contents(run(tmp_path / "a")[0]) == contents(run(tmp_path / "b")[0])


def test_temperature_zero_is_sampled_once(tmp_path):
    store, _ = run(tmp_path, temperatures=(0.0, 1.0), samples_per_prompt=3)
    counts = [sum(r.temperature == t for r in store.load()) for t in (0.0, 1.0)]
    assert counts == [5, 15]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(temperatures=()), "temperatures"),
        (dict(temperatures=(1.0, 1.0)), "none twice"),
        (dict(temperatures=(-1.0,)), "temperature=-1.0"),
        (dict(temperatures=(float("nan"),)), "temperature=nan"),
        (dict(samples_per_prompt=0), "samples_per_prompt"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(batch_size=0), "batch_size"),
        (dict(top_p=0.0), "top_p"),
        (dict(max_new_tokens=480), "prompt 'p2'.*context of 512"),
    ],
)
def test_bad_settings_are_refused_before_any_sampling(tmp_path, changes, says):
    verifier = Dice()
    store = RolloutStore(tmp_path, {})
    with pytest.raises(ConfigError, match=says):
        generate_rollouts(verifier, ENCODER, PROMPTS, store, progress=False, **(SAMPLING | changes))
    assert not verifier.calls and len(store) == 0


def test_a_store_of_other_sampling_is_refused(tmp_path):
    store = RolloutStore(tmp_path, fingerprint())
    with pytest.raises(MismatchError, match="seed was 3, now it is 4"):
        generate_rollouts(Dice(), ENCODER, PROMPTS, store, progress=False, **(SAMPLING | dict(seed=4)))


def test_repeated_prompt_ids_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'p0' occurs twice"):
        generate_rollouts(Dice(), ENCODER, PROMPTS[:1] * 2, RolloutStore(tmp_path, {}), progress=False)


def test_progress_bar_counts_rollouts(tmp_path, capsys):
    generate_rollouts(Dice(), ENCODER, PROMPTS, RolloutStore(tmp_path, {}), progress=True)
    assert "5/5" in capsys.readouterr().err


def test_a_real_verifier_resumes_exactly(tmp_path):
    tokenizer = char_tokenizer()
    verifier = tiny_verifier(tokenizer=tokenizer, eos_ids=[2])
    whole, _ = run(tmp_path / "whole", verifier)
    lines = (tmp_path / "whole" / "shard-00000.jsonl").read_bytes().split(b"\n")
    store = RolloutStore(tmp_path / "killed", fingerprint())
    (store.folder / "shard-00000.jsonl").write_bytes(b"\n".join(lines[:6]))
    assert contents(run(tmp_path / "killed", verifier)[0]) == contents(whole)
    for rollout in whole.load():
        ids = rollout.completion_ids
        assert 1 <= len(ids) <= 6 and all(0 <= token < verifier.vocab_size for token in ids)
        assert 2 not in ids[:-1], "nothing after EOS"


def test_online_rounds_are_reproducible_and_move_on():
    def sampler():
        return OnlineRollouts(Dice(), ENCODER, PROMPTS, prompts_per_round=2, batch_size=2, max_new_tokens=4, seed=1)

    def ids(rollouts):
        return [(r.rollout_id, r.completion_ids) for r in rollouts]

    one, other = sampler(), sampler()
    rounds = [ids(one.sample(index)) for index in range(3)]
    assert ids(other.sample(2)) == rounds[2], "a round does not depend on those before"
    names = [{name.split("/")[3] for name, _ in batch} for batch in rounds]
    assert not names[0] & names[1] and names[0] | names[1] | names[2] == {p.prompt_id for p in PROMPTS}
    ranks = [{r.rollout_id.split("/")[3] for r in one.sample(0, rank, 2)} for rank in (0, 1)]
    assert not ranks[0] & ranks[1], "ranks take different prompts"
