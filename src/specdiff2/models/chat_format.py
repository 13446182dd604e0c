"""Chat messages to prompt ids, in one place for rollouts, training, evaluation and decoding.

Knows only the tokenizer it is handed (duck-typed, a Hugging Face tokenizer in practice): what is written around the
messages is its own chat template's business. Two variables of templates are settled here. ``enable_thinking`` comes
from the caller (Qwen3: on unless told otherwise, qwen.readthedocs.io/en/v3.0, getting_started/quickstart).
``date_string``, which Llama 3 writes into every prompt, is a constant: 3.1 has this one itself, 3.2 reads the clock
(sgl-project/sglang, issue 3296; oobabooga/textgen, pull request 6692), and the same text must have the same ids
tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from specdiff2.types import ConfigError

PROMPT_DATE = "26 Jul 2024"  # what Llama 3's templates write themselves where they have no clock


def knows_thinking(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template can switch a thinking mode on and off."""
    return "enable_thinking" in str(getattr(tokenizer, "chat_template", None))


def check_thinking(tokenizer: Any, thinking: bool | None) -> None:
    """Raises ConfigError: not null, true or false; or given for a template that cannot switch it."""
    if thinking is not None and not isinstance(thinking, bool):
        raise ConfigError(f"thinking={thinking!r}: expected null (the chat template's own default), true or false")
    if thinking is not None and not knows_thinking(tokenizer):
        has = "a chat template without enable_thinking" if _template(tokenizer) else "no chat template"
        raise ConfigError(
            f"verifier.thinking={str(thinking).lower()}: {_name(tokenizer)} has {has}, so there is no thinking mode to "
            "switch; leave verifier.thinking=null, or choose a verifier with the mode (Qwen3)"
        )


def encode_chat(tokenizer: Any, messages: str | Sequence[Mapping[str, str]], thinking: bool | None = None) -> list[int]:
    """Ids of a conversation that the model is to continue; a plain text is one user message.

    The chat template writes the special tokens itself, so the tokenizer adds none (a template that renders BOS
    and a tokenizer that adds BOS still give one BOS). A tokenizer without a chat template belongs to a base
    model: it gets the message contents, joined by blank lines, with the special tokens it adds in front.

    Args:
        thinking: the template's ``enable_thinking``; None leaves it to the template.

    Raises:
        ConfigError: no messages, a message without role or content, messages that the template refuses (some have no
            system role), no ids come out, or see ``check_thinking``.
    """
    check_thinking(tokenizer, thinking)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for message in messages:
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise ConfigError(f"chat message {message!r}: expected a mapping with role and content")
    if not any(message["content"] for message in messages):
        raise ConfigError(f"chat messages {list(messages)!r}: expected at least one message with content")
    if _template(tokenizer) is not None:
        encoded = _templated(tokenizer, messages, {} if thinking is None else {"enable_thinking": thinking})
    else:
        encoded = _without_final_eos(tokenizer, "\n\n".join(message["content"] for message in messages))
    ids = [int(token) for token in encoded]
    if not ids:
        raise ConfigError(f"chat messages {list(messages)!r}: the tokenizer gave no tokens for them")
    return ids


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]], variables: Mapping[str, bool]) -> list[int]:
    plain = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=True, return_dict=False, date_string=PROMPT_DATE, **variables
        )
    except TemplateError as error:
        raise ConfigError(
            f"the chat template of {_name(tokenizer)} refuses messages of the roles "
            f"{[message['role'] for message in plain]}: {error}; use prompts with roles that it knows"
        ) from error


def _template(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None) or None


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the verifier"


def _without_final_eos(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    # some tokenizers also close the text with EOS, which would end the prompt that is to be continued
    if ids and ids[-1] == tokenizer.eos_token_id and (not bare or bare[-1] != tokenizer.eos_token_id):
        ids.pop()
    return ids
