"""From a server's answer to the ids of a rollout.

Ids that the server gives are taken as they are. Text is encoded again with the verifier's tokenizer, together with the
prompt where that leaves the prompt's ids alone. What was sampled may have been other tokens of the same text, so the
manifest counts how it went, under ``seam``:

- ``ok``: the ids decode to the prompt and the text, and are as many as the server counted.
- ``count``: they do, but the server counted another number: it sampled another spelling of the text.
- ``cut``: they do not (half a character at the end, text that the tokenizer changes): kept as far as they do.

All are kept: leaving some out would bend the law, and every stored token's text is the verifier's own. EOS is added
only where the server says that it ended the answer, never after a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdiff2.types import ConfigError, MismatchError

if TYPE_CHECKING:
    from specdiff2.data.served_api import Answer

_HALF = "\ufffd"  # stands for bytes that are no character


def prompt_as_text(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """Text that a server with this tokenizer, which may add special tokens as usual, encodes to exactly these ids.

    Raises:
        ConfigError: there is none.
    """
    for skipped in (0, 1):  # one: a BOS that the server's tokenizer adds itself
        text = _decode(tokenizer, prompt_ids[skipped:])
        if list(tokenizer(text)["input_ids"]) == list(prompt_ids):
            return text
    raise ConfigError(
        "a server that takes prompts only as text cannot be sent these prompts: their text does not encode to the same "
        "ids; use a server that takes token ids, or interface=chat"
    )


def completion_of(
    answer: Answer, prompt_ids: Sequence[int], verifier: Any, max_new_tokens: int
) -> tuple[list[int], dict[str, str]]:
    """(ids, EOS included when reached; what the manifest counts).

    Args:
        verifier: tokenizer, vocab_size and eos_ids are read.

    Raises:
        MismatchError: the server counts another number of prompt tokens, or gives ids that the verifier does not have.
    """
    if answer.num_prompt_tokens not in (None, len(prompt_ids)):
        raise MismatchError(
            f"the server counts {answer.num_prompt_tokens} tokens in a prompt of {len(prompt_ids)}: it has another "
            "tokenizer or chat template than the verifier, or cuts prompts; check that it serves verifier.source"
        )
    meta = {"finish_reason": answer.finish_reason, "tokens": "server"}
    ids, whole = answer.token_ids, True
    if ids is None:
        ids, seam, whole = _encode(answer, prompt_ids, verifier.tokenizer)
        meta |= {"tokens": "retokenized", "seam": seam}
    if any(not 0 <= token < verifier.vocab_size for token in ids):
        raise MismatchError(
            f"the server gave token id {max(ids)}, the verifier has 0 .. {verifier.vocab_size - 1}: it serves another "
            "model than verifier.source"
        )
    ends = [index for index, token in enumerate(ids) if token in verifier.eos_ids]
    if ends:
        ids = ids[: ends[0] + 1]
    elif answer.finish_reason == "stop" and whole and verifier.eos_ids:
        ids = [*ids, _eos(answer, verifier)]
    return ids[:max_new_tokens], meta


def _eos(answer: Answer, verifier: Any) -> int:
    """The one of several EOS ids that the server names, else the tokenizer's own."""
    for token in (answer.stop_id, verifier.tokenizer.eos_token_id):
        if token is not None and token in verifier.eos_ids:
            return int(token)
    return min(verifier.eos_ids)


def _encode(answer: Answer, prompt_ids: Sequence[int], tokenizer: Any) -> tuple[list[int], str, bool]:
    """(ids of the text, how it went, whether they are all of it)."""
    prompt, text = _decode(tokenizer, prompt_ids), answer.text.split(_HALF)[0]
    joint = list(tokenizer(prompt + text, add_special_tokens=False)["input_ids"])
    if joint[: len(prompt_ids)] == list(prompt_ids):
        ids = joint[len(prompt_ids) :]
    else:  # the text's first characters would join the prompt's last token, which the verifier had already read
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    kept = list(ids)
    while kept and not (prompt + text).startswith(_decode(tokenizer, [*prompt_ids, *kept])):
        kept.pop()
    if len(kept) < len(ids) or text != answer.text or _decode(tokenizer, [*prompt_ids, *kept]) != prompt + text:
        return kept, "cut", False
    num_sampled = None if answer.num_tokens is None else answer.num_tokens - (answer.finish_reason == "stop")
    return kept, "ok" if num_sampled in (None, len(kept)) else "count", True


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
