"""The rollout store: killed, corrupted, mismatched, full disk, two writers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import tracemalloc
from functools import partial

import pytest
from helpers import byte_tokenizer, tiny_verifier

from specdiff2.data import id_digests, rollout_files
from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts, rollout_fingerprint
from specdiff2.data.prompt import Prompt
from specdiff2.data.rollouts import RolloutStore, read_manifest
from specdiff2.runtime.prompts import LoadedPrompts
from specdiff2.runtime.rollouts import ensure_rollouts
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, Rollout, StorageError

FINGERPRINT = {"verifier": "v1", "temperatures": [1.0], "prompts": {"source": "x", "seed": 0}}


def rollout(index: int, length: int = 3) -> Rollout:
    return Rollout(f"r{index}", [1, 2], list(range(length)), 1.0, {"prompt_id": f"p{index}"})


def filled(folder, count: int = 4, **kwargs) -> RolloutStore:
    store = RolloutStore(folder, FINGERPRINT, **kwargs)
    for index in range(count):
        store.append([rollout(index)])
    store.close()
    return store


def test_round_trip_and_shards(tmp_path):
    store = filled(tmp_path / "deep" / "store", 5, max_shard_bytes=250)
    assert len(list(store.folder.glob("shard-*.jsonl"))) > 1
    assert all(path.stat().st_size <= 250 for path in store.folder.glob("shard-*.jsonl"))
    again = RolloutStore(store.folder, FINGERPRINT)
    assert again.load() == [rollout(index) for index in range(5)]
    assert len(again) == 5 and again.ids() == {f"r{i}" for i in range(5)}
    assert not list(store.folder.glob("*.tmp"))
    json.loads((store.folder / "manifest.json").read_text(encoding="utf-8"))


def test_ids_are_unique(tmp_path):
    store = filled(tmp_path)
    for rows in ([rollout(9), rollout(2)], [rollout(9), rollout(9)]):
        with pytest.raises(ConfigError, match="must be unique"):
            store.append(rows)
    assert len(store) == 4, "all of a batch or nothing"


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_half_a_line_is_dropped_with_a_warning(tmp_path, caplog, cut):
    filled(tmp_path)
    shard = tmp_path / "shard-00000.jsonl"
    with open(shard, "ab") as file:
        file.write(rollout_files.encode_rollout(rollout(4))[:cut])
    reader = RolloutStore(tmp_path, FINGERPRINT)
    assert len(reader.load()) == 4
    assert not shard.read_bytes().endswith(b"\n"), "a reader changes nothing"
    with caplog.at_level(logging.WARNING):
        reader.append([rollout(4)])
    assert "unfinished" in caplog.text and "shard-00000.jsonl" in caplog.text
    assert reader.load() == [rollout(index) for index in range(5)]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b'{"rollout_id": "r2", "temp', "not valid JSON"),
        (b'{"rollout_id":"r2"}', "not a rollout"),
        (b'{"rollout_id":"r2","temperature":1.0,"prompt_ids":[1],"completion_ids":[-4],"meta":{}}', "not a rollout"),
        (b"\x00\x00\xff", "not UTF-8"),
        (b"", "not valid JSON"),
        (rollout_files.encode_rollout(rollout(0)).strip(), "there twice"),
    ],
)
def test_a_corrupt_line_is_named_with_the_remedy(tmp_path, damage, says):
    filled(tmp_path)
    shard = tmp_path / "shard-00000.jsonl"
    lines = shard.read_bytes().split(b"\n")
    lines[2] = damage
    shard.write_bytes(b"\n".join(lines))
    store = RolloutStore(tmp_path, FINGERPRINT)
    with pytest.raises(CorruptFileError, match=rf"shard-00000\.jsonl:3: .*{says}.*delete this line"):
        store.load()
    before = shard.read_bytes()
    with pytest.raises(CorruptFileError):
        store.append([rollout(9)])
    assert shard.read_bytes() == before


def test_a_cut_line_in_an_earlier_shard_is_corrupt(tmp_path):
    store = filled(tmp_path, 5, max_shard_bytes=250)
    first = tmp_path / "shard-00000.jsonl"
    first.write_bytes(first.read_bytes()[:-5])
    with pytest.raises(CorruptFileError, match=r"shard-00000\.jsonl:\d+: the line is cut off"):
        store.load()


def test_other_origin_is_refused_naming_key_and_values(tmp_path):
    filled(tmp_path)
    for change, message in [
        ({"temperatures": [0.0]}, r"temperatures was \[1.0\], now it is \[0.0\]"),
        ({"prompts": {"source": "x", "seed": 1}}, r"prompts.seed was 0, now it is 1"),
        ({"extra": 1}, r"extra was '\(absent\)', now it is 1"),
    ]:
        with pytest.raises(MismatchError, match=message + ".*new folder or delete"):
            RolloutStore(tmp_path, FINGERPRINT | change)
    with pytest.raises(MismatchError, match="verifier was 'v1'"):
        RolloutStore(tmp_path, {key: value for key, value in FINGERPRINT.items() if key != "verifier"})


def test_open_checks_only_what_is_expected(tmp_path):
    filled(tmp_path)
    assert len(RolloutStore.open(tmp_path, {"verifier": "v1"})) == 4
    with pytest.raises(MismatchError, match="verifier was 'v1', now it is 'v2'"):
        RolloutStore.open(tmp_path, {"verifier": "v2"})
    with pytest.raises(ConfigError, match="no rollouts there"):
        RolloutStore.open(tmp_path / "nothing")


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": 1}', '{"format": 99, "fingerprint": {}}'])
def test_unreadable_manifest(tmp_path, content):
    filled(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content, encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"manifest\.json"):
        RolloutStore(tmp_path, FINGERPRINT)


# ---------------------------------------------------------------- full disk
def test_full_disk_loses_nothing(tmp_path, monkeypatch):
    store = filled(tmp_path)
    shard = tmp_path / "shard-00000.jsonl"
    before = shard.read_bytes()

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(rollout_files.os, "fsync", no_space)
        with pytest.raises(StorageError, match=r"shard-00000\.jsonl: No space left on device.*intact.*make room"):
            store.append([rollout(4)])
    assert shard.read_bytes() == before
    store.append([rollout(4)])
    assert len(store.load()) == 5


def _append_until_refused(folder, limit) -> None:
    """A real refusal by the kernel: files cannot grow beyond ``limit``, so the write is partial, then fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = RolloutStore(folder, FINGERPRINT)
    try:
        store.append([rollout(4, length=400)])
    except StorageError:
        os._exit(7)
    os._exit(0)


