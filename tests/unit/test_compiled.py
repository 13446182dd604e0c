"""Buckets, caches, warm-up and refusals of compiled passes."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Script, random_tokens, tiny_llama, tiny_verifier
from transformers import GPT2Config

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.cost_measure import measure_costs, runtime_mode
from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.decoder_info import describe_decoder
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.compiled import NODE_BUCKETS, CompiledPasses
from specdiff2.models.compiled_stack import check_compilable
from specdiff2.models.packed_linear import PackedLinear
from specdiff2.runtime import build
from specdiff2.runtime.compilation import check_compilation, node_counts, tree_sizes, warm_passes
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.provenance import record_runtime, write_run_json
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, SamplingParams

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"
PROMPT = [5, 9, 11, 40, 2]


def passes_of(**options) -> CompiledPasses:
    return tiny_verifier(**options).compile(backend="eager")


def test_usual_buckets() -> None:
    passes = passes_of()
    sizes = [1, 2, 9, 10, 33, 34, 64, 129, 130, 193, 194]
    assert [passes.nodes_bucket(n) for n in sizes] == [1, 9, 9, 17, 33, 49, 65, 129, 193, 193, 257]
    assert [passes.capacity(n) for n in (1, 128, 129, 512, 700, 768, 769, 1025)] == [
        128, 128, 256, 512, 768, 768, 1024, 1536,
    ]  # fmt: skip


def test_warmed_sizes_take_the_place_of_the_usual_ones() -> None:
    """A shortened window runs in a graph that is there; only what is larger than all of them compiles another."""
    passes = passes_of(num_hidden_layers=1)
    passes.warm({12}, 100)
    assert [passes.nodes_bucket(n) for n in (1, 2, 12, 13)] == [1, 12, 12, 65]
    assert passes.capacity(90) == 128
    passes.warm({20}, 200)
    assert [passes.nodes_bucket(n) for n in (1, 2, 12, 13, 20)] == [1, 12, 12, 20, 20]
    assert passes.num_graphs == 2 + 3  # 1 and 12 nodes in 128 slots; 1, 12 and 20 in 256
    passes.warm({20}, 200)
    assert passes.num_graphs == 5


def test_decoding_compiles_nothing_that_was_warmed(caplog: pytest.LogCaptureFixture) -> None:
    verifier = tiny_verifier(num_hidden_layers=3)
    passes = verifier.compile(backend="eager")
    drafter = BlockDrafter.from_verifier(verifier, num_layers=2, gamma=4, shifted=True, conditioning="verifier_kv")
    decoders = {
        "autoregressive": AutoregressiveDecoder(verifier),
        "tree": make_decoder(verifier, drafter, sampler="tree", num_nodes=12),
        "specdiff2": make_decoder(verifier, drafter, sampler="specdiff2", num_drafts=3),
    }
    with caplog.at_level(logging.INFO):
        warm_passes(verifier, decoders, len(PROMPT), 12)
    names = [message for message in caplog.messages if message.startswith("compiling: ")]
    assert [name.split(" (")[0] for name in names] == [
        *(f"compiling: verifier pass, {n} node{'s' * (n > 1)}, 256 cache slots" for n in (1, 9, 13)),
        "compiling: draft pass, 4 columns, 256 cache slots",
    ]
    assert "a minute" in names[0]
    before = passes.num_graphs
    for decoder in decoders.values():
        assert decoder.generate(PROMPT, max_new_tokens=12).num_tokens == 12
    assert passes.num_graphs == before == 4


def test_what_stays_eager_is_told(caplog: pytest.LogCaptureFixture) -> None:
    verifier = tiny_verifier()
    warm_passes(verifier, {}, 5, 5)  # not compiled: nothing to do
    verifier.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        warm_passes(verifier, {"script": make_decoder(verifier, Script([1, 2]), sampler="specdiff")}, 5, 5)
    assert caplog.messages == ["script: this drafter has no compiled pass and drafts in eager mode"]


def test_tree_sizes_of_the_samplers() -> None:
    verifier = tiny_verifier()
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4)
    sizes = [
        tree_sizes(make_decoder(verifier, drafter, sampler=sampler, **options).drafting)
        for sampler, options in (
            ("specdiff", {}), ("specdiff2", {}), ("tree", {"num_nodes": 20}), ("tree", {"num_nodes": 4}),
        )
    ]  # fmt: skip
    assert sizes == [(5, 5), (5, 33), (21, 21), (5, 5)]
    assert node_counts(5, 5) == {5} and node_counts(1, 41) == {1, 9, 17, 33, 41}
    assert node_counts(5, 33) == {9, 17, 33} <= set(NODE_BUCKETS)


def test_sessions_share_no_cache_and_leave_nothing_behind() -> None:
    verifier = tiny_verifier()
    verifier.compile(backend="eager")
    one, other = verifier.start(PROMPT, 5), verifier.start(PROMPT, 5)
    assert one.cache is not other.cache
    storage = one.cache._storages[0]
    with torch.inference_mode():
        storage.fill_(float("nan"))
    del one
    gc.collect()
    again = verifier.start(PROMPT, 5)
    assert again.cache._storages[0] is storage, "a cache that is free is used again"
    tree = TokenTree.from_chains(PROMPT[-1], [random_tokens(3, 1), random_tokens(3, 2)])
    assert torch.equal(again.score(tree), other.score(tree))


def test_the_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_verifier()
    assert verifier.runtime_mode == runtime_mode(verifier) == "eager"
    monkeypatch.setattr(verifier, "num_packed", 3)
    assert verifier.runtime_mode == runtime_mode(verifier) == "packed"
    passes = verifier.compile(backend="eager")
    assert verifier.compile() is passes, "compiling twice changes nothing"
    assert verifier.runtime_mode == runtime_mode(verifier) == "compiled"
    assert describe_decoder(AutoregressiveDecoder(verifier))["verifier_runtime_mode"] == "compiled"


def test_packed_weights_give_way_to_the_compiler() -> None:
    """Inside a graph a packed layer is a plain product: inductor packs frozen weights itself."""
    linear = torch.nn.Linear(4, 3)
    linear.__class__ = PackedLinear
    graph = torch.compile(linear, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(graph(torch.ones(2, 4)), linear(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "'gpt2' model: expected one of llama"),
        (tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10.0, "factor": 2.0}).config, "'dynamic'"),
    ],
)
def test_models_that_cannot_be_compiled(config, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*runtime.compile=false"):
        check_compilable(config)


@pytest.mark.parametrize("chosen", [None, "no-such-compiler"])
def test_no_compiler_is_refused(chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CXX", chosen)
    assert shutil.which("g++") is None
    message = rf"C\+\+ compiler: found none \(CXX={chosen!r}, looked for {chosen or 'g'}.*compile=false"
    with pytest.raises(ConfigError, match=message):
        tiny_verifier().compile()
    wanted = {"runtime": {"compile": True}, "verifier": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="needs a C"):
        check_compilation(wanted)  # before a model loads
    check_compilation({**wanted, "runtime": {"compile": False}})


def test_the_switch_is_a_checked_setting(tmp_path: Path) -> None:
    for override, expected in (("runtime.compile=true", True), ("seed=1", False)):
        config = build.check(build.load_config(CONFIG_DIR, "eval", [override], tmp_path), EvalConfig)
        assert config["runtime"] == {"compile": expected}
    for override in ("runtime.compile=yes please", "+runtime.compil=true"):
        with pytest.raises(ConfigError, match=r"runtime\.compil"):
            build.check(build.load_config(CONFIG_DIR, "eval", [override], tmp_path), EvalConfig)


def test_run_json_names_the_mode(tmp_path: Path) -> None:
    config = {"verifier": {"device": "cpu"}, "runtime": {"compile": True}}
    assert write_run_json(tmp_path, config, threads=1)["runtime"].endswith(" compiled")
    record_runtime(tmp_path, "packed")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["runtime"] == f"torch {torch.__version__} packed" and record["threads"] == 1


@pytest.mark.parametrize("answers", [False, True])
def test_a_failing_compiler_is_told(answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that does not run at all, and one that runs and cannot compile."""
    broken = tmp_path / "c++"
    version = 'case "$1" in --version|-v|--help) echo "g++ 12"; exit 0;; esac\n' if answers else ""
    broken.write_text(f"#!/bin/sh\n{version}echo 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    verifier = tiny_verifier(num_hidden_layers=1)
    passes = verifier.compile()
    with pytest.raises(ConfigError, match=r"compiler failed on the verifier pass, 1 node.*compile=false"):
        passes.warm((), 100)
    assert passes.num_graphs == 0


def test_costs_of_a_conditioned_drafter_are_measured_in_its_own_mode() -> None:
    verifier = tiny_verifier()
    verifier.compile(backend="eager")
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4, shifted=True, conditioning="verifier_kv")
    table = measure_costs(
        verifier, drafter, 4, sampling=SamplingParams(temperature=0.0), node_counts=(1, 9), num_warmup=1, num_repeats=1
    )
    assert table.key.runtime == "compiled" and table.draft_s > 0
    assert verifier.passes.num_graphs == 3, "1 and 9 nodes, and the draft"
