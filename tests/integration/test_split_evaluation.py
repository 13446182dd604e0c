"""One evaluation by several real processes, killed and continued: the records and numbers of a single process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from entry_runs import ROOT, Options, evaluate_here, strict_json

from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.evaluation.shards import MERGED_FILE, SHARDS, is_pending
from specdiff2.types import ConfigError, MismatchError, SpecDiffError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SETTINGS = [
    "drafter=untrained",
    "benchmark.limit=8",
    "max_new_tokens=120",
    "sampler.K=2",
    "sampler.gamma=3",
    "threads=1",
]
TIMED = ("_s", "_ms", "_ci", "speedup", "speedup_paper", "overhead")  # endings of what differs from run to run
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def measured(run: Path) -> list[dict[str, Any]]:
    """The merged records without what measures time."""
    records = [json.loads(one.to_json()) for one in read_records(run / RECORDS_FILE) if not one.warmup]
    for record in records:
        record["rounds"] = [numbers[:4] for numbers in record["rounds"]]
        for key in ("prefill_s", "decode_s", "order"):
            record.pop(key)
    return sorted(records, key=lambda one: (one["prompt_index"], one["method"] != "autoregressive"))


def numbers(run: Path) -> list[dict[str, Any]]:
    rows = strict_json(run / "summary.json")["rows"]
    return [{key: value for key, value in row.items() if not key.endswith(TIMED)} for row in rows]


def assert_same(run: Path, whole: Path) -> None:
    """Records in the order of the prompts, each generation once, tokens and statistics of one process."""
    keys = [
        (one["prompt_index"], one["method"]) for one in map(json.loads, (run / RECORDS_FILE).open(encoding="utf-8"))
    ]
    assert keys == sorted(set(keys)) and len(keys) == 16
    assert measured(run) == measured(whole)
    assert numbers(run) == numbers(whole)
    ours, theirs = (strict_json(folder / "benchmark.json") for folder in (run, whole))
    assert ours == theirs
    assert (run / "report.html").is_file() and not is_pending(run)


def num_records(run: Path, shard: str = "*") -> int:
    return sum(path.read_bytes().count(b"\n") for path in (run / SHARDS).glob(f"{shard}/{RECORDS_FILE}"))


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} in {seconds} seconds"
        time.sleep(0.02)


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which dies with the block."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env={**base, **environment},
                                   start_new_session=True)  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def state(run: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    path = run / SHARDS / f"{rank:03d}-of-{num_ranks:03d}.json"
    return strict_json(path) if path.is_file() else {}


@pytest.fixture(scope="module")
def options(tiny_options: Options) -> Options:
    return {"eval": [*tiny_options["eval"], *SETTINGS]}


@pytest.fixture(scope="module")
def whole(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a single process."""
    return evaluate_here(options, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def command(options: Options, tmp_path: Path) -> tuple[Path, list[str]]:
    """The run folder, and the arguments of a process that writes to it."""
    arguments = [str(ROOT / "eval.py"), *options["eval"], f"paths.outputs={tmp_path}", "run_id=r"]
    return tmp_path / "eval" / "r", [*arguments, f"paths.cache={tmp_path}"]


def test_rank_killed_under_torchrun_and_continued_by_two_others(command, options, whole, tmp_path):
    """torchrun stops rank 0 when rank 1 is killed; shards 0/3, 1/3 and 2/3 without a launcher decode the rest."""
    run, arguments = command
    with started([*TORCHRUN, *arguments], tmp_path / "log") as launcher:
        wait_until(lambda: num_records(run, "001-of-002") >= 4, "records of rank 1")
        os.kill(state(run, 1, 2)["pid"], signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
    told = (tmp_path / "log").read_text(encoding="utf-8")
    victim = state(run, 1, 2)["pid"]
    assert f"rank 1 (process {victim}) has died; rank 0 of 2 was stopped by SIGTERM" in told or (
        f"rank 1 of 2 (process {victim}" in told and "has died" in told  # rank 0 was waiting already
    )
    assert "run_id=r to go on" in told
    assert is_pending(run) and strict_json(run / "status.json")["status"] != "done"
    before = {path: path.read_bytes() for path in (run / SHARDS).glob(f"*-of-002/{RECORDS_FILE}")}
    for shard in ("2/3", "0/3"):
        evaluate_here(options, run, f"shard={shard}")
        assert is_pending(run), "the last one merges"
    evaluate_here(options, run, "shard=1/3")
    assert_same(run, whole)
    assert all(path.read_bytes() == content for path, content in before.items())
    decoded = [record for path in (run / SHARDS).glob(f"*-of-003/{RECORDS_FILE}") for record in read_records(path)]
    done = sum(not record.warmup for path in before for record in read_records(path))
    assert 4 <= sum(not record.warmup for record in decoded) == 16 - done, "only what was missing"
    split = strict_json(run / "run.json")["split"]
    assert split == strict_json(run / "summary.json")["split"]
    assert sum(rank["num_generations"] for rank in split["ranks"]) == 16 and split["differing"] == {}
    assert all(rank["machine"] and rank["host"] and rank["threads"] == 1 for rank in split["ranks"])


def test_rank_killed_in_a_slurm_step_is_named_by_rank_0(command, options, whole, tmp_path):
    """srun leaves the other tasks alone: rank 0 finds out by itself; the same command with one process finishes."""
    run, arguments = command
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    ranks = [{**step, "SLURM_PROCID": str(rank)} for rank in range(2)]
    python = [sys.executable, *arguments]
    with started(python, tmp_path / "0", **ranks[0]) as first, started(python, tmp_path / "1", **ranks[1]) as second:
        wait_until(lambda: num_records(run, "001-of-002") >= 3, "records of rank 1")
        second.kill()
        second.wait()
        assert first.wait(timeout=120) == 1
    told = (tmp_path / "0").read_text(encoding="utf-8")
    assert f"rank 1 of 2 (process {second.pid} on" in told and "has died; what was decoded stays" in told
    assert "run_id=r to go on, with any number of processes" in told
    assert (tmp_path / "1").read_text(encoding="utf-8") == "", "one process speaks"
    evaluate_here(options, run)
    assert_same(run, whole)


def test_launcher_killed(command, options, whole, tmp_path, monkeypatch):
    """Its processes go on, finish and merge; a second start beside them is refused."""
    run, arguments = command
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with started([*TORCHRUN, *arguments], tmp_path / "log") as launcher:
        wait_until(lambda: num_records(run) >= 3, "records")
        launcher.kill()
        orphan = state(run, 0, 2)["pid"]
        os.kill(orphan, signal.SIGSTOP)
        with pytest.raises(SpecDiffError, match=f"rank 0 of 2 still runs as process {orphan} on"):
            evaluate_here(options, run)
        os.kill(orphan, signal.SIGCONT)
        wait_until(lambda: (run / SHARDS / MERGED_FILE).is_file(), "merged records")
    assert_same(run, whole)


def test_settings_of_all_processes_must_agree(options, tmp_path):
    few = [*options["eval"], "benchmark.limit=2", "max_new_tokens=4"]
    evaluate_here({"eval": few}, tmp_path, "shard=0/2")
    with pytest.raises(MismatchError, match="max_new_tokens=4, now max_new_tokens=5"):
        evaluate_here({"eval": few}, tmp_path, "shard=1/2", "max_new_tokens=5")
    with pytest.raises(MismatchError, match="num_prompts=2, now num_prompts=3"):
        evaluate_here({"eval": few}, tmp_path, "shard=1/2", "benchmark.limit=3")
    with pytest.raises(ConfigError, match="prompt='a' and 2 processes that split prompts: expected prompt=null"):
        evaluate_here({"eval": few}, tmp_path, "shard=1/2", "prompt=a")
    evaluate_here({"eval": few}, tmp_path, "shard=1/2")
    assert [record.prompt_index for record in read_records(tmp_path / RECORDS_FILE)] == [0, 0, 1, 1]


def test_what_one_process_began_several_finish(options, whole, tmp_path):
    """A killed single run is continued by two shards; its own records stay."""
    begun = shutil.copytree(whole, tmp_path / "run")
    lines = (begun / RECORDS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("summary.json", "report.html"):
        (begun / name).unlink()
    (begun / RECORDS_FILE).write_text("".join(lines[:7]) + lines[7][:30], encoding="utf-8")
    for shard in range(2):
        evaluate_here(options, begun, f"shard={shard}/2")
    assert_same(begun, whole)
    merged = (begun / RECORDS_FILE).read_text(encoding="utf-8")
    kept = [json.loads(line) for line in lines[:7]]
    assert all(json.dumps(one, ensure_ascii=False) + "\n" in merged for one in kept if not one["warmup"])


def test_batch_sizes_end_to_end(options, whole, tmp_path):
    """Every batch size gives the tokens of one by one, and a row, a curve and a line of the CSV."""
    run = evaluate_here(options, tmp_path / "run", "batch_sizes=[3,4]", "max_new_tokens=30")
    summary = strict_json(run / "summary.json")
    rows = {row["method"]: row for row in summary["rows"]}
    assert list(rows) == [
        f"{name}{end}" for end in ("", "_batch-3", "_batch-4") for name in ("autoregressive", "specdiff2")
    ]
    for name, row in rows.items():
        assert row["num_prompts"] == 8 and row["tokens_per_s"] > 0 and row["gain_over_single"] > 0
        assert (row["lossless_check"] or {"identical": 8})["identical"] == 8
        assert row["speedup_ci"] if name.startswith("specdiff2") else row["speedup"] == 1.0
    tokens = {(one.prompt_id, one.method): one.tokens for one in read_records(run / RECORDS_FILE)}
    for record in read_records(whole / RECORDS_FILE):
        if not record.warmup:
            assert tokens[record.prompt_id, f"{record.method}_batch-3"] == record.tokens[:30]
    assert (run / "batch_sizes.csv").read_text(encoding="utf-8").count("\n") == 7
    assert "tokens_per_s by batch size" in (run / "report.html").read_text(encoding="utf-8")
    assert evaluate_here(options, run, "batch_sizes=[3,4]", "max_new_tokens=30") == run  # nothing is decoded again
    with pytest.raises(ConfigError, match=r"batch_sizes=\[2\] and 2 processes that split prompts"):
        evaluate_here(options, tmp_path / "other", "batch_sizes=[2]", "shard=0/2")
    with pytest.raises(ConfigError, match=r"runtime.compile=true with batch_sizes=\[2\]"):
        evaluate_here(options, tmp_path / "other", "batch_sizes=[2]", "runtime.compile=true")
