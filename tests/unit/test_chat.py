"""Case 20: the same prompt ids everywhere, with exactly one BOS; and what a manifest records of how they came about."""

from __future__ import annotations

import pytest
from helpers import byte_tokenizer, char_tokenizer, tiny_verifier

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts
from specdiff2.data.prompts import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.windows import WindowCollator
from specdiff2.types import ConfigError

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Echo:
    """Completes every prompt with its own first tokens."""

    max_length = 256

    def sample_batch(self, prompts, sampling, max_new_tokens, generator):
        return [prompt[:max_new_tokens] for prompt in prompts]


def bos_twice():
    """The trap: the template renders BOS and the tokenizer adds one."""
    tokenizer = char_tokenizer(add_bos=True)
    tokenizer.chat_template = BOS_TEMPLATE
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_case_20_one_bos_in_rollouts_training_and_evaluation(tmp_path):
    tokenizer = bos_twice()
    encoder = ChatEncoder(tokenizer)
    prompt = Prompt("p", [{"role": "user", "content": "what is 1+1?"}])
    ids = encoder.encode(prompt)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "user: what is 1+1?\nassistant: "
    store = RolloutStore(tmp_path, {})
    generate_rollouts(Echo(), encoder, [prompt], store, max_new_tokens=4, progress=False)
    (rollout,) = store.load()
    assert rollout.prompt_ids == ids
    batch = WindowCollator(gamma=2, windows_per_rollout=2)([rollout])
    assert batch.input_ids[0, : len(ids)].tolist() == ids


def test_text_messages_and_prompt_encode_alike():
    encoder = ChatEncoder(bos_twice())
    messages = [{"role": "user", "content": "hi"}]
    assert encoder.encode("hi") == encoder.encode(messages) == encoder.encode(Prompt("p", messages))


def test_empty_prompts_are_refused():
    encoder = ChatEncoder(bos_twice())
    for empty in ("", "  ", []):
        with pytest.raises(ConfigError):
            encoder.encode(empty)


def test_fingerprint_follows_the_template():
    one, other = char_tokenizer(), bos_twice()
    assert ChatEncoder(one).fingerprint == ChatEncoder(char_tokenizer()).fingerprint != ChatEncoder(other).fingerprint


THINKING_TEMPLATE = "{{ messages[0]['content'] }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"


def thinking_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


@pytest.mark.parametrize(("thinking", "mode"), [(None, "default"), (True, True), (False, False)])
def test_encoder_of_a_verifier_has_its_thinking_mode(thinking, mode):
    tokenizer = thinking_tokenizer()
    encoder = ChatEncoder.of(tiny_verifier(300, tokenizer=tokenizer, thinking=thinking))
    assert encoder.thinking_mode == mode
    expected = "hi" if thinking is None else f"hi{thinking}"
    for prompt in ("hi", [{"role": "user", "content": "hi"}], Prompt("p", [{"role": "user", "content": "hi"}])):
        assert tokenizer.decode(encoder.encode(prompt)) == expected


def test_thinking_without_the_mode_is_refused_at_once():
    assert ChatEncoder(char_tokenizer()).thinking_mode is None
    with pytest.raises(ConfigError, match=r"thinking=false: .* without enable_thinking"):
        ChatEncoder(char_tokenizer(), False)


def test_bos_is_recorded_where_a_setting_decides_about_it():
    assert ChatEncoder(bos_twice()).bos == 1  # the template asks for bos_token
    assert ChatEncoder(char_tokenizer(add_bos=True)).bos is None  # "<s>" is spelled out in the template
    assert ChatEncoder(char_tokenizer(chat=False, add_bos=True)).bos == 1
    assert ChatEncoder(char_tokenizer(chat=False)).bos is None
