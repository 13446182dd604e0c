"""Case 20: one BOS, and one way from messages to ids."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from specdiff2.models.chat_format import encode_chat
from specdiff2.types import ConfigError

BOS, EOS = 1, 2


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
