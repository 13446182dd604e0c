"""Where verifiers come from and where they lie: hub cache, network errors in seconds, device maps, quantisation."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import byte_tokenizer, char_tokenizer, reference_greedy, tiny_llama, tiny_verifier
from torch import nn

from specdiff2.models import hub
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.placement import cache_devices, input_device, plan_placement
from specdiff2.models.verifier import HFVerifier
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, CorruptFileError, SamplingParams

NAME, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"
GATED = "meta-llama/Llama-2-70b-chat-hf"
NUM_LAYERS = 4
OUTSIDE = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


def by_layer(*places: str) -> dict[str, str]:
    return {**OUTSIDE, **{f"model.layers.{i}": place for i, place in enumerate(places)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model in three shards, with tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(num_hidden_layers=NUM_LAYERS).save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    char_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def plain(folder) -> HFVerifier:
    return HFVerifier.from_pretrained(str(folder), dtype="float32", device="cpu")


# ---------------------------------------------------------------- the hub: cache and network
@pytest.fixture
def cache(tmp_path, folder, monkeypatch) -> Path:
    """A hub cache that holds the tiny model, in the layout of huggingface_hub; the hub may be asked."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return snapshot


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names looked up and addresses connected to; every one fails."""
    seen: list[str] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        seen.append(str(arguments[-2:]))
        raise OSError("blocked by the test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return seen


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_model_makes_no_network_call(cache, calls, plain, revision):
    verifier = HFVerifier.from_pretrained(NAME, revision=revision, dtype="float32", device="cpu")
    assert verifier.name == NAME and verifier.fingerprint == plain.fingerprint
    assert calls == []


def test_a_local_folder_makes_no_network_call(cache, calls, folder, plain):
    assert HFVerifier.from_pretrained(str(folder), dtype="float32", device="cpu").fingerprint == plain.fingerprint
    assert calls == []


@pytest.mark.parametrize("revision", [None, "v9"])
def test_what_is_not_cached_and_cannot_be_fetched_is_named_in_seconds(cache, calls, revision):
    start, pin = time.perf_counter(), " --revision v9" if revision else ""
    with pytest.raises(ConfigError, match=rf"cannot be reached .*`hf download Qwen/Qwen2.5-72B-Instruct{pin}`"):
        HFVerifier.from_pretrained("Qwen/Qwen2.5-72B-Instruct", revision=revision)
    assert calls and time.perf_counter() - start < 5


def test_a_shard_that_is_not_cached_is_named(cache, calls, monkeypatch):
    shard = sorted(cache.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=r"someone/tiny is not in the local cache"):
        HFVerifier.from_pretrained(NAME)
    assert calls  # the network might have had it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    calls.clear()
    with pytest.raises(ConfigError, match=rf"HF_HUB_OFFLINE is set, .*lacks {shard.name}; .*hf download someone/tiny"):
        HFVerifier.from_pretrained(NAME)
    with pytest.raises(ConfigError, match=r"lacks config.json.*hf download Qwen/Qwen3-8B --revision v1"):
        HFVerifier.from_pretrained("Qwen/Qwen3-8B", revision="v1")
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set, .*lacks model-q4.gguf"):
        HFVerifier.from_pretrained(NAME, gguf_file="model-q4.gguf")
    assert calls == []


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does (status and X-Error-Code; see huggingface_hub.utils.hf_raise_for_status)."""

    ANSWERS = {  # noqa: RUF012
        f"/{GATED}/resolve/main/config.json": (403, "GatedRepo"),
        "/nobody/nothing/resolve/main/config.json": (404, "RepoNotFound"),
        "/someone/other/resolve/v9/config.json": (404, "RevisionNotFound"),
        "/someone/gguf/resolve/main/config.json": (404, "EntryNotFound"),
        "/someone/ill/resolve/main/config.json": (503, ""),
    }

    def do_HEAD(self) -> None:
        status, code = self.ANSWERS[self.path]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def fake_hub(cache, monkeypatch) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        template = "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(template, address + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield address
        server.shutdown()


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        (GATED, None, rf"is gated: accept its licence at \S+/{GATED} .*`hf auth login`.*`hf download {GATED}`"),
        ("nobody/nothing", None, r"has no such model, or it is private; .*`hf auth login`"),
        ("someone/other", "v9", r"someone/other has no revision 'v9'; .*/someone/other/commits/main"),
        ("someone/gguf", None, r"holds no config.json .*verifier.gguf_file"),
        ("someone/ill", None, r"cannot be reached \(.*503.*`hf download someone/ill`"),
    ],
)
def test_what_the_hub_refuses(fake_hub, source, revision, message):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=message):
        HFVerifier.from_pretrained(source, revision=revision)
    assert time.perf_counter() - start < 10


