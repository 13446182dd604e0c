"""From a prompt to token ids: the one place used by rollouts, training and evaluation.

The formatting itself is ``models.chat_format.encode_chat`` (exactly one BOS, generation prompt added).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdiff2.data.fields import to_messages
from specdiff2.data.prompt import Prompt
from specdiff2.models.chat_format import encode_chat


class ChatEncoder:
    """Encodes text, chat messages or a ``Prompt`` with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of the chat template: another template means other prompt ids for the same text."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        return hashlib.sha256(template.encode("utf-8")).hexdigest()[:16]

    def encode(self, prompt: str | Sequence[Mapping[str, str]] | Prompt) -> list[int]:
        """Ids that end where the verifier's answer begins.

        Raises:
            ConfigError: the prompt is empty.
        """
        if isinstance(prompt, Prompt):
            return encode_chat(self.tokenizer, prompt.messages)
        if isinstance(prompt, str):
            return encode_chat(self.tokenizer, to_messages(prompt, "prompt"))
        return encode_chat(self.tokenizer, [dict(message) for message in prompt])
