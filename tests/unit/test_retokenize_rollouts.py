"""Rollouts of the verifier as training data of a drafter with another tokenizer."""

from __future__ import annotations

import logging

import pytest
from helpers import byte_tokenizer
from other_tokenizers import byte_bpe, real_text, spm_bpe

from specdiff2.data.retokenize import RetokenizedRollouts
from specdiff2.data.windows import WindowCollator, usable_rollouts
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.types import Rollout

PAIRS = [(spm_bpe, byte_bpe), (byte_bpe, spm_bpe), (byte_bpe, byte_tokenizer)]


def rollout(tokenizer, prompt: str, completion: str, *, eos: bool = True, **meta) -> Rollout:
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"] if completion else []
    return Rollout("r/1", tokenizer(prompt)["input_ids"], ids + [tokenizer.eos_token_id] * eos, 0.7, dict(meta))


def text_of(bridge: TokenizerBridge, ids: list[int]) -> str:
    return b"".join(bridge.drafter.piece(token) or b"" for token in ids).decode()


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
def test_prompt_and_completion_keep_their_texts_and_the_boundary_between_them(drafter, verifier) -> None:
    bridge, known = TokenizerBridge(drafter(), verifier()), verifier()
    for cut in (7, 100, 1999, 5000):  # also in the middle of words, and behind the window of the view
        prompt, completion = real_text()[:cut], real_text()[cut : cut + 900]
        ids = bridge.verifier.encode(completion, prefix=False)
        source = Rollout("r", known(prompt)["input_ids"], [*ids, known.eos_token_id], 1.0)
        (out,) = RetokenizedRollouts([source], bridge)
        assert text_of(bridge, out.prompt_ids).strip() == prompt.strip()
        assert text_of(bridge, out.completion_ids) == completion
        assert out.prompt_ids == bridge.drafter_ids(source.prompt_ids)  # what a session starts from
        assert out.completion_ids[-1] == drafter().eos_token_id
        assert out.completion_ids[:-1] == bridge.drafter.encode(completion, prefix=False)


def test_eos_ids_and_meta() -> None:
    bridge = TokenizerBridge(spm_bpe(), byte_bpe())
    ended, cut = rollout(byte_bpe(), "hi", " you", prompt_id="p"), rollout(byte_bpe(), "hi", " you", eos=False)
    first, second = RetokenizedRollouts([ended, cut], bridge)
    assert first.completion_ids == [*second.completion_ids, 2] and second.completion_ids[-1] != 2
    assert (first.rollout_id, first.temperature, first.meta) == ("r/1", 0.7, {"prompt_id": "p"})
    assert first.meta is not ended.meta and ended.completion_ids[-1] == 2
    only_eos = rollout(byte_bpe(), "hi", "")
    assert RetokenizedRollouts([only_eos], bridge)[0].completion_ids == [2]


def test_the_drafters_own_eos_is_trained_also_where_it_knows_the_verifiers() -> None:
    base = byte_bpe(size=500)
    base = type(base)(
        tokenizer_object=base.backend_tokenizer, eos_token="<|endoftext|>", extra_special_tokens={"e": "<|im_end|>"}
    )
    (out,) = RetokenizedRollouts([rollout(byte_bpe(), "hi", " you")], TokenizerBridge(base, byte_bpe()))
    assert out.completion_ids[-1] == base.eos_token_id == 0


def test_a_turn_inside_a_completion_and_a_character_across_the_boundary() -> None:
    bridge = TokenizerBridge(spm_bpe(), byte_bpe())
    turn = byte_bpe()("a<|im_end|>b<|im_end|>")["input_ids"]
    (out,) = RetokenizedRollouts([Rollout("r", [turn[0]], turn[1:], 1.0)], bridge)
    assert out.completion_ids.count(2) == 2 and out.completion_ids[-1] == 2
    ids = byte_bpe()("x🜚y")["input_ids"]
    assert len(ids) > 4
    (split,) = RetokenizedRollouts([Rollout("r", ids[:2], ids[2:], 1.0)], bridge)
    assert text_of(bridge, split.prompt_ids) == " x" and text_of(bridge, split.completion_ids) == "🜚y"


def test_completions_that_the_drafter_cannot_see_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bridge = TokenizerBridge(spm_bpe(), byte_bpe())
    hidden = Rollout("hidden", [10, 11], [1, 1], 1.0)  # <|im_start|> has no counterpart
    half = Rollout("half", [10, 11], byte_bpe()("🜚")["input_ids"][:1], 1.0)
    seen = rollout(byte_bpe(), "hi", " you")
    with caplog.at_level(logging.WARNING):
        assert [out.rollout_id for out in RetokenizedRollouts([hidden, seen, half], bridge)] == ["r/1"]
    assert "2 of 3 rollouts" in caplog.text
    caplog.clear()
    assert RetokenizedRollouts([seen], bridge) and len(RetokenizedRollouts([], bridge)) == 0 and not caplog.text


def test_windows_train_on_what_a_session_asks_for() -> None:
    """A window right after the prompt has the completion's first tokens as targets."""
    bridge = TokenizerBridge(spm_bpe(), byte_bpe())
    rollouts, drops = usable_rollouts(RetokenizedRollouts([rollout(byte_bpe(), "the sum is", " 42 apples")], bridge))
    batch = WindowCollator(4, 1, fixed=True)(rollouts)
    assert drops.total == 0
    assert batch.targets[0].tolist() == rollouts[0].completion_ids[:4]
    assert int(batch.anchor[0]) == len(rollouts[0].prompt_ids) - 1