def _run(target, *args) -> int:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(20)
    return process.exitcode


def test_partial_write_is_taken_back(tmp_path):
    store = filled(tmp_path)
    before = (tmp_path / "shard-00000.jsonl").read_bytes()
    assert _run(_append_until_refused, tmp_path, len(before) + 100) == 7
    assert (tmp_path / "shard-00000.jsonl").read_bytes() == before
    assert len(store.load()) == 4


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        RolloutStore(tmp_path / "file" / "store", FINGERPRINT)


# ---------------------------------------------------------------- two writers
def _append_one(folder, index) -> None:
    RolloutStore(folder, FINGERPRINT).append([rollout(index)])


def test_a_second_writer_has_shards_of_its_own(tmp_path):
    store = RolloutStore(tmp_path, FINGERPRINT)
    store.append([rollout(0)])
    assert _run(_append_one, tmp_path, 1) == 0, "does not wait for the first one"
    assert RolloutStore(tmp_path, FINGERPRINT).ids() == {"r0", "r1"}
    store.append([rollout(2)])
    with pytest.raises(ConfigError, match="'r1': already in"):
        store.append([rollout(1)])
    store.close()
    assert _run(_append_one, tmp_path, 3) == 0, "takes the place that is free again"
    assert [path.name for path in rollout_files.list_shards(tmp_path)] == [
        "shard-00000.jsonl",
        "shard-w001-00000.jsonl",
    ]
    assert [r.rollout_id for r in store.load()] == ["r0", "r2", "r3", "r1"]


def test_every_writer_may_leave_half_a_line(tmp_path, caplog):
    """Readers skip them; who starts to write cuts those of dead writers, and leaves that of a living one alone."""
    filled(tmp_path, 2)
    half = rollout_files.encode_rollout(rollout(9))[:30]
    dead, alive = rollout_files.shard_path(tmp_path, 1, 0), rollout_files.shard_path(tmp_path, 2, 0)
    for path, index in ((dead, 2), (alive, 3)):
        path.write_bytes(rollout_files.encode_rollout(rollout(index)) + half)
    store = RolloutStore(tmp_path, FINGERPRINT)
    assert [r.rollout_id for r in store.load()] == ["r0", "r1", "r2", "r3"]
    with open(tmp_path / ".writer-002.lock", "ab") as held, caplog.at_level(logging.WARNING):
        fcntl.flock(held, fcntl.LOCK_EX)
        store.append([rollout(4)])
    assert caplog.text.count("unfinished") == 1 and dead.name in caplog.text
    assert dead.read_bytes().endswith(b"\n") and alive.read_bytes().endswith(half)
    store.close()
    dead.rename(rollout_files.shard_path(tmp_path, 2, 1))  # now the half line is not the end of that writer's shards
    with pytest.raises(CorruptFileError, match=r"shard-w002-00000\.jsonl:2: the line is cut off"):
        store.load()


def test_a_writer_follows_what_others_take_back(tmp_path):
    """A batch that could not be synced is cut off again, maybe after others have read it."""
    filled(tmp_path, 3)
    other = RolloutStore(tmp_path, FINGERPRINT)
    other.lock()
    shard = tmp_path / "shard-00000.jsonl"
    os.truncate(shard, len(rollout_files.encode_rollout(rollout(0))))
    assert other.holds(["r0", "r2"]) == [True, True] and other.num_known == 3
    other.refresh()
    assert other.holds(["r0", "r2"]) == [True, False] and other.num_known == 1
    other.append([rollout(2)])
    assert other.ids() == {"r0", "r2"}


