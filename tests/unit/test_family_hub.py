"""Hub ids: from the cache, with a revision; a clear error in seconds where neither cache nor network has them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from family_checkpoints import write_checkpoint

from specdiff2.models.family_loading import load_family_model, read_family_config
from specdiff2.types import ConfigError

NAME, COMMIT = "Dream-org/Dream-v0-Instruct-7B", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A Hugging Face cache with one checkpoint, laid out as the hub's own tools do."""
    root = tmp_path / "hub"
    repository = root / "models--Dream-org--Dream-v0-Instruct-7B"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    write_checkpoint(blobs, "dream")
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_checkpoint_loads_offline_and_tells_its_commit(cache, revision):
    base = load_family_model(NAME, revision=revision, dtype="float32")
    assert (base.name, base.revision, base.family.name) == (NAME, COMMIT, "dream")
    assert base.folder == cache
    assert read_family_config(NAME, revision=revision)[0].vocab_size == base.model.config.vocab_size


def test_an_incomplete_cache_names_the_command(cache):
    (cache / "model-00002-of-00002.safetensors").unlink()
    assert read_family_config(NAME)[1].name == "dream"  # a plan needs no weights
    with pytest.raises(ConfigError, match=rf"hf download {NAME} --revision main"):
        load_family_model(NAME, revision="main", dtype="float32")


@pytest.mark.parametrize("load", [load_family_model, read_family_config])
def test_offline_and_not_cached(cache, load):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="hf download apple/DiffuCoder-7B-Base --revision v2"):
        load("apple/DiffuCoder-7B-Base", revision="v2")
    with pytest.raises(ConfigError, match="hf download apple/DiffuCoder-7B-Base"):
        load("apple/DiffuCoder-7B-Base")
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        load("a b/c")
    with pytest.raises(ConfigError, match="no such folder"):
        load("./models/DiffuCoder")
    assert time.perf_counter() - start < 5


@pytest.mark.slow
def test_a_network_that_never_answers_costs_seconds(tmp_path):
    code = (
        "import time; from specdiff2.models.family_loading import read_family_config as f\n"
        "from specdiff2.types import ConfigError\n"
        "start = time.perf_counter()\n"
        "try: f('apple/DiffuCoder-7B-Base')\n"
        "except ConfigError as error: print(time.perf_counter() - start, error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, says nothing
        changes = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | changes
        environment["HF_HUB_OFFLINE"] = "0"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
    seconds, _, told = done.stdout.partition(" ")
    assert float(seconds) < 10 and "hf download apple/DiffuCoder-7B-Base" in told, done.stderr
