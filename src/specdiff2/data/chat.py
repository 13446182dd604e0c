"""From a prompt to token ids: the one place used by rollouts, training and evaluation.

The formatting itself is ``models.chat_format.encode_chat`` (exactly one BOS, generation prompt added). The encoder also
describes what decides the ids besides the tokens themselves, for the manifest of a rollout store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from specdiff2.data.fields import to_messages
from specdiff2.data.prompt import Prompt
from specdiff2.models.chat_format import check_thinking, encode_chat, knows_thinking


class ChatEncoder:
    """Encodes text, chat messages or a ``Prompt`` with one tokenizer.

    Args:
        thinking: whether the verifier is asked to think first; None is the chat template's own default.

    Raises:
        ConfigError: ``thinking`` for a template that cannot switch it.
    """

    def __init__(self, tokenizer: Any, thinking: bool | None = None) -> None:
        check_thinking(tokenizer, thinking)
        self.tokenizer, self.thinking = tokenizer, thinking

    @classmethod
    def of(cls, verifier: Any) -> Self:
        """The encoder of a verifier: its tokenizer, its thinking mode."""
        return cls(verifier.tokenizer, verifier.thinking)

    @property
    def fingerprint(self) -> str:
        """Hash of the chat template: another template means other prompt ids for the same text."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        return hashlib.sha256(template.encode("utf-8")).hexdigest()[:16]

    @property
    def thinking_mode(self) -> str | bool | None:
        """``true`` or ``false`` as given, ``"default"`` if left to the template; None where there is no such mode."""
        if not knows_thinking(self.tokenizer):
            return None
        return "default" if self.thinking is None else self.thinking

    @property
    def bos(self) -> int | None:
        """The BOS id that prompts begin with, where a setting of the tokenizer decides about it: without a template,
        or in one that asks for ``bos_token``. (One that a template spells out is part of the template.)
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if template and "bos_token" not in str(template):
            return None
        first = self.encode("x")[0]
        return first if first == self.tokenizer.bos_token_id else None

    def encode(self, prompt: str | Sequence[Mapping[str, str]] | Prompt) -> list[int]:
        """Ids that end where the verifier's answer begins.

        Raises:
            ConfigError: the prompt is empty.
        """
        if isinstance(prompt, Prompt):
            messages = prompt.messages
        elif isinstance(prompt, str):
            messages = to_messages(prompt, "prompt")
        else:
            messages = [dict(message) for message in prompt]
        return encode_chat(self.tokenizer, messages, self.thinking)
