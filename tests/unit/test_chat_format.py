"""Case 20: one BOS, one way from messages to ids, and the habits of the families' templates.

The templates here are written for these tests in the style of the real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import byte_tokenizer, tiny_llama, tiny_verifier
from tokenizers.processors import TemplateProcessing

from specdiff2.decoding.prompting import prompt_ids
from specdiff2.models.chat_format import encode_chat, knows_thinking
from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError, CorruptFileError

BOS, EOS = 1, 2

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
QWEN3 = CHATML + (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    + CHATML
    + "{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set first = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (first if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|start|>system<|end|>Today: ' + date_string + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>' + m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}"
)


def tokenizer_with(template: str | None):
    """A tokenizer that adds BOS itself, as LLaMA's do."""
    tokenizer = byte_tokenizer(chat=False, add_bos=True)
    tokenizer.chat_template = template
    tokenizer.name_or_path = "some/model"
    return tokenizer


def test_template_with_bos_and_tokenizer_with_bos_give_one() -> None:
    tokenizer = byte_tokenizer(add_bos=True)
    tokenizer.chat_template = "{{ bos_token }}" + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert tokenizer("hi")["input_ids"][0] == BOS
    ids = encode_chat(tokenizer, "hi")
    assert ids[0] == BOS and ids.count(BOS) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def test_a_text_is_one_user_message_and_the_answer_is_opened() -> None:
    tokenizer = byte_tokenizer()
    assert encode_chat(tokenizer, "hi") == encode_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(encode_chat(tokenizer, "hi")) == "<s>user: hi</s><s>assistant: "


@pytest.mark.parametrize("adds_eos", [False, True])
def test_base_model_tokenizer_gets_plain_text_that_can_be_continued(adds_eos: bool) -> None:
    tokenizer = byte_tokenizer(chat=False, add_bos=True)
    if adds_eos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    ids = encode_chat(tokenizer, messages)
    assert ids[0] == BOS and ids.count(BOS) == 1 and EOS not in ids
    assert tokenizer.decode(ids[1:]) == "a\n\nb"


@pytest.mark.parametrize("messages", ["", [], [{"role": "user", "content": ""}], [{"role": "user"}], ["hi"]])
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ConfigError, match="message"):
        encode_chat(byte_tokenizer(), messages)


OPENED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, OPENED),
        (QWEN25, "<|im_start|>system\nBe helpful.<|im_end|>\n" + OPENED),
        (LLAMA2, "<s>[INST] hi [/INST]"),
        (
            LLAMA3,
            "<s><|start|>system<|end|>Today: 26 Jul 2024<|eot|><|start|>user<|end|>hi<|eot|><|start|>assistant<|end|>",
        ),
        (None, "<s>hi"),
    ],
    ids=["qwen3", "qwen2.5", "llama2", "llama3", "base"],
)
def test_families(template: str | None, expected: str) -> None:
    """Each as its template says, the date included: the same today and tomorrow. One BOS where there is one."""
    tokenizer = tokenizer_with(template)
    ids = encode_chat(tokenizer, "hi")
    assert tokenizer.decode(ids) == expected
    assert ids.count(BOS) == expected.count("<s>") <= 1


def test_llama2_system_prompt_and_later_turns() -> None:
    tokenizer = tokenizer_with(LLAMA2)
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    expected = "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nu [/INST] a </s><s>[INST] u [/INST]"
    assert tokenizer.decode(encode_chat(tokenizer, turns)) == expected


def test_messages_that_the_template_refuses_are_an_error_of_ours() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ConfigError, match=r"some/model refuses messages .*'user', 'user'.*roles must take turns"):
        encode_chat(tokenizer_with(LLAMA2), turns)


def test_thinking_is_the_templates_enable_thinking() -> None:
    tokenizer = tokenizer_with(QWEN3)
    assert encode_chat(tokenizer, "hi", True) == encode_chat(tokenizer, "hi", None) == encode_chat(tokenizer, "hi")
    assert tokenizer.decode(encode_chat(tokenizer, "hi", False)) == OPENED + "<think>\n\n</think>\n\n"
    assert [knows_thinking(tokenizer_with(t)) for t in (QWEN3, QWEN25, LLAMA2, LLAMA3, None)] == [True] + [False] * 4


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_that_cannot_be_switched_is_refused(thinking: bool) -> None:
    for template, reason in ((QWEN25, "a chat template without enable_thinking"), (None, "no chat template")):
        with pytest.raises(ConfigError, match=f"thinking={str(thinking).lower()}: some/model has {reason}.*null"):
            encode_chat(tokenizer_with(template), "hi", thinking)
        with pytest.raises(ConfigError, match=f"some/model has {reason}"):
            tiny_verifier(300, tokenizer=tokenizer_with(template), thinking=thinking)
    with pytest.raises(ConfigError, match="thinking=1: expected null"):
        encode_chat(tokenizer_with(QWEN3), "hi", 1)  # type: ignore[arg-type]


def test_thinking_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    tiny_llama(300).save_pretrained(tmp_path)
    tokenizer_with(QWEN25).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"thinking=false: .* without enable_thinking"):
        HFVerifier.from_pretrained(str(tmp_path), thinking=False)
    with pytest.raises(CorruptFileError):
        HFVerifier.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("thinking", [None, True, False])
def test_decoders_use_the_verifiers_mode(thinking: bool | None) -> None:
    tokenizer = tokenizer_with(QWEN3)
    verifier = tiny_verifier(300, tokenizer=tokenizer, thinking=thinking)
    assert prompt_ids(verifier, "hi") == encode_chat(tokenizer, "hi", thinking)
    assert prompt_ids(verifier, [5, 6]) == [5, 6]


@pytest.mark.real
def test_smollm2s_own_template(smollm2: Any) -> None:
    """It names itself where no system prompt is given, and knows no thinking mode."""
    tokenizer = smollm2.tokenizer
    text = tokenizer.decode(encode_chat(tokenizer, "hi"))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert not knows_thinking(tokenizer) and smollm2.thinking is None