def test_complete_means_as_the_manifest_says(tmp_path):
    store = RolloutStore(tmp_path, FINGERPRINT)
    store.append([Rollout("a", [1], [5, 6, 7], 0.0, {"finish_reason": "stop"}), rollout(1)])
    assert not store.is_complete()
    store.note_complete([{"engine": "x"}])
    said = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))["complete"]
    assert (said["num_rollouts"], said["num_tokens"], said["meta"]) == (2, 6, {"finish_reason": {"stop": 1}})
    size = (tmp_path / "shard-00000.jsonl").stat().st_size
    assert said["shards"] == {"shard-00000.jsonl": {"bytes": size, "num_rollouts": 2, "num_tokens": 6}}
    assert store.is_complete() and store.is_complete(2) and not store.is_complete(3)
    store.append([rollout(2)])
    assert not store.is_complete()
    assert read_manifest(tmp_path) == FINGERPRINT


def test_ids_take_eight_bytes_each(monkeypatch):
    monkeypatch.setattr(id_digests, "_MAX_PENDING", 1000)
    ids, names = id_digests.IdDigests(), [f"prompt-{n}/T0/0" for n in range(30_000)]
    tracemalloc.start()
    assert all(ids.add(name) for name in names)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 30_000 * 8 + 250_000, "the rest is the set that waits to be sorted in"
    assert len(ids) == 30_000 and not any(ids.add(name) for name in names[::1000])
    assert ids.holds(["other", names[0], names[-1]]) == [False, True, True]


# ---------------------------------------------------------------- how prompts were written
# the manifest of a store that was sampled from SmolLM2 before thinking modes were known; its folder is train-7b9f1b8f
RECORDED = {
    "chat_template": "872be49dbb638044",
    "max_new_tokens": 160,
    "prompts": {
        "num_prompts": 512,
        "reasoning_gym": "0.1.25",
        "seed": 0,
        "source": "gsm_symbolic",
        "split": "train",
        "templates": "seen",
    },
    "samples_per_prompt": 1,
    "seed": 0,
    "temperatures": [1.0],
    "tokenizer": "a0f943b3e000447b8508ec62d6766530",
    "top_k": 0,
    "top_p": 1.0,
    "verifier": "d0b19ca26b66a3ad68cd6a2688493764",
}


def test_a_store_of_a_template_without_the_mode_keeps_its_fingerprint():
    arguments = {key: value for key, value in RECORDED.items() if key not in ("thinking", "bos")}
    assert rollout_fingerprint(**arguments, thinking=None, bos=None) == RECORDED
    assert hashlib.sha256(json.dumps(RECORDED, sort_keys=True).encode()).hexdigest()[:8] == "7b9f1b8f"
    for key, value in (("thinking", "default"), ("thinking", False), ("bos", 0)):
        assert rollout_fingerprint(**arguments, **{key: value}) == RECORDED | {key: value}


@pytest.mark.real
def test_smollm2s_template_adds_nothing_to_the_fingerprint(smollm2):
    encoder = ChatEncoder.of(smollm2)
    assert (encoder.fingerprint, encoder.thinking_mode, encoder.bos) == (RECORDED["chat_template"], None, None)


def thinking_store(folder, thinking, *, named: bool = True) -> RolloutStore:
    """One rollout of a tiny verifier whose template has a thinking mode."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token + messages[0]['content'] }}{% if not (enable_thinking | default(true)) %}</think>{% endif %}"
    )
    verifier = tiny_verifier(300, tokenizer=tokenizer, thinking=thinking)
    loaded = LoadedPrompts([Prompt("p", [{"role": "user", "content": "hi"}])], {"source": "test"})
    generate = partial(generate_rollouts, max_new_tokens=3, progress=False)
    return ensure_rollouts(verifier, loaded, generate, folder, named=named)


def test_a_store_of_another_thinking_mode_is_refused(tmp_path):
    store = thinking_store(tmp_path / "store", False)
    assert store.fingerprint["thinking"] is False and store.fingerprint["bos"] == 1
    (rollout,) = store.load()
    assert byte_tokenizer().decode(rollout.prompt_ids) == "<s>hi</think>"
    assert len(thinking_store(tmp_path / "store", False)) == 1  # the same mode goes on
    for other, shown in ((True, "True"), (None, "'default'")):
        with pytest.raises(MismatchError, match=f"thinking was False, now it is {shown}"):
            thinking_store(tmp_path / "store", other)


def test_each_thinking_mode_has_an_unnamed_store_of_its_own(tmp_path):
    stores = [thinking_store(tmp_path / "store", mode, named=False) for mode in (None, True, False)]
    assert len({store.folder for store in stores}) == 3
