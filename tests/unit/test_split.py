"""Prompts split over processes: who decodes what, what is merged, who is missed. Real processes: integration tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import RandomDrafter, char_tokenizer, tiny_verifier

from specdiff2.data.prompt import Prompt
from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.histories import HISTORIES_FILE
from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.evaluation.shards import SHARDS, homes, is_pending, merge, shard_name
from specdiff2.evaluation.table import split_notes
from specdiff2.runtime.evaluation import run_benchmarks
from specdiff2.runtime.rank_files import Share, launcher, take_lock, tell, wait_for_others
from specdiff2.runtime.split import merging, part_of, share_of
from specdiff2.types import ConfigError, SamplingParams, SpecDiffError

SINGLE = [Prompt(f"s{i}", [{"role": "user", "content": "ab"[i % 2] * (i + 1)}], str(i)) for i in range(4)]
TALKS = [Prompt(f"t{i}", [{"role": "user", "content": "hi" + "abc"[i]}], None, {}, ("more",) * i) for i in range(3)]
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "3"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    return {
        "paths": {"run": str(tmp_path / "run")}, "verifier": {"tp_plan": None}, "task": "decode", "prompt": None,
        "batch_sizes": None, "shard": None, "shard_wait_s": 0.2, "run_id": "X", "max_new_tokens": 6, "seed": 3,
        "stop_ids": [], "stop": [], "num_warmup": 1,
    }  # fmt: skip


# ---------------------------------------------------------------- who decodes what
@pytest.mark.parametrize(
    ("environment", "change", "expected"),
    [
        ({}, {}, None),
        (TORCHRUN, {}, Share(2, 4, True)),
        (SLURM, {}, Share(1, 3, True)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {}, None),  # the batch script itself, no job step
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, None),
        (TORCHRUN, {"verifier": {"tp_plan": "auto"}}, None),  # all processes hold one verifier
        ({}, {"shard": "3/4"}, Share(3, 4, False)),
        (TORCHRUN, {"shard": "3/4"}, "shard=3/4 and a launcher of 4 processes: expected one of them"),
        ({}, {"shard": "0/2", "verifier": {"tp_plan": "auto"}}, "shard=0/2 and verifier.tp_plan: expected one"),
        ({}, {"shard": "4/4"}, "shard='4/4': expected NUMBER/COUNT"),
        ({}, {"shard": "1of4"}, "shard='1of4': expected NUMBER/COUNT"),
        (SLURM, {"task": "budgeted"}, "task='budgeted' and 3 processes that split prompts: expected task=decode"),
        (SLURM, {"prompt": "hi"}, "expected prompt=null"),
        (SLURM, {"batch_sizes": [2]}, "expected batch_sizes=null"),
    ],
)
def test_share_of_a_process(config, monkeypatch, environment, change, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            share_of(config | change)
    else:
        assert share_of(config | change) == expected


def test_training_is_never_split_and_one_process_goes_on_with_shards(config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert share_of({"verifier": {}, "trainer": {}}) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    (Path(config["paths"]["run"]) / SHARDS).mkdir(parents=True)
    assert share_of(config) == Share(0, 1, False)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_parts_cover_every_turn_once_and_keep_conversations_whole(num_ranks):
    parts = [part_of(Share(rank, num_ranks, False), TALKS, "talk") for rank in range(num_ranks)]
    assert sorted(index for _, part in parts for index in part.indices) == list(range(6))  # 1 + 2 + 3 turns
    for prompts, part in parts:
        assert len(part.indices) == sum(1 + len(prompt.later_turns) for prompt in prompts)
        assert part.whole == parts[0][1].whole and part.whole["num_prompts"] == 6
    assert (
        part_of(Share(0, 1, False), TALKS[:2], "talk")[1].whole["prompts_sha256"] != parts[0][1].whole["prompts_sha256"]
    )


def test_ranks_take_turns_with_conversations():
    indices = [part_of(Share(rank, 2, False), TALKS, "talk")[1].indices for rank in range(2)]
    assert indices == [[0, 3, 4, 5], [1, 2]]


def test_one_id_twice_is_refused_although_the_prompts_are_on_two_ranks():
    with pytest.raises(ConfigError, match="'s0' occurs twice"):
        part_of(Share(0, 2, False), [SINGLE[0], SINGLE[0]], "b")


# ---------------------------------------------------------------- what they say together
@pytest.fixture(scope="module")
def decoders() -> dict[str, Any]:
    """At a temperature: outputs tell the seeds of prompts and of earlier turns."""
    verifier = tiny_verifier(64, tokenizer=char_tokenizer())
    verifier.sampling = SamplingParams(temperature=1.0)
    drafter = RandomDrafter(verifier.vocab_size)
    return {
        "autoregressive": AutoregressiveDecoder(verifier),
        "greedy": SpeculativeDecoder(verifier, drafter, rule=make_rule("tree_match"), num_drafts=2),
    }


def decode(config: dict[str, Any], decoders: dict[str, Any], share: Share | None, **hardware: Any) -> Path | None:
    """As one process does; the run folder if this one has merged."""
    run = Path(config["paths"]["run"])
    folder = run if share is None else run / SHARDS / share.name
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"machine": "m", "host": "h", "device": "cpu", "dtype": "float32", "threads": 1, "runtime": "eager"}
    (folder / "run.json").write_text(json.dumps(facts | hardware), encoding="utf-8")
    verifier = decoders["autoregressive"].verifier
    num_prompts = run_benchmarks(config, verifier, {"talk": TALKS, "one": SINGLE}, decoders, folder, share)
    assert num_prompts == {"benchmarks/talk": 6, "benchmarks/one": 4}
    if share is None:
        return run
    with merging(share, config, folder, num_prompts) as merged:
        return merged


def outputs(run: Path) -> list[tuple[Any, ...]]:
    records = [record for record in read_records(run / RECORDS_FILE) if not record.warmup]
    return [(r.benchmark, r.prompt_index, r.prompt_id, r.method, r.tokens, r.prompt_ids, r.answer) for r in records]


@pytest.fixture(scope="module")
def whole(decoders, tmp_path_factory) -> Path:
    """A single process's."""
    options = {"max_new_tokens": 6, "seed": 3, "stop_ids": [], "stop": [], "num_warmup": 1, "batch_sizes": None}
    return decode({**options, "paths": {"run": str(tmp_path_factory.mktemp("whole"))}}, decoders, None)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_conversations_and_suites_give_what_one_process_gives(config, decoders, whole, num_ranks):
    run = Path(config["paths"]["run"])
    merged = [decode(config, decoders, Share(rank, num_ranks, False)) for rank in range(num_ranks)]
    assert merged == [None] * (num_ranks - 1) + [run] and not is_pending(run)
    order = {"talk": 0, "one": 1, "autoregressive": 0, "greedy": 1}
    assert outputs(run) == sorted(outputs(whole), key=lambda one: (order[one[0]], one[1], order[one[3]]))
    for place in ("benchmarks/talk", "benchmarks/one"):
        ours, theirs = (json.loads((folder / place / "benchmark.json").read_text()) for folder in (run, whole))
        assert ours == theirs


