"""What decoders accept as a prompt, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdiff2.protocols import Verifier
from specdiff2.types import ConfigError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def prompt_ids(verifier: Verifier, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: ids pass through, a text or chat messages go through the verifier's chat template
    in the verifier's thinking mode.

    Raises:
        ConfigError: empty prompt, or a text for a verifier without tokenizer.
    """
    if not prompt:
        raise ConfigError(f"prompt={prompt!r}: expected at least one token")
    if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
        tokenizer = getattr(verifier, "tokenizer", None)
        if tokenizer is None:
            raise ConfigError("prompt is text, but the verifier has no tokenizer; pass token ids")
        from specdiff2.models.chat_format import encode_chat

        return encode_chat(tokenizer, prompt, getattr(verifier, "thinking", None))  # type: ignore[arg-type]
    return list(prompt)  # type: ignore[arg-type]
