"""Tokenizers of masked-diffusion models without remote code, their mask id, and the ids that are never drafted.

Dream and DiffuCoder name a tokenizer class of their own (``tokenization_dream.DreamTokenizer``). It is Qwen2's
byte-level BPE with more added tokens, so ``vocab.json``, ``merges.txt`` and the added tokens of
``tokenizer_config.json`` give the same ids. What was loaded is compared with what the files promise. It knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from specdiff2.models.families import Family
from specdiff2.models.family_config import mask_id_of
from specdiff2.models.json_object import read_json_object
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

# which file decides, and the class that reads it; the first that is there wins
_READERS: tuple[tuple[str, Any], ...] = (
    ("tokenizer.json", PreTrainedTokenizerFast),
    ("vocab.json", Qwen2Tokenizer),
    ("tokenizer.model", LlamaTokenizer),
)


def load_family_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``. Never runs its code and never uses the network.

    Raises:
        ConfigError: there are no tokenizer files.
        CorruptFileError: a file cannot be read.
        MismatchError: a token got another id than the files promise.
    """
    reader = next((cls for name, cls in _READERS if (folder / name).is_file()), None)
    if reader is None:
        names = ", ".join(name for name, _ in _READERS)
        raise ConfigError(f"{folder}: holds no tokenizer (none of {names}); fetch the model again")
    try:
        tokenizer = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for files that it cannot read
        raise CorruptFileError(f"{folder}: the tokenizer cannot be read ({error}); fetch its files again") from error
    vocabulary = tokenizer.get_vocab()
    for token, token_id in _promised_ids(folder):
        if vocabulary.get(token) != token_id:
            raise MismatchError(
                f"{folder}: token {token!r} should have id {token_id} but got {vocabulary.get(token)}; the tokenizer "
                "files do not fit each other, fetch them again"
            )
    return tokenizer


def find_mask_id(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, family: Family, rows: int, source: object
) -> int:
    """The mask id: of config.json, else of the tokenizer's mask token, else the family's published one.

    Args:
        rows: of the embedding.

    Raises:
        MismatchError: config.json and the tokenizer name different ids.
        ConfigError: it has no embedding, or is an end-of-text token.
    """
    named = None if family.mask_token is None else tokenizer.get_vocab().get(family.mask_token)
    told = mask_id_of(config)
    if None not in (named, told) and named != told:
        raise MismatchError(
            f"{source}: mask_token_id={told} in config.json, but {family.mask_token!r} has id {named} in the "
            "tokenizer; the files do not belong together, fetch the model again"
        )
    mask_id = next(value for value in (told, named, family.mask_token_id) if value is not None)
    if not 0 <= mask_id < rows:
        raise ConfigError(f"{source}: mask id {mask_id} has no embedding ({rows} rows); check mask_token_id")
    if mask_id in end_ids(config, tokenizer):
        raise ConfigError(f"{source}: mask id {mask_id} is also an end-of-text token; check mask_token_id")
    return mask_id


def end_ids(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a text, by config.json or the tokenizer. They may be drafted."""
    told = config.get("eos_token_id")
    listed = told if isinstance(told, list) else [told]
    return frozenset(int(value) for value in [*listed, tokenizer.eos_token_id] if value is not None)


def forbidden_ids(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, family: Family, mask_id: int, rows: int
) -> frozenset[int]:
    """Ids that are never drafted: they mean nothing to a verifier, or nothing at all.

    The mask; and, unless the parent model's tokenizer has them too or they end a text: pads, added tokens, embedding
    rows without a token. Of Dream-7B's 152064 rows these are the ones from 151665 on.
    """
    vocabulary = tokenizer.get_vocab()
    shared = {vocabulary[token] for token in family.shared_tokens if token in vocabulary}
    pads = {config.get("pad_token_id"), tokenizer.pad_token_id} - {None}
    added = set(tokenizer.get_added_vocab().values())
    without_token = set(range(rows)) - set(vocabulary.values())
    meaningless = (pads | added | without_token | family.unused_ids) - shared - end_ids(config, tokenizer)
    return frozenset(int(value) for value in meaningless | {mask_id} if value < rows)


def _promised_ids(folder: Path) -> list[tuple[str, int]]:
    """Tokens and ids of ``added_tokens_decoder`` in ``tokenizer_config.json``, and of ``added_tokens.json``."""
    decoder = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    promised = [(entry["content"], int(token_id)) for token_id, entry in decoder.items()]
    return promised + [(token, int(token_id)) for token, token_id in _read_json(folder / "added_tokens.json").items()]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json_object(path)