def test_another_number_of_ranks_goes_on_with_the_same_answers_to_earlier_turns(config, decoders, whole):
    """Rank 0 of 2 has died in the third turn of a conversation: its answers to the first turns are read, not made."""
    run = Path(config["paths"]["run"])
    decode(config, decoders, Share(0, 2, False))
    path = run / SHARDS / "000-of-002" / "benchmarks" / "talk" / RECORDS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40], encoding="utf-8")
    histories = path.with_name(HISTORIES_FILE)
    told = json.loads(histories.read_text(encoding="utf-8"))
    for rank in range(3):
        decode(config, decoders, Share(rank, 3, False))
    assert sorted(outputs(run)) == sorted(outputs(whole))
    again = [json.loads(p.read_text(encoding="utf-8")) for p in run.glob(f"{SHARDS}/*-of-003/**/{HISTORIES_FILE}")]
    assert any(one["answers"].items() >= told["answers"].items() for one in again)


def test_generations_twice_count_once_and_missing_ones_are_refused(config, decoders, whole):
    run = Path(config["paths"]["run"])
    decode(config, decoders, Share(0, 2, False))
    shutil.copytree(run / SHARDS / "000-of-002", run / SHARDS / "000-of-007")
    with pytest.raises(SpecDiffError, match=r"4 generations of 6 prompts of benchmarks/talk are missing"):
        merge(run, {"benchmarks/talk": 6, "benchmarks/one": 4})
    decode(config, decoders, Share(1, 2, False))
    assert sorted(outputs(run)) == sorted(outputs(whole))
    assert {path.parents[1].name for path in homes(run, "benchmarks/one")} == {"000-of-002", "001-of-002", "000-of-007"}


