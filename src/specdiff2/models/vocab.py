"""Which token ids are real, and whether two tokenizers mean the same by them.

Sizes say little: heads are padded to round numbers (Qwen2.5: 152064 or 151936 rows for the same 151665 tokens), and two
tokenizers of equal size may differ. So token -> id maps are compared. Embeddings are never resized.
"""

from __future__ import annotations

import hashlib

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdiff2.types import MismatchError


def head_rows(model: PreTrainedModel) -> int:
    """Rows of the output head, padding included."""
    return int(model.get_output_embeddings().weight.shape[0])


def real_vocab_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Ids 0 .. size-1 that the tokenizer can produce and the head can score; all rows without a tokenizer."""
    rows = head_rows(model)
    if tokenizer is None:
        return rows
    return min(rows, max(tokenizer.get_vocab().values()) + 1)


def check_same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> None:
    """Raises MismatchError naming the first id (in id order) at which the token -> id maps differ."""
    a, b = _by_id(first), _by_id(second)
    for token_id in sorted(a.keys() | b.keys()):
        if a.get(token_id) != b.get(token_id):
            raise MismatchError(
                f"tokenizers differ first at id {token_id}: {_show(a.get(token_id))} against {_show(b.get(token_id))} "
                f"({len(a)} and {len(b)} tokens); use a drafter and a verifier with the same tokenizer"
            )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Digest of the token -> id map; "none" without a tokenizer. Chat templates are not part of it."""
    if tokenizer is None:
        return "none"
    digest = hashlib.blake2b(digest_size=16)
    for token_id, token in sorted(_by_id(tokenizer).items()):
        digest.update(f"{token_id}\t{token}\n".encode())
    return digest.hexdigest()


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)
