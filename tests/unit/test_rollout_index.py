"""The index over a rollout store: same rollouts and same errors as reading everything, kept, continued, made again."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import signal

import numpy as np
import pytest

from specdiff2.data import lazy_rollouts, rollout_index
from specdiff2.data.lazy_rollouts import FACTS, ids_digest, joined_ids_digest, row_facts
from specdiff2.data.rollout_files import decode_rollout, encode_rollout, shard_path
from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollout_scan import read_shards
from specdiff2.data.windows import draft_vocabulary, usable_rollouts
from specdiff2.types import ConfigError, CorruptFileError, Rollout, StorageError


def rollout(index: int, completion: int = 3) -> Rollout:
    ids = list(range(100 * index, 100 * index + 50))
    return Rollout(f"r{index}", ids[: 1 + index % 4], ids[10 : 10 + completion], 0.5, {"prompt_id": f"p{index} \u2028"})


def write(folder, writer: int, shard: int, rollouts, *, end: bytes = b"", mode: str = "wb") -> None:
    folder.mkdir(exist_ok=True)
    with open(shard_path(folder, writer, shard), mode) as file:
        file.write(b"".join(map(encode_rollout, rollouts)) + end)


ROWS = [rollout(index, completion=index % 7) for index in range(30)]


@pytest.fixture
def store(tmp_path):
    """Two writers, three shards; the first writer is in the middle of a line."""
    write(tmp_path, 0, 0, ROWS[:10])
    write(tmp_path, 0, 1, ROWS[10:16], end=encode_rollout(rollout(90))[:-9])
    write(tmp_path, 1, 0, ROWS[16:])
    return tmp_path


def built(folder) -> tuple[int, int]:
    """Changes when the table is written again."""
    status = (folder / ".index" / "rows.bin").stat()
    return status.st_ino, status.st_mtime_ns


def test_it_is_the_sequence_of_the_stores_rollouts(store):
    index = open_index(store)
    assert list(index) == ROWS == list(read_shards(store))
    assert len(index) == 30 and index[3] == ROWS[3] and index[-1] == ROWS[-1] and index[4:25:7] == ROWS[4:25:7]
    assert [index[row] for row in (29, 0, 16, 15, 10, 9)] == [ROWS[row] for row in (29, 0, 16, 15, 10, 9)]
    for wrong in (30, -31):
        with pytest.raises(IndexError):
            index[wrong]
    for rows in (np.arange(30), np.array([29, 0, 7, 7]), np.array([5]), np.array([], dtype=int)):
        facts = index.facts(rows)
        assert facts[list(FACTS.names)].tolist() == row_facts(ROWS, rows).tolist()
    assert ids_digest(index) == ids_digest(ROWS) != ids_digest(ROWS[::-1])
    assert joined_ids_digest(index) == joined_ids_digest(ROWS)


def test_an_empty_store(tmp_path):
    assert len(open_index(tmp_path)) == 0 and list(open_index(tmp_path)) == []
    with pytest.raises(ConfigError, match="no rollout to train on: of 0"):
        usable_rollouts(open_index(tmp_path))


def test_facts_are_enough_for_what_is_usable(store):
    expected, drops = usable_rollouts(ROWS, max_length=8)
    index = open_index(store)
    for path in store.glob("shard-*"):
        path.write_bytes(b"")  # nothing can be read any more
    usable, lazy_drops = usable_rollouts(index, max_length=8)
    assert lazy_drops == drops and drops.num_empty and drops.num_too_long
    assert len(usable) == len(expected) and ids_digest(usable) == ids_digest(expected)
    with pytest.raises(CorruptFileError, match=r"shard-00000\.jsonl:2: not valid JSON"):
        usable[0]


def test_chosen_rollouts_and_the_draft_vocabulary(store):
    index = open_index(store)
    usable, _ = usable_rollouts(index, max_length=8)
    assert list(usable) == list(usable_rollouts(ROWS, max_length=8)[0]) == usable[:]
    assert draft_vocabulary(index, 9, [1]) == draft_vocabulary(ROWS, 9, [1])


# ---------------------------------------------------------------- kept, continued, made again
def test_an_index_is_kept_while_nothing_changes(store):
    before = open_index(store), built(store)
    shard = store / "shard-00000.jsonl"
    status, text = shard.stat(), shard.read_bytes()
    shard.write_bytes(b"x" * (len(text) - 1) + b"\n")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(open_index(store)) == 30 and built(store) == before[1], "same size, same time: not opened"
    os.utime(shard)
    with pytest.raises(CorruptFileError, match=r"shard-00000\.jsonl:1: not valid JSON"):
        open_index(store)
    shard.write_bytes(text)
    os.utime(shard, ns=(1, 1))
    assert list(open_index(store)) == ROWS, "a copy of the store has other times"


def test_only_new_lines_are_read_when_shards_grow(store, monkeypatch):
    small = open_index(store)
    write(store, 1, 0, [rollout(40)], mode="ab")
    with open(store / "shard-00001.jsonl", "ab") as file:  # the unfinished line is finished
        file.write(encode_rollout(rollout(90))[-9:])
    write(store, 0, 2, [rollout(41)])  # comes between the shards that were there
    parsed = []
    monkeypatch.setattr(
        "specdiff2.data.rollout_indexing.decode_rollout",
        lambda line, where: parsed.append(where.rpartition("/")[2]) or decode_rollout(line, where),
    )
    index = open_index(store)
    assert parsed == ["shard-00001.jsonl:7", "shard-00002.jsonl:1", "shard-w001-00000.jsonl:15"]
    assert list(index) == [*ROWS[:16], rollout(90), rollout(41), *ROWS[16:], rollout(40)] == list(read_shards(store))
    assert [index[row] for row in range(len(index))] == list(index)
    assert list(small) == ROWS and small[29] == ROWS[29], "what is open stays as it was"


def test_shards_that_changed_otherwise_are_read_anew(store):
    open_index(store)
    first, second = store / "shard-00000.jsonl", store / "shard-w001-00000.jsonl"
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join([*lines[:4], *lines[5:]]))  # a line deleted by hand
    second.write_bytes(second.read_bytes().replace(b"r20", b"r77"))
    index = open_index(store)
    assert list(index) == list(read_shards(store)) and len(index) == 29
    assert index[19].rollout_id == "r77" and index[4] == ROWS[5]
    second.unlink()
    assert list(open_index(store)) == list(read_shards(store))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:100], lambda data: b"x" * 64 + data,
                                    lambda data: data[:-8] + b"\xff" * 8, lambda data: data[28:]])  # fmt: skip
def test_a_damaged_index_is_made_again(store, damage, caplog):
    open_index(store)
    path = store / ".index" / "rows.bin"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert list(open_index(store)) == ROWS
    assert "rows.bin: not an index that this version can read" in caplog.text
    caplog.clear()
    assert list(open_index(store)) == ROWS and not caplog.text


def test_an_index_of_another_version_is_made_again(store):
    open_index(store)
    path = store / ".index" / "rows.bin"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"version": 1', b'"version": 7'))
    open_index(store)
    assert path.read_bytes() == data


def test_a_store_that_cannot_be_written(store, caplog):
    (store / ".index").write_text("in the way", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        index = open_index(store)
    assert "cannot be written" in caplog.text and "as long as this process" in caplog.text
    assert list(index) == ROWS and index[20] == ROWS[20] and index.facts(np.arange(30))["num_completion"].sum() > 0
    assert sorted(path.name for path in store.iterdir() if not path.suffix) == [".index"]


def test_more_shards_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_index, "MAX_OPEN_SHARDS", 2)
    for number, row in enumerate(ROWS):
        write(tmp_path, number % 3, number // 3, [row])
    index = open_index(tmp_path)
    expected = list(read_shards(tmp_path))
    for row in np.random.default_rng(0).integers(0, 30, 200).tolist():
        assert index[row] == expected[row] and len(index._open) <= 2


# ---------------------------------------------------------------- errors
def message(action) -> str:
    with pytest.raises(CorruptFileError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    "damage", [b'{"rollout_id": "r2", "temp', b'{"rollout_id":"r2"}', b"\x00\xff", b"", encode_rollout(ROWS[0])[:-1]]
)
def test_the_errors_are_those_of_reading_everything(store, damage):
    shard = store / "shard-w001-00000.jsonl"
    lines = shard.read_bytes().split(b"\n")
    lines[2] = damage
    shard.write_bytes(b"\n".join(lines))
    for _ in range(2):  # nothing is kept of a damaged store
        assert message(lambda: open_index(store)) == message(lambda: list(read_shards(store)))
        assert f"{shard}:3: " in message(lambda: open_index(store))
        assert sorted(path.name for path in (store / ".index").iterdir()) == [".lock"]


def test_a_cut_line_before_a_writers_last_shard(store):
    open_index(store)
    write(store, 0, 2, [rollout(41)])
    assert "shard-00001.jsonl:7: the line is cut off" in message(lambda: open_index(store))


def test_an_id_that_comes_again_later(store):
    open_index(store)
    write(store, 1, 1, [rollout(50), ROWS[12]])
    assert f"{store / 'shard-w001-00001.jsonl'}:2: rollout 'r12' is there twice" in message(lambda: open_index(store))


def test_a_shard_that_changes_under_an_open_index(store):
    index = open_index(store)
    shard = store / "shard-00000.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b'"r3"', b'"r8"'))
    assert index[2] == ROWS[2]
    assert "shard-00000.jsonl:4: the file has changed since it was indexed" in message(lambda: index[3])


def test_two_ids_with_one_digest_are_two_rollouts(store, monkeypatch):
    monkeypatch.setattr(lazy_rollouts, "digest", lambda rollout_id: len(rollout_id))
    assert list(open_index(store)) == ROWS
    write(store, 1, 1, [ROWS[3]])
    assert "'r3' is there twice" in message(lambda: open_index(store))


def _open_with_little_room(folder) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
    try:
        open_index(folder)
    except StorageError as error:
        os._exit(7 if "rows.bin" in str(error) else 8)
    os._exit(0)


def _open_and_check(folder, gate) -> None:
    gate.wait(20)
    os._exit(0 if list(open_index(folder)) == ROWS else 1)


def exit_codes(*targets) -> list[int]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=args) for target, *args in targets]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_no_room_for_the_index(store):
    assert exit_codes((_open_with_little_room, store)) == [7]
    assert [path.name for path in (store / ".index").iterdir()] == [".lock"]
    assert list(open_index(store)) == ROWS


def test_many_processes_open_a_store_at_once(store):
    gate = multiprocessing.get_context("fork").Barrier(4)
    assert exit_codes(*[(_open_and_check, store, gate)] * 4) == [0] * 4
    assert sorted(path.name for path in (store / ".index").iterdir()) == [".lock", "rows.bin"]
    tail = (store / ".index" / "rows.bin").read_bytes()[30 * rollout_index.ROW.itemsize : -8]
    assert [shard["num_rows"] for shard in json.loads(tail)["shards"]] == [10, 6, 14]