def test_machines_that_differ_are_told(config, decoders):
    run = Path(config["paths"]["run"])
    decode(config, decoders, Share(0, 2, False))
    path = run / SHARDS / "000-of-002" / "benchmarks" / "one" / RECORDS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")  # died before the last method of a prompt
    (run / SHARDS / "000-of-002.json").unlink()
    decode(config, decoders, Share(1, 2, False))
    decode(config, decoders, Share(0, 1, False), machine="other", threads=2)
    split = write_summary(run)["split"]
    assert split["differing"] == {"machine": ["m", "other"], "threads": [1, 2]} and split["num_mixed_prompts"] == 1
    assert [rank["shard"] for rank in split["ranks"]] == ["000-of-001", "000-of-002", "001-of-002"]
    assert [rank["num_generations"] for rank in split["ranks"]] == [1, 11, 8]
    note = split_notes({"split": split})[0]
    assert "3 processes on 1 machine that DIFFER in machine: m, other; threads: 1, 2" in note and "1 prompts" in note
    assert split_notes({}) == []


# ---------------------------------------------------------------- who is missed
def test_rank_0_names_the_rank_that_died_failed_or_is_silent(tmp_path):
    share = Share(0, 3, True)
    tell(share, tmp_path, "done")
    tell(Share(1, 3, True), tmp_path, "done")
    with pytest.raises(SpecDiffError, match=r"nothing new of rank 2 \(has not started\) for shard_wait_s=0.2 seconds; "
                       "what was decoded stays: run the same command again with run_id=X"):  # fmt: skip
        wait_for_others(share, tmp_path, "X", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = {"rank": 2, "num_ranks": 3, "status": "running", "host": "h", "pid": child.pid, "launcher": launcher()}
    path = tmp_path / f"{shard_name(2, 3)}.json"
    try:
        path.write_text(json.dumps(state), encoding="utf-8")
        with pytest.raises(SpecDiffError, match=r"nothing new of rank 2 \(h\)"):
            wait_for_others(share, tmp_path, "X", 0.2)
        child.kill()
        with pytest.raises(
            SpecDiffError, match=rf"rank 2 of 3 \(process {child.pid} on h\) has died; what was decoded"
        ):
            wait_for_others(share, tmp_path, "X", 60)  # a zombie
    finally:
        child.kill()
        child.wait()
    with pytest.raises(SpecDiffError, match=rf"rank 2 of 3 \(process {child.pid} on h\) has died"):
        wait_for_others(share, tmp_path, "X", 60)
    path.write_text(json.dumps(state | {"launcher": "another"}), encoding="utf-8")  # of an earlier start
    with pytest.raises(SpecDiffError, match="nothing new of rank 2"):
        wait_for_others(share, tmp_path, "X", 0.2)
    path.write_text(json.dumps(state | {"status": "failed", "error": "ConfigError: no"}), encoding="utf-8")
    with pytest.raises(SpecDiffError, match="has failed: ConfigError: no; what was decoded stays"):
        wait_for_others(share, tmp_path, "X", 60)


def test_records_that_arrive_keep_rank_0_waiting(tmp_path, monkeypatch):
    share, polls = Share(0, 2, True), []
    tell(share, tmp_path, "done")
    tell(Share(1, 2, True), tmp_path, "running")
    (tmp_path / "001-of-002").mkdir()

    def poll(seconds: float) -> None:
        polls.append(seconds)
        with (tmp_path / "001-of-002" / RECORDS_FILE).open("a", encoding="utf-8") as file:
            file.write("{}\n")
        if len(polls) == 5:
            tell(Share(1, 2, True), tmp_path, "done")

    monkeypatch.setattr("specdiff2.runtime.rank_files.time.sleep", poll)
    wait_for_others(share, tmp_path, "X", 0.0)
    assert len(polls) == 5


def test_a_lock_is_free_again_when_its_process_is_gone(tmp_path):
    path = tmp_path / "lock"
    code = (
        f"import fcntl; f = open({str(path)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        assert take_lock(path, wait=False) is None
    finally:
        child.kill()
        child.wait()
    lock = take_lock(path, wait=False)
    assert lock is not None
    lock.close()


def test_state_says_who_and_where(tmp_path):
    tell(Share(1, 2, True), tmp_path, "failed", error="x")
    state = json.loads((tmp_path / "001-of-002.json").read_text(encoding="utf-8"))
    assert (state["rank"], state["status"], state["pid"], state["error"]) == (1, "failed", os.getpid(), "x")
    assert str(os.getppid()) in state["launcher"] and state["host"] in state["launcher"]
