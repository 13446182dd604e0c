"""Chat messages to prompt ids, in one place for rollouts, training, evaluation and decoding.

Knows only the tokenizer it is handed (duck-typed, a Hugging Face tokenizer in practice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdiff2.types import ConfigError


def encode_chat(tokenizer: Any, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation that the model is to continue; a plain text is one user message.

    The chat template writes the special tokens itself, so the tokenizer adds none (a template that renders BOS
    and a tokenizer that adds BOS still give one BOS). A tokenizer without a chat template belongs to a base
    model: it gets the message contents, joined by blank lines, with the special tokens it adds in front.

    Raises:
        ConfigError: no messages, a message without role or content, or no ids come out.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for message in messages:
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise ConfigError(f"chat message {message!r}: expected a mapping with role and content")
    if not any(message["content"] for message in messages):
        raise ConfigError(f"chat messages {list(messages)!r}: expected at least one message with content")
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    else:
        encoded = _without_final_eos(tokenizer, "\n\n".join(message["content"] for message in messages))
    ids = [int(token) for token in encoded]
    if not ids:
        raise ConfigError(f"chat messages {list(messages)!r}: the tokenizer gave no tokens for them")
    return ids


def _without_final_eos(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    # some tokenizers also close the text with EOS, which would end the prompt that is to be continued
    if ids and ids[-1] == tokenizer.eos_token_id and (not bare or bare[-1] != tokenizer.eos_token_id):
        ids.pop()
    return ids
