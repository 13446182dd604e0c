"""transformers' ``model.generate(custom_generate=speculative_generate)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RandomDrafter, byte_tokenizer, tiny_llama, tiny_verifier
from transformers import DynamicCache

from specdiff2 import BlockDrafter, SpeculativeDecoder, save_drafter, speculative_generate
from specdiff2.decoding.loading import load_autoregressive_decoder
from specdiff2.models.chat_format import encode_chat
from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError

PROMPT = torch.tensor([[5, 9, 33, 7, 21]])
DRAFTER = RandomDrafter(64, 4)


def model(**changes: Any):
    return tiny_llama(seed=3, **changes)


def speculate(base: Any, *args: Any, **options: Any) -> torch.Tensor:
    return base.generate(*args, **{"custom_generate": speculative_generate, "drafter": DRAFTER, **options})


@pytest.mark.parametrize(
    "sampler", ["specdiff", "specdiff2", "tree_match", "leviathan", "block", "specinfer", "traversal"]
)
def test_greedy_equals_generate(sampler: str) -> None:
    plain = model().generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(speculate(model(), PROMPT, max_new_tokens=20, do_sample=False, sampler=sampler), plain)


def test_trained_drafter_and_its_options() -> None:
    verifier = tiny_verifier(seed=3)
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4)
    plain = model().generate(input_ids=PROMPT, max_length=25, do_sample=False)
    out = speculate(
        model(), input_ids=PROMPT, max_length=25, do_sample=False,
        drafter=drafter, num_drafts=3, gamma=2, draft_temperature=0.5,
    )  # fmt: skip
    assert torch.equal(out, plain)


def test_drafter_from_a_folder_with_text_and_stop_strings(tmp_path: Any) -> None:
    tokenizer = byte_tokenizer()
    base = tiny_llama(300, seed=4)
    verifier = HFVerifier(tiny_llama(300, seed=4), tokenizer, name="tiny")
    save_drafter(BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4), tmp_path / "drafter")
    prompt = tokenizer("so the total is", return_tensors="pt")["input_ids"]
    plain = base.generate(prompt, max_new_tokens=16, do_sample=False)
    new_text = [tokenizer.decode(token) for token in plain[0, prompt.shape[1] :]]
    stop = next(text for text in new_text if text.isascii() and text not in new_text[:2])
    pieces: list[str] = []
    out = speculate(
        base, prompt, max_new_tokens=16, do_sample=False, drafter=tmp_path / "drafter", text_tokenizer=tokenizer,
        stop_strings=[stop], on_tokens=lambda tokens, text: pieces.append(text),
    )  # fmt: skip
    reference = base.generate(prompt, max_new_tokens=16, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(out, reference) and out.shape[1] < plain.shape[1]
    assert stop not in "".join(pieces)


@pytest.mark.parametrize("eos", [15, [15, 62], None])
def test_eos_ids_of_the_generation_config(eos: Any) -> None:
    base = model()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    plain = base.generate(PROMPT, **options)
    assert torch.equal(speculate(base, PROMPT, **options), plain)
    assert plain.shape[1] == (25 if eos is None else 12)


def test_a_mask_of_ones_is_fine_and_the_model_comes_back_as_it_was() -> None:
    base = model().train().requires_grad_(True)
    base.lm_head.weight.requires_grad_(False)
    plain = model().generate(PROMPT, max_new_tokens=6, do_sample=False)
    out = speculate(base, PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=False)
    assert torch.equal(out, plain)
    assert not base.lm_head._forward_pre_hooks
    assert base.training and base.model.embed_tokens.weight.requires_grad and not base.lm_head.weight.requires_grad


def test_sampling_settings_are_used() -> None:
    base = model()

    def tokens(**options: Any) -> tuple[int, ...]:
        return tuple(speculate(base, PROMPT, max_new_tokens=8, do_sample=True, **options)[0].tolist())

    assert tokens(top_k=1) == tuple(base.generate(PROMPT, max_new_tokens=8, do_sample=False)[0].tolist())
    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    assert tokens(temperature=1e-4, top_k=0) == tokens(top_p=1e-6) == tokens(top_k=1)
    torch.manual_seed(5)
    first = tokens()
    torch.manual_seed(5)
    assert first == tokens() != tokens()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": None}, "drafter"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"min_new_tokens": 3, "eos_token_id": 1}, "MinLengthLogits"),
        ({"max_time": 9.0}, "MaxTime"),
        ({"num_return_sequences": 2, "do_sample": True}, "2 rows"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"num_beams": 2}, "num_beams"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "attention_mask"),
        ({"sampler": "specdif"}, "sampler"),
        ({"gamma": 9}, "gamma"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        speculate(model(), PROMPT, **{"max_new_tokens": 4, "do_sample": False, **options})


def test_batches_and_filled_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 rows"):
        speculate(model(), PROMPT.expand(2, -1), max_new_tokens=4, do_sample=False)
    base, cache = model(), DynamicCache()
    base(PROMPT[:, :2], past_key_values=cache)
    with pytest.raises(ConfigError, match="2 tokens"):
        speculate(base, PROMPT, past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_a_misspelt_option_is_refused_by_transformers() -> None:
    with pytest.raises(ValueError, match="num_draft"):
        speculate(model(), PROMPT, max_new_tokens=4, num_draft=2)


@pytest.mark.real
def test_three_lines_of_python_on_the_real_model(smollm2: Any, tmp_path: Any) -> None:
    save_drafter(BlockDrafter.from_verifier(smollm2, num_layers=1, gamma=4), tmp_path / "drafter")
    decoder = SpeculativeDecoder.from_pretrained(smollm2, tmp_path / "drafter", num_drafts=3)
    generation = decoder.generate("What is 2+3?", max_new_tokens=12)
    prompt = torch.tensor([encode_chat(smollm2.tokenizer, "What is 2+3?")])
    plain = smollm2.model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert generation.tokens == plain
    assert generation.text == smollm2.tokenizer.decode(plain, skip_special_tokens=True)
    alone = load_autoregressive_decoder(smollm2)
    assert alone.generate("What is 2+3?", max_new_tokens=12).tokens == plain