def test_a_silent_network_costs_the_deadline_at_most(cache, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        template = f"http://127.0.0.1:{silent.getsockname()[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        start = time.perf_counter()
        with pytest.raises(ConfigError, match="cannot be reached"):
            HFVerifier.from_pretrained("someone/else")
        assert time.perf_counter() - start < 10
    monkeypatch.setattr(hub, "DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *arguments, **options: time.sleep(5))  # a stuck resolver
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="cannot be reached"):
        HFVerifier.from_pretrained("someone/else")
    assert time.perf_counter() - start < 3


@pytest.mark.slow
def test_the_whole_process_fails_in_ten_seconds_without_a_network():
    """Nothing patched: on a machine without a hub the real thing, elsewhere an address that refuses."""
    code = "from specdiff2.models.verifier import HFVerifier; import time; start = time.perf_counter()\n"
    code += "try: HFVerifier.from_pretrained('Qwen/Qwen2.5-72B-Instruct')\n"
    code += "finally: print(time.perf_counter() - start)\n"
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nowhere", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert float(done.stdout) < 10
    assert "`hf download Qwen/Qwen2.5-72B-Instruct`" in done.stderr.splitlines()[-1]


def test_names_that_are_no_names():
    for source in ("two words/model", "a/b..c", "bad name"):
        with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
            HFVerifier.from_pretrained(source)


def test_folders_that_are_not_complete(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    for shard in shards[-2:]:
        shard.unlink()
    with pytest.raises(ConfigError, match=rf"holds no {shards[-2].name}, {shards[-1].name}; fetch"):
        HFVerifier.from_pretrained(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weights": 1}')
    with pytest.raises(CorruptFileError, match="not an index of shards"):
        HFVerifier.from_pretrained(str(tmp_path))


# ---------------------------------------------------------------- placement
MAPS = {
    "one": {"": "cpu"},
    "text": "cpu",
    "auto": "auto",
    "each layer": by_layer("cpu", "cpu", "cpu", "cpu"),
    "half on disk": by_layer("cpu", "cpu", "disk", "disk"),
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("name", MAPS)
def test_a_device_map_changes_nothing_but_places(name, folder, plain):
    verifier = HFVerifier.from_pretrained(str(folder), dtype="float32", device_map=MAPS[name])
    assert verifier.device == torch.device("cpu")
    offloaded = [p.device.type for p in verifier.model.parameters()].count("meta")
    assert (offloaded > 0) == ("disk" in name)
    assert verifier.fingerprint == plain.fingerprint
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    law, seeds = SamplingParams(temperature=1.0), [torch.Generator().manual_seed(3) for _ in range(2)]
    sampled = [v.sample_batch(prompts, law, 12, g) for v, g in zip((verifier, plain), seeds, strict=True)]
    assert sampled[0] == sampled[1]
    sessions = verifier.start(prompts[0], 20), plain.start(prompts[0], 20)
    for _ in range(3):
        tree = TokenTree.from_chains(sessions[0].last_token, [[1, 2], [1, 3], [4, 4]])
        first, second = (session.score(tree) for session in sessions)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
        for session in sessions:
            session.commit([4, 5], 11)  # the last branch: the cache gathers


def test_greedy_text_of_an_offloaded_model_is_the_reference(folder):
    verifier = HFVerifier.from_pretrained(
        str(folder), dtype="float32", device_map=by_layer("cpu", "disk", "cpu", "disk")
    )
    law = SamplingParams(temperature=0.0)
    found = verifier.sample_batch([[5, 6, 7]], law, 10, torch.Generator())
    reference = tiny_llama(num_hidden_layers=NUM_LAYERS)
    assert found == [reference_greedy(reference, [5, 6, 7], 10, vocab_size=verifier.vocab_size, eos_ids=[2])]


def test_a_dispatched_model_is_not_moved_packed_compiled_or_borrowed_from(folder):
    verifier = HFVerifier.from_pretrained(
        str(folder), dtype="bfloat16", device_map=by_layer("cpu", "cpu", "cpu", "disk")
    )
    assert verifier.num_packed == 0
    verifier.move_to("meta")  # would lose every weight
    assert verifier.model.model.embed_tokens.weight.device.type == "cpu"
    with pytest.raises(ConfigError, match=r"runtime.compile=true works on .* spread over devices"):
        verifier.compile()
    with pytest.raises(ConfigError, match=r"a drafter that borrows .*verifier.device_map=null"):
        BorrowedEmbeddings(verifier.model, torch.arange(4))


def test_cache_devices_follow_the_hooks_of_each_layer(folder):
    verifier = HFVerifier.from_pretrained(
        str(folder), dtype="float32", device_map=by_layer("cpu", "cpu", "cpu", "disk")
    )
    layers = verifier.model.model.layers
    for module in layers[1].modules():
        if hasattr(module, "_hf_hook"):
            module._hf_hook.execution_device = "meta"
    layers[2]._hf_hook.execution_device = 0 if torch.cuda.is_available() else "cpu"
    assert [str(device) for device in cache_devices(verifier.model)][:2] == ["cpu", "meta"]
    assert len(verifier.allocate_cache(1, 8)._storages) >= 3
    assert input_device(verifier.model) == torch.device("cpu")


def test_an_unspread_model_keeps_one_tensor_and_can_be_moved():
    verifier = tiny_verifier()
    assert len(verifier.allocate_cache(2, 8)._storages) == 1
    verifier.move_to("meta")
    assert verifier.device == torch.device("meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "gpu"}, r"device_map: '': device='gpu'.*balanced"),
        ({"device_map": {}}, r"device_map=\{\}"),
        ({"device_map": {"": 7}}, r"device_map: '': device='cuda:7': torch sees \d CUDA devices"),
        (
            {"device_map": "auto", "device": "cpu"},
            "device='cpu' and device_map='auto': expected device=auto",
        ),
        ({"device": "tpu9"}, "device='tpu9'"),
    ],
)
def test_bad_places_are_refused_before_anything_loads(options, message):
    with pytest.raises(ConfigError, match=message):
        HFVerifier.from_pretrained("/nowhere", **options)


def test_a_map_must_name_real_modules_and_all_of_them(folder, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **o: pytest.fail("loaded"))
    for places, message in (
        ({"model": "cpu"}, "device_map covers no lm_head.weight"),
        ({key: "cpu" for key in MAPS["each layer"] if "rotary" not in key}, "device_map covers no model.rotary_emb"),
        (MAPS["each layer"] | {"model.layers.4": "cpu"}, "'model.layers.4': .* has no such module"),
    ):
        with pytest.raises(ConfigError, match=message):
            HFVerifier.from_pretrained(str(folder), device_map=places)


def test_a_gpu_gets_its_tensors_straight_from_the_file(monkeypatch):
    """No second copy in main memory; each rank on its own GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert plan_placement("auto").options == {"device_map": {"": torch.device("cuda:0")}}
    assert plan_placement("cuda:3").options == {"device_map": {"": torch.device("cuda:3")}}
    assert plan_placement("cpu").options == {}
    spread = plan_placement("auto", {"model.embed_tokens": 1, "lm_head": "cuda:2", "model": "cpu"})
    assert spread.options == {"device_map": {"model.embed_tokens": 1, "lm_head": 2, "model": "cpu"}}
    assert spread.device == torch.device("cuda:1")
    monkeypatch.setenv("SLURM_LOCALID", "3")  # in a plain srun
    assert plan_placement("auto").device == torch.device("cuda:3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert plan_placement("auto").device == torch.device("cuda:2")
    assert plan_placement("auto", "auto").options == {"device_map": "auto"}
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"each of 4 processes would do so: .*trainer.devices=1"):
        plan_placement("auto", "auto")


# ---------------------------------------------------------------- quantisation
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "int5"}, "quant_method='int5': expected one of .*bitsandbytes"),
        ({}, "quant_method='None': expected one of"),
        ({"quant_method": "vptq"}, "not installed: pip install vptq"),
        ({"quant_method": "aqlm"}, r"not installed: pip install 'aqlm\[gpu,cpu\]'"),
        ({"load_in_8bit": True}, "pip install bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}, "pip install torchao"),
        (
            {"quant_method": "bitnet", "linear_klass": 3},
            r"quantization.linear_klass: bitnet has no such setting",
        ),
        (
            {"quant_method": "bitnet", "linear_class": "x"},
            "by bitnet is not possible here: ValueError: linear_class",
        ),
    ],
)
def test_bad_quantisation_is_refused_before_weights_load(settings, message, folder, monkeypatch):
    for package in ("bitsandbytes", "torchao", "vptq", "aqlm"):  # whether or not this machine has them
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("specdiff2.models.quantization._installed", lambda module: module == "transformers")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **o: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=message):
        HFVerifier.from_pretrained(str(folder), quantization=settings)


def quantised_folder(folder: Path, target: Path, **stored: Any) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    return target


def test_a_checkpoint_that_is_quantised_already(folder, tmp_path):
    """It needs its own package, and cannot be quantised in another way."""
    quantised_folder(folder, tmp_path, quant_method="vptq")
    with pytest.raises(ConfigError, match=r"is quantised by vptq, which needs a package .*pip install vptq"):
        HFVerifier.from_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"already \(vptq\), which quanto cannot change; .*quantization=null"):
        HFVerifier.from_pretrained(str(tmp_path), quantization={"quant_method": "quanto", "weights": "int8"})
    quantised_folder(folder, tmp_path, quant_method="int5")
    with pytest.raises(ConfigError, match="quant_method='int5': expected one of"):
        HFVerifier.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "quanto", "weights": "int8"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_quantised_verifier_decodes_like_its_own_full_forward(settings, tmp_path):
    """On the CPU, where the package is installed."""
    pytest.importorskip({"quanto": "optimum.quanto"}.get(settings["quant_method"], settings["quant_method"]))
    tiny_llama(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path)
    char_tokenizer(tmp_path)
    one, two = (
        HFVerifier.from_pretrained(str(tmp_path), dtype="float32", quantization=settings, device_map=places)
        for places in (None, "auto")
    )
    plain = HFVerifier.from_pretrained(str(tmp_path), dtype="float32")
    assert one.fingerprint == two.fingerprint != plain.fingerprint
    found = one.sample_batch([[5, 6, 7]], SamplingParams(temperature=0.0), 12, torch.Generator())
    assert found == [reference_greedy(one.model, [5, 6, 7], 12, vocab_size=one.vocab_size, eos_ids=[2])]
    with pytest.raises(ConfigError, match="these are quantised"):
        BorrowedEmbeddings(one.model, torch.arange(4))


class Int8Weight(torch.Tensor):
    """Stands for torchao's tensor classes: a Linear keeps its class, its weight does not."""


def test_packing_leaves_weights_of_other_classes_alone():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(torch.bfloat16)
    model[1].weight = nn.Parameter(
        torch.zeros(32, 32, dtype=torch.bfloat16).as_subclass(Int8Weight), requires_grad=False
    )
    assert type(model[1].weight) is not nn.Parameter
    packed = pack_linears(model)
    assert packed in (0, 1) and type(model[1]) is nn.Linear  # 0 on a CPU without bfloat16


def test_a_quantised_model_has_a_fingerprint_of_all_it_stores():
    """Integers bit by bit, and buffers, which hold scales: without ``is_quantized`` only parameters count."""
    prints = []
    for change in ("none", "buffer", "integer"):
        model = tiny_llama()
        projection = model.model.layers[0].self_attn.k_proj
        projection.weight = nn.Parameter(torch.arange(512, dtype=torch.int32).view(16, 32) + 10**6, requires_grad=False)
        projection.register_buffer("scale", torch.ones(16))
        if change == "buffer":
            projection.scale[3] = 2.0
        if change == "integer":
            projection.weight[0, 0] += 1  # lost in bfloat16
        model.is_quantized = True
        verifier = HFVerifier(model, None, name=change)
        verifier.move_to("meta")  # refused: packages store what ``to`` does not know
        assert verifier.device == torch.device("cpu")
        prints.append(verifier.fingerprint)
    assert len(set(prints)) == 3


# ---------------------------------------------------------------- release
def test_release_keeps_the_names_and_refuses_the_rest():
    verifier, same = (tiny_verifier(tokenizer=byte_tokenizer(), vocab=320, eos_ids=[2]) for _ in range(2))
    weights = verifier.model
    session = verifier.start([1, 2, 3], 4)
    verifier.release()
    for name in ("fingerprint", "eos_ids", "name", "vocab_size", "sampling", "max_length"):
        assert getattr(verifier, name) == getattr(same, name)
    assert verifier.tokenizer is not None
    assert verifier.model is not weights
    for use in (
        lambda: verifier.start([1, 2], 3),
        lambda: verifier.forward(torch.tensor([[1]]), cache=None),
        lambda: session.score(TokenTree.root_only(3)),
        lambda: verifier.device,
        lambda: verifier.move_to("cpu"),
        lambda: BorrowedEmbeddings(verifier.model, torch.arange(4)),
    ):
        with pytest.raises(ConfigError, match=r"tiny-llama: its weights are not here"):
            use()


def test_a_verifier_known_by_its_small_files_alone(folder, plain, tmp_path):
    """What the processes beside the one that has loaded it use: no weight is read."""
    for file in folder.iterdir():
        content = b"" if file.suffix == ".safetensors" else file.read_bytes()
        (tmp_path / file.name).write_bytes(content)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}))
    options: dict[str, Any] = {"sampling": SamplingParams(temperature=0.5), "dtype": "float32", "device_map": "auto"}
    verifier = HFVerifier.without_weights(str(tmp_path), plain.fingerprint, **options)
    for name in ("fingerprint", "vocab_size", "max_length"):
        assert getattr(verifier, name) == getattr(plain, name)
    assert verifier.eos_ids == {2, 7} and verifier.sampling.temperature == 0.5 and verifier.name == str(tmp_path)
    assert verifier.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="weights are not here"):
        verifier.start([1, 2], 3)
