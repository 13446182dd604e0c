"""``engine=openai`` against a server with vLLM's and SGLang's token-id fields (``served_models.TokenServer``)."""

from __future__ import annotations

import json
import logging
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from served_models import TokenServer, save_model

from specdiff2.data import served, served_client
from specdiff2.data.generate import generate_rollouts
from specdiff2.data.prompt import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.served import ServedEngine
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.prompts import LoadedPrompts
from specdiff2.runtime.rollouts import ensure_rollouts
from specdiff2.types import ConfigError, MismatchError, SpecDiffError

PROMPTS = [Prompt(f"p{i}", [{"role": "user", "content": "and " * (i % 3) + f"what is {i}?"}]) for i in range(9)]
SAMPLING = dict(temperatures=[0.0], max_new_tokens=12, batch_size=4, progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def verifier(folder) -> HFVerifier:
    return HFVerifier.from_pretrained(str(folder), dtype="float32")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(served_client, "FIRST_PAUSE_S", 0.02)


def fill(store: Path, engine: ServedEngine, folder: Path, **changes) -> RolloutStore:
    """As ``rollout.py`` does: a verifier without weights, and the server's name for its origin."""
    verifier = HFVerifier.without_weights(str(folder), engine.origin)
    generate = partial(generate_rollouts, engine=engine, **(SAMPLING | changes))
    return ensure_rollouts(verifier, LoadedPrompts(PROMPTS, {"source": "test"}), generate, store, named=True)


def greedy(verifier: HFVerifier, store: Path, **changes) -> dict[str, list[int]]:
    generate = partial(generate_rollouts, **(SAMPLING | changes))
    made = ensure_rollouts(verifier, LoadedPrompts(PROMPTS, {"source": "test"}), generate, store, named=True)
    return completions(made)


def completions(store: RolloutStore) -> dict[str, list[int]]:
    return {rollout.rollout_id: rollout.completion_ids for rollout in store.load()}


def complete_part(store: RolloutStore) -> dict:
    return json.loads((store.folder / "manifest.json").read_text(encoding="utf-8"))["complete"]


@pytest.mark.parametrize("kind", ["token_ids", "logprobs", "sglang", "text", "chat"])
def test_greedy_rollouts_are_the_verifiers_own_through_every_interface(tmp_path, folder, verifier, kind):
    expected = greedy(verifier, tmp_path / "own")
    server = TokenServer(verifier, kind)
    with server.running() as url:
        store = fill(tmp_path / "served", ServedEngine(url, concurrency=5), folder)
    assert completions(store) == expected
    assert any(ids[-1] == 2 for ids in expected.values()) and any(ids[-1] != 2 for ids in expected.values())
    said = complete_part(store)
    stops = sum(ids[-1] == 2 for ids in expected.values())
    assert said["meta"]["finish_reason"] == {"length": 9 - stops, "stop": stops}
    by_text = kind in ("text", "chat")
    assert said["meta"]["tokens"] == {"retokenized" if by_text else "server": 9}
    assert said["meta"].get("seam") == ({"ok": 9} if by_text else None)
    assert said["writers"][0]["interface"].startswith(kind)
    assert store.fingerprint["verifier"] == "served:tiny" and store.is_complete(9)
    assert 1 < server.most_at_once <= 5


def test_all_that_changes_the_law_is_sent(tmp_path, folder, verifier):
    law = dict(temperatures=[0.7], top_k=5, top_p=0.9, samples_per_prompt=2, seed=4)
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        first = completions(fill(tmp_path / "a", ServedEngine(url), folder, **law))
        probe, *bodies = server.bodies
        second = completions(fill(tmp_path / "b", ServedEngine(url, concurrency=2), folder, **law))
    assert first == second, "a rollout's seed depends on its id, not on the order of requests"
    assert len({body["seed"] for body in bodies}) == 18 and all(0 <= body["seed"] < 2**31 for body in bodies)
    assert probe["max_tokens"] == 1 and bodies[0]["max_tokens"] == 12
    expected = dict(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.0, frequency_penalty=0.0,
                    presence_penalty=0.0, min_p=0.0, min_tokens=0, ignore_eos=False)  # fmt: skip
    for body in bodies:
        assert {key: body[key] for key in expected} == expected
        assert all(type(token) is int for token in body["prompt"])


def test_faults_of_a_server_are_waited_out(tmp_path, folder, verifier):
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        engine = ServedEngine(url, concurrency=3, timeout_s=1.0, max_retries=6)
        fill(tmp_path / "probe", engine, folder)  # so that the faults meet requests, not the first look
        server.faults = [429, 500, "hang", "nonsense", 503, 502, 408]
        store = fill(tmp_path / "served", engine, folder)
    assert not server.faults and completions(store) == greedy(verifier, tmp_path / "own")


def test_a_lost_server_is_one_clear_error_and_the_rerun_goes_on(tmp_path, folder, verifier, monkeypatch):
    monkeypatch.setattr(served, "_FLUSH_ROLLOUTS", 1)
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        server.faults = [None] * 6 + [500] * 100  # the probe, then 5 answers
        engine = ServedEngine(url, concurrency=1, max_retries=2)
        with pytest.raises(SpecDiffError, match=rf"{url}/completions: given up after 3 tries.*500.*5 of 9 rollouts are "
                           "in .*run the same command again"):  # fmt: skip
            fill(tmp_path / "served", engine, folder)
        assert len(RolloutStore.open(tmp_path / "served")) == 5
        server.faults, server.bodies = [], []
        store = fill(tmp_path / "served", engine, folder)
        assert len(server.bodies) == 4, "only what was missing"
    assert completions(store) == greedy(verifier, tmp_path / "own")
    with pytest.raises(SpecDiffError, match=rf"{url}/completions: given up after 3 tries.*Connect.*0 of 9 rollouts"):
        fill(tmp_path / "none", engine, folder)


def test_several_servers_share_the_work_and_one_may_die(tmp_path, folder, verifier):
    servers = [TokenServer(verifier, "token_ids") for _ in range(2)]
    with servers[0].running() as a, servers[1].running() as b:
        engine = ServedEngine([a, b, "http://127.0.0.1:9/v1"], model="tiny", concurrency=4, max_retries=3)
        store = fill(tmp_path / "served", engine, folder)
    assert completions(store) == greedy(verifier, tmp_path / "own")
    assert all(len(server.bodies) > 1 for server in servers)


def test_keys_and_their_refusal(tmp_path, folder, verifier, monkeypatch):
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        server.faults = [401] * 20
        with pytest.raises(ConfigError, match=r"engine\.interface=auto: not to be had from .*tried:\n.*401: try later"):
            fill(tmp_path / "served", ServedEngine(url, max_retries=5), folder)
        assert len(server.bodies) < 20 and server.keys == {None}
        server.faults = []
        monkeypatch.setenv("OUR_KEY", "secret")
        store = fill(tmp_path / "served", ServedEngine(url, api_key_env="OUR_KEY"), folder)
        assert server.keys == {None, "Bearer secret"}
        assert "secret" not in (store.folder / "manifest.json").read_text(encoding="utf-8")
        with pytest.raises(ConfigError, match="NO_SUCH_KEY: no such environment variable"):
            ServedEngine(url, api_key_env="NO_SUCH_KEY")


def test_a_server_with_another_tokenizer_is_refused(tmp_path, folder, verifier):
    class Other(TokenServer):
        def _openai(self, body):
            answer = super()._openai(body)
            if body["max_tokens"] > 1:
                answer["usage"]["prompt_tokens"] += 1
            return answer

    class Larger(TokenServer):
        def _openai(self, body):
            answer = super()._openai(body)
            if body["max_tokens"] > 1:
                answer["choices"][0]["token_ids"][0] = 1000
            return answer

    for kind, says in ((Other, r"counts \d+ tokens in a prompt of \d+"), (Larger, "token id 1000, the verifier has")):
        with kind(verifier, "token_ids").running() as url, pytest.raises(MismatchError, match=says):
            fill(tmp_path / kind.__name__, ServedEngine(url), folder)


def test_training_takes_a_served_store_only_when_it_is_whole(tmp_path, folder, verifier, caplog):
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        engine = ServedEngine(url)
        store = fill(tmp_path / "served", engine, folder)
    generate = partial(generate_rollouts, **SAMPLING)
    loaded = LoadedPrompts(PROMPTS, {"source": "test"})
    with caplog.at_level(logging.WARNING):
        assert len(ensure_rollouts(verifier, loaded, generate, store.folder, named=True)) == 9
    assert "was sampled from tiny" in caplog.text
    with pytest.raises(MismatchError, match="max_new_tokens was 12, now it is 13"):
        ensure_rollouts(verifier, loaded, partial(generate, max_new_tokens=13), store.folder, named=True)
    shard = store.folder / "shard-00000.jsonl"
    shard.write_bytes(b"".join(shard.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match=r"not all of these rollouts of a server are there yet.*rollout\.py"):
        ensure_rollouts(verifier, loaded, generate, store.folder, named=True)


def test_what_has_arrived_is_on_disk_before_the_batch_is_whole(tmp_path, folder, verifier, monkeypatch):
    monkeypatch.setattr(served, "_FLUSH_SECONDS", 0.0)
    server = TokenServer(verifier, "token_ids")
    with server.running() as url:
        server.faults = [None] * 3 + ["hang"]
        engine = ServedEngine(url, concurrency=1, timeout_s=3.0, max_retries=1)
        filling = threading.Thread(target=fill, args=(tmp_path / "served", engine, folder))
        filling.start()
        shard, end = tmp_path / "served" / "shard-00000.jsonl", time.monotonic() + 20
        while time.monotonic() < end and not (shard.exists() and shard.read_bytes().count(b"\n") == 2):
            time.sleep(0.02)
        assert len(RolloutStore.open(tmp_path / "served")) == 2, "the third request hangs"
        filling.join()
    assert completions(RolloutStore.open(tmp_path / "served")) == greedy(verifier, tmp_path / "own")
