"""transformers' own decoders as methods: same tokens, same law, comparable clock, and a drafter as their assistant."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import byte_tokenizer, char_tokenizer, tiny_llama, tiny_verifier
from transformers import AutoModelForCausalLM, GenerationConfig

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.hf_decoder import HFDecoder, HFOptions
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.causal_export import export_causal_lm, is_drafter_folder, load_assistant
from specdiff2.models.pretrained import save_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.evaluation import evaluate
from specdiff2.runtime.hf_settings import HFSettings
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["generate", "prompt_lookup", "assisted"]
PROMPT = [5, 9, 33, 7, 21, 5, 9, 33]


def assistant_of(verifier: HFVerifier, kind: str, **changes: Any) -> HFVerifier | None:
    """A smaller random model: it disagrees with the verifier nearly everywhere."""
    if kind != "assisted":
        return None
    model = tiny_llama(64, verifier.dtype, seed=7, num_hidden_layers=1, **changes)
    return HFVerifier(model, verifier.tokenizer, name="assistant")


def decoder(verifier: HFVerifier, kind: str, **options: Any) -> HFDecoder:
    return HFDecoder(verifier, HFOptions(kind, **options), assistant=assistant_of(verifier, kind))


def shifted_drafter(verifier: HFVerifier, gamma: int = 1, **changes: Any) -> BlockDrafter:
    options = {"num_layers": 2, "gamma": gamma, "shifted": True, **changes}
    drafter = BlockDrafter.from_verifier(verifier, **options)
    with torch.no_grad():  # away from the verifier's own layers
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return drafter


# ---------------------------------------------------------------- tokens
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 30])
@pytest.mark.parametrize("prompt", [PROMPT, [5]])
def test_greedy_tokens_equal_our_own_loop(kind: str, max_new_tokens: int, prompt: list[int]) -> None:
    verifier = tiny_verifier(dtype=torch.float64, seed=3)
    expected = AutoregressiveDecoder(verifier).generate(prompt, max_new_tokens=max_new_tokens)
    got = decoder(verifier, kind).generate(prompt, max_new_tokens=max_new_tokens)
    assert got.tokens == expected.tokens and got.stop_reason == expected.stop_reason == "length"
    assert got.rounds == [] and got.prefill_s > 0 and got.decode_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_ends_at_eos_ids_and_stop_ids_and_stop_strings(kind: str) -> None:
    plain = AutoregressiveDecoder(tiny_verifier(seed=3)).generate(PROMPT, max_new_tokens=20).tokens
    end = next(i for i in range(4, 20) if plain[i] not in plain[:i])
    with_eos = tiny_verifier(seed=3, eos_ids=[plain[end], 63])
    assert decoder(with_eos, kind).generate(PROMPT, max_new_tokens=20).tokens == plain[: end + 1]
    verifier = tiny_verifier(seed=3, tokenizer=char_tokenizer(), vocab_size=64)
    by_id = decoder(verifier, kind).generate(PROMPT, max_new_tokens=20, stop_ids=[plain[end]])
    assert by_id.tokens == plain[: end + 1] and by_id.stop_reason == "stop"
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_strings": [verifier.tokenizer.decode([plain[end]])]}
    expected = AutoregressiveDecoder(verifier).generate(PROMPT, **options)
    pieces: list[str] = []
    by_text = decoder(verifier, kind).generate(PROMPT, **options, on_tokens=lambda _, text: pieces.append(text))
    assert (by_text.tokens, by_text.text) == (expected.tokens, expected.text) and by_text.stop_reason == "stop"
    assert "".join(pieces) == expected.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoints_generation_config_changes_nothing(kind: str) -> None:
    verifier = tiny_verifier(seed=3)
    expected = AutoregressiveDecoder(verifier).generate(PROMPT, max_new_tokens=20)
    theirs = GenerationConfig(
        do_sample=True, temperature=2.0, top_k=3, repetition_penalty=3.0, eos_token_id=expected.tokens[2],
        max_length=10, min_new_tokens=3, suppress_tokens=expected.tokens[:1],
    )  # fmt: skip
    verifier.model.generation_config = theirs
    hf = decoder(verifier, kind)
    if hf.assistant is not None:
        hf.assistant.model.generation_config = copy.deepcopy(theirs)
    got = hf.generate(PROMPT, max_new_tokens=20)
    assert got.tokens == expected.tokens
    assert verifier.model.generation_config is theirs  # given back


@pytest.mark.parametrize("kind", KINDS)
def test_padding_ids_in_the_prompt_are_seen_and_padded_rows_never_come_out(kind: str) -> None:
    model = tiny_llama(64, seed=3, pad_token_id=0)
    with torch.no_grad():
        model.lm_head.weight[60:] = model.lm_head.weight[:4] * 50
    verifier = HFVerifier(model, None, name="padded", vocab_size=60)
    prompt = [0, 0, 5, 0, 9]
    expected = AutoregressiveDecoder(verifier).generate(prompt, max_new_tokens=20)
    got = decoder(verifier, kind).generate(prompt, max_new_tokens=20)
    assert got.tokens == expected.tokens and max(got.tokens) < 60


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_follows_the_verifiers_law_and_the_seed(kind: str) -> None:
    verifier = tiny_verifier(seed=3)
    verifier.sampling = SamplingParams(0.9, top_k=6, top_p=0.85)
    hf = decoder(verifier, kind)
    global_state = torch.random.get_rng_state()
    seeds = range(400)
    outputs = [hf.generate(PROMPT, max_new_tokens=2, rng=TorchRandomSource(seed)).tokens for seed in seeds]
    assert torch.equal(torch.random.get_rng_state(), global_state)
    assert hf.generate(PROMPT, max_new_tokens=2, rng=TorchRandomSource(11)).tokens == outputs[11]
    with torch.no_grad():
        law = logits_to_probs(verifier.model(torch.tensor([PROMPT])).logits[0, -1], verifier.sampling)
    assert (law > 0).sum() == 5  # top-k and top-p both cut something
    seen = torch.bincount(torch.tensor([tokens[0] for tokens in outputs]), minlength=64) / len(outputs)
    assert bool((law[seen > 0] > 0).all())
    assert float((law - seen).abs().sum()) / 2 < 0.1  # 5 tokens, 400 draws: about 0.04 expected


# ---------------------------------------------------------------- clock
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_reads_the_prompt_once_and_decoding_never_again(kind: str) -> None:
    verifier = tiny_verifier(seed=3)
    hf = decoder(verifier, kind, num_assistant_tokens=3, prompt_lookup_num_tokens=4)
    models = {"verifier": verifier.model} | ({} if hf.assistant is None else {"assistant": hf.assistant.model})
    read: dict[str, list[int]] = {name: [] for name in models}  # tokens of every forward pass

    def count(name: str, kwargs: dict[str, Any]) -> None:
        read[name].append(kwargs["input_ids"].shape[1])

    handles = [
        model.register_forward_hook(lambda _, args, kwargs, out, name=name: count(name, kwargs), with_kwargs=True)
        for name, model in models.items()
    ]
    hf.generate(PROMPT, max_new_tokens=12)
    for handle in handles:
        handle.remove()
    most = {"generate": 1, "prompt_lookup": 5, "assisted": 4}[kind]  # the last token and the draft
    assert read["verifier"][0] == len(PROMPT) - 1 and max(read["verifier"][1:]) <= most
    if kind == "assisted":
        assert read["assistant"][:2] == [len(PROMPT) - 1, 1] and max(read["assistant"][1:]) <= 2
    assert not verifier.model._forward_pre_hooks  # left as it was


# ---------------------------------------------------------------- refusals
def test_wrong_options_and_assistants_are_refused() -> None:
    verifier = tiny_verifier(seed=3)
    for options in (
        {"kind": "magic"}, {"num_assistant_tokens": 0}, {"prompt_lookup_num_tokens": 0}, {"max_matching_ngram_size": 0},
        {"num_assistant_tokens_schedule": "x"}, {"assistant_confidence_threshold": 1.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(options))):
            HFOptions(**options)
    with pytest.raises(ConfigError, match="assistant none"):
        HFDecoder(verifier, HFOptions("assisted"))
    with pytest.raises(ConfigError, match="kind='generate' with assistant"):
        HFDecoder(verifier, HFOptions(), assistant=verifier)
    with pytest.raises(MismatchError, match="scores 80 ids"):
        HFDecoder(verifier, HFOptions("assisted"), assistant=tiny_verifier(80))
    with pytest.raises(MismatchError, match=r"in torch\.float64"):
        HFDecoder(verifier, HFOptions("assisted"), assistant=tiny_verifier(dtype=torch.float64))
    ours, theirs = (tiny_verifier(300, tokenizer=byte_tokenizer(), vocab_size=300) for _ in range(2))
    tokens = theirs.tokenizer.get_vocab()
    swapped = copy.deepcopy(theirs.tokenizer)
    swapped.get_vocab = lambda: {**tokens, "a": tokens["b"], "b": tokens["a"]}
    theirs.tokenizer = swapped
    with pytest.raises(MismatchError, match="tokenizers differ first at id"):
        HFDecoder(ours, HFOptions("assisted"), assistant=theirs)
    with pytest.raises(ConfigError, match="stop_ids"):
        HFDecoder(verifier).generate(PROMPT, max_new_tokens=3, stop_ids=[64])


def test_a_missing_assistant_is_refused_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind=assisted"):
        HFSettings(name="x", kind="assisted")
    with pytest.raises(ConfigError, match="kind=assisted"):
        HFSettings(name="x", assistant="folder")
    for missing in (str(tmp_path / "missing"), "no-such-folder", "nobody/no-such-model"):
        with pytest.raises(ConfigError, match=Path(missing).name):
            HFSettings(name="x", kind="assisted", assistant=missing, cache_dir=str(tmp_path)).check()


# ---------------------------------------------------------------- export
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("draft_vocab", [None, [3, 5, 7, 9, 33, 21]])
@pytest.mark.parametrize("tied", [False, True])
def test_exported_logits_are_the_drafters(tmp_path: Path, gamma: int, draft_vocab: Any, tied: bool) -> None:
    verifier = tiny_verifier(seed=3, tokenizer=char_tokenizer(), vocab_size=64, tie_word_embeddings=tied)
    drafter = shifted_drafter(verifier, gamma, draft_vocab_ids=draft_vocab).eval()
    folder = export_causal_lm(drafter, verifier, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.tie_word_embeddings is tied
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    for length in range(1, len(PROMPT) + 1):
        session = drafter.start(PROMPT[:length], SamplingParams(), 4)
        own = session.window_logits(gamma)[0]
        assert float((logits[length - 1, drafter.draft_vocab_ids] - own).abs().max()) < 1e-5
    with pytest.raises(ConfigError, match="not empty"):
        export_causal_lm(drafter, verifier, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_a_drafter_that_is_not_autoregressive_is_refused_before_any_model(tmp_path: Path) -> None:
    verifier = tiny_verifier(seed=3)
    for changes, named in (
        ({"shifted": False}, "shifted=False"),
        ({"attention": "bidirectional"}, "'bidirectional'"),
        ({"denoising_steps": 2, "gamma": 2}, "denoising_steps=2"),
    ):
        drafter = shifted_drafter(verifier, **changes)
        with pytest.raises(ConfigError, match=named):
            export_causal_lm(drafter, verifier, tmp_path / "out")
        folder = save_drafter(drafter, tmp_path / named.strip("'"))
        with pytest.raises(ConfigError, match=named):
            HFSettings(name="x", kind="assisted", assistant=str(folder)).check()
    drafter = shifted_drafter(verifier)
    drafter.extra = torch.nn.Linear(2, 2)  # as a conditioning or a Markov head would be
    with pytest.raises(ConfigError, match=r"extra\.bias"):
        export_causal_lm(drafter, verifier, tmp_path / "out")
    folder = save_drafter(shifted_drafter(verifier), tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        HFSettings(name="x", kind="assisted", assistant=str(folder)).check()


@pytest.mark.parametrize("masked", [False, True])
def test_a_drafter_folder_assists_and_is_exported_once(tmp_path: Path, masked: bool) -> None:
    verifier = tiny_verifier(seed=3, tokenizer=char_tokenizer(), vocab_size=64)
    draftable = [i for i in range(64) if i != 60] if masked else list(range(10, 30))
    cut: dict[str, Any] = {"mask_token_id": 60} if masked else {"draft_vocab_ids": draftable}
    folder = save_drafter(shifted_drafter(verifier, **cut), tmp_path / "drafter")
    assert is_drafter_folder(folder) and not is_drafter_folder(tmp_path)
    settings = HFSettings(name="hf_assisted", kind="assisted", assistant=str(folder), cache_dir=str(tmp_path / "cache"))
    settings.check()
    hf = settings.make(verifier)
    exported = list((tmp_path / "cache/assistants").iterdir())
    stamps = [path.stat().st_mtime_ns for path in exported[0].iterdir()]
    assert hf.assistant is not None and hf.assistant.dtype == verifier.dtype
    with torch.no_grad():
        logits = hf.assistant.model(torch.tensor([PROMPT])).logits[0, -1]
    assert torch.isfinite(logits).nonzero().flatten().tolist() == draftable  # the rest never wins
    expected = AutoregressiveDecoder(verifier).generate(PROMPT, max_new_tokens=20)
    assert hf.generate(PROMPT, max_new_tokens=20).tokens == expected.tokens
    assert hf.describe()["assistant"] == hf.assistant.fingerprint and hf.name == "hf_assisted"
    load_assistant(folder, verifier, tmp_path / "cache")
    assert list((tmp_path / "cache/assistants").iterdir()) == exported
    assert [path.stat().st_mtime_ns for path in exported[0].iterdir()] == stamps
    with pytest.raises(MismatchError, match="verifier"):
        load_assistant(folder, tiny_verifier(seed=4, tokenizer=char_tokenizer(), vocab_size=64), tmp_path / "cache")


def test_assistants_are_packed_where_the_verifier_is(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    model = tiny_llama(64, torch.bfloat16, seed=3)
    verifier = HFVerifier(model, tokenizer, name="tiny", vocab_size=64, pack_weights=True)
    if verifier.num_packed == 0:
        pytest.skip("this machine multiplies no bfloat16")
    folder = save_drafter(shifted_drafter(verifier).to(torch.bfloat16), tmp_path / "drafter")
    assistant = load_assistant(folder, verifier, tmp_path)
    assert assistant.num_packed == 7 * 2 + 1 and assistant.dtype == torch.bfloat16


# ---------------------------------------------------------------- benchmark
def evaluate_methods(tiny_options: dict[str, list[str]], run: Path, *overrides: str) -> Path:
    methods = [f"+sampler@methods.{name}={name}" for name in ("hf_generate", "hf_prompt_lookup", "hf_assisted")]
    ours = ["+sampler@methods.specdiff=specdiff", "drafter=untrained", "methods.specdiff.gamma=3"]
    options = [*tiny_options["eval"], *ours, *methods, f"paths.cache={run}/cache", *overrides]
    config = build.check(build.load_config(ROOT / "conf", "eval", options, run), EvalConfig)
    evaluate(config, build.begin(config))
    return run


def test_benchmark_runs_them_beside_ours(
    tiny_options: dict[str, list[str]], tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier = HFVerifier.from_pretrained(str(tiny_folder), dtype="float32")
    drafter = save_drafter(shifted_drafter(verifier), tmp_path / "drafter")
    run = evaluate_methods(tiny_options, tmp_path / "run", f"methods.hf_assisted.assistant={drafter}")
    rows = json.loads((run / "summary.json").read_text(encoding="utf-8"))["rows"]
    names = ["autoregressive", "specdiff", "hf_generate", "hf_prompt_lookup", "hf_assisted"]
    assert sorted(row["method"] for row in rows) == sorted(names)
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["num_prompts"] == 3 and row["speedup"] is not None
        told = not row["method"].startswith("hf_")
        for key in ("mean_streak", "tau", "num_rounds", "verify_ms", "overhead", "mean_nodes"):
            assert (row[key] is not None) == told, key
        if row["method"] != "autoregressive":
            assert row["lossless_check"]["identical"] == row["lossless_check"]["checked"] == 3
    shown = capsys.readouterr().out
    assert "HF generate" in shown and "HF prompt lookup" in shown and "HF assisted" in shown
    assert "HF assisted" in (run / "report.html").read_text(encoding="utf-8")
    manifest = json.loads((run / "benchmark.json").read_text(encoding="utf-8"))["decoders"]
    assert manifest["hf_prompt_lookup"]["prompt_lookup_num_tokens"] == 10
    evaluate_methods(
        tiny_options, tmp_path / "prompt", f"methods.hf_assisted.assistant={drafter}", "prompt='what is 3?'",
        "color=never", "max_new_tokens=6",
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "hf_assisted: the same tokens as the verifier alone" in shown and "an unknown number of" in shown


def test_benchmark_refuses_a_missing_assistant_before_the_verifier_loads(
    tiny_options: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the verifier was loaded")

    monkeypatch.setattr(HFVerifier, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match="missing"):
        evaluate_methods(tiny_options, tmp_path / "run", f"methods.hf_assisted.assistant={tmp_path}/missing")


def test_an_assistant_of_another_vocabulary_is_refused_by_the_benchmark(
    tiny_options: dict[str, list[str]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    byte_tokenizer(other)
    tiny_llama(300, eos_token_id=2).save_pretrained(other)
    with pytest.raises(MismatchError, match="tokenizers differ"):
        evaluate_methods(tiny_options, tmp_path / "run", f"methods.hf_assisted.assistant={other}")
    shutil.rmtree(other)
