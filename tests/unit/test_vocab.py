"""Real vocabulary, tokenizer comparison, and the ids that a verifier and a drafter share."""

from collections.abc import Sequence

import pytest
import torch
from helpers import byte_tokenizer, char_tokenizer, tiny_llama, tiny_verifier
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdiff2.models import dtypes
from specdiff2.models.verifier import find_eos_ids
from specdiff2.models.vocab import (
    check_same_tokenizer,
    real_vocab_size,
    same_tokenizer,
    shared_ids,
    tokenizer_fingerprint,
)
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, MismatchError, SamplingParams

WORDS = [f"w{i}" for i in range(60)]


def word_tokenizer(words: list[str], added: Sequence[str | AddedToken] = ()) -> PreTrainedTokenizerFast:
    """Regular tokens ``words`` at ids 0, 1, ..; then the added ones."""
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))
    tokenizer.add_tokens(list(added))
    return tokenizer


def bytes_trained_on(text: str) -> PreTrainedTokenizerFast:
    """300 tokens, of which 256 are the bytes: numbered alike whatever the text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def share(
    verifier: PreTrainedTokenizerBase,
    drafter: PreTrainedTokenizerBase,
    *,
    size: int = 60,
    rows: int = 60,
    mask: int = 7,
) -> tuple[list[int], list[int]]:
    return shared_ids(verifier, size, drafter, rows, {mask}, mask_token_id=mask, replacement_id=0)


def test_swapped_ids_are_refused_naming_the_first_token():
    """Case 18."""
    words = [f"w{i}" for i in range(10)]
    first = word_tokenizer(words)
    swapped = word_tokenizer([*words[:4], words[7], *words[5:7], words[4], *words[8:]])
    check_same_tokenizer(first, word_tokenizer(words))
    with pytest.raises(MismatchError, match="id 4: 'w4' against 'w7'"):
        check_same_tokenizer(first, swapped)
    with pytest.raises(MismatchError, match="id 9: 'w9' against no token"):
        check_same_tokenizer(first, word_tokenizer(words[:9]))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(word_tokenizer(words))
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(swapped)
    assert tokenizer_fingerprint(None) == "none"


def test_a_family_has_the_same_regular_tokens_and_added_ones_of_its_own():
    """Qwen3 and DiffuCoder in small: id 62 is a tool token of the one and the mask of the other."""
    end, mask = AddedToken("<end>", special=True), AddedToken("<mask>", special=True)
    verifier = word_tokenizer(WORDS, [end, "<think>", "</tool>"])
    drafter = word_tokenizer(WORDS, [end, AddedToken("<begin>", special=True), mask, "<more>"])
    assert same_tokenizer(verifier, drafter) and same_tokenizer(drafter, verifier)
    with pytest.raises(MismatchError, match="id 61: '<think>' against '<begin>'"):
        check_same_tokenizer(verifier, drafter)
    draft_ids, shown = shared_ids(verifier, 63, drafter, 80, {62, 61, 5}, mask_token_id=62, replacement_id=60)
    assert draft_ids == [i for i in range(61) if i != 5]
    assert shown == [*range(61), 60, 60]  # 5 is forbidden to draft, but known: shown as itself


def test_mask_that_is_a_token_of_the_text_is_not_drafted_and_not_shown():
    """DiffuLLaMA's mask is one of LLaMA's regular tokens."""
    tokenizer = word_tokenizer(WORDS)
    draft_ids, shown = shared_ids(tokenizer, 60, tokenizer, 60, (), mask_token_id=7, replacement_id=2)
    assert draft_ids == [i for i in range(60) if i != 7]
    assert shown == [*range(7), 2, *range(8, 60)]


@pytest.mark.parametrize(("verifier_rows", "drafter_rows"), [(80, 64), (64, 80)])
def test_case_17_heads_of_other_sizes_share_the_real_tokens(verifier_rows: int, drafter_rows: int):
    tokenizer = word_tokenizer(WORDS)
    size = real_vocab_size(tiny_llama(verifier_rows), tokenizer)
    draft_ids, shown = share(tokenizer, tokenizer, size=size, rows=drafter_rows, mask=63)
    assert draft_ids == shown == list(range(60))


@pytest.mark.parametrize(("verifier_words", "drafter_words"), [(80, 64), (64, 80)])
def test_case_17_tokens_that_one_side_lacks_are_not_drafted(verifier_words: int, drafter_words: int):
    words = [f"w{i}" for i in range(80)]
    verifier, drafter = word_tokenizer(words[:verifier_words]), word_tokenizer(words[:drafter_words])
    draft_ids, shown = share(verifier, drafter, size=verifier_words, rows=96, mask=90)
    assert draft_ids == list(range(64))
    assert shown == [*range(64), *[0] * (verifier_words - 64)]


def test_a_drafter_with_too_few_rows_shares_only_those():
    tokenizer = word_tokenizer(WORDS)
    assert share(tokenizer, tokenizer, rows=50, mask=49) == ([*range(49)], [*range(49), *[0] * 11])


def test_case_18_swapped_regular_tokens_are_an_error_not_another_tokenizer():
    swapped = word_tokenizer([*WORDS[:4], WORDS[7], *WORDS[5:7], WORDS[4], *WORDS[8:]])
    for check in (same_tokenizer, share):
        with pytest.raises(MismatchError, match="id 4: 'w4' against 'w7'"):
            check(word_tokenizer(WORDS), swapped)


def test_a_token_moved_to_an_id_that_the_other_lacks_is_an_error():
    moved = word_tokenizer(WORDS[:59], ["<pad>"])
    moved.backend_tokenizer.model = models.WordLevel(
        {word: i for i, word in enumerate(WORDS[:59])} | {"w59": 61}, unk_token="w0"
    )
    with pytest.raises(MismatchError, match="id 59: 'w59' against no token"):
        same_tokenizer(word_tokenizer(WORDS), moved)


def test_unrelated_tokenizers_are_another_tokenizer():
    letters = bytes_trained_on("the answer is forty two and the rest is seven " * 9)
    digits = bytes_trained_on("12+30=42; 99-5=94; 2024-11-30 17:45 " * 9)
    same_bytes = sum(letters.get_vocab().get(token) == i for token, i in digits.get_vocab().items())
    assert same_bytes >= 256  # most ids agree, yet nothing learned does
    for first, second in ((letters, digits), (byte_tokenizer(), char_tokenizer()), (char_tokenizer(), letters)):
        assert not same_tokenizer(first, second)
        with pytest.raises(MismatchError, match="re-tokenised"):
            share(first, second)
    assert same_tokenizer(char_tokenizer(), char_tokenizer(size=50)) and same_tokenizer(letters, letters)


@pytest.mark.parametrize("replacement", [-1, 7, 60])
def test_bad_replacement_is_refused(replacement: int):
    tokenizer = word_tokenizer(WORDS)
    with pytest.raises(ConfigError, match=f"replacement_id={replacement}: .* mask id 7"):
        shared_ids(tokenizer, 60, tokenizer, 60, {7}, mask_token_id=7, replacement_id=replacement)


def test_real_vocab_size():
    model = tiny_llama(80)
    assert real_vocab_size(model, None) == 80
    assert real_vocab_size(model, char_tokenizer(size=50)) == 50
    assert real_vocab_size(model, byte_tokenizer()) == 80  # more tokens than the head has rows


def test_padded_rows_never_appear():
    """Case 17: rows 50.. of the head boosted by +50."""
    tokenizer = char_tokenizer(size=50)
    verifier = tiny_verifier(80, tokenizer=tokenizer, eos_ids=())
    head = verifier.model.get_output_embeddings()
    plain = head.forward
    bonus = torch.zeros(80)
    bonus[50:] = 50.0
    head.forward = lambda hidden: plain(hidden) + bonus
    assert verifier.vocab_size == 50
    logits = verifier.start([5, 6], 4).score(TokenTree.from_chains(6, [[1, 2], [3, 4]]))
    assert logits.shape == (5, 50)
    for temperature in (0.0, 1.0, 5.0):
        sampling = SamplingParams(temperature=temperature)
        completions = verifier.sample_batch([[5, 6], [7]], sampling, 40, torch.Generator().manual_seed(0))
        assert max(map(max, completions)) < 50


@pytest.mark.parametrize("vocab_size", [0, 65])
def test_bad_vocab_size_is_refused(vocab_size: int):
    with pytest.raises(ConfigError, match="vocab_size"):
        tiny_verifier(64, vocab_size=vocab_size)


def test_eos_ids_come_from_the_first_place_that_has_them():
    tokenizer = char_tokenizer()
    model = tiny_llama()
    assert find_eos_ids(model, None) == frozenset()
    assert find_eos_ids(model, tokenizer) == {2}
    model.config.eos_token_id = 7
    assert find_eos_ids(model, tokenizer) == {7}
    model.generation_config.eos_token_id = [8, 9]
    assert find_eos_ids(model, tokenizer) == {8, 9}


def test_pick_dtype(tmp_path, monkeypatch: pytest.MonkeyPatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(dtypes, "_CPUINFO", cpuinfo)
    assert dtypes.pick_dtype("auto") == torch.float32  # no such file
    assert dtypes.describe_cpu()["model"] == "unknown"
    bf16 = torch.bfloat16
    for flags, expected in (("sse avx512f", torch.float32), ("avx512_bf16", bf16), ("amx_bf16 x", bf16)):
        cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n", encoding="utf-8")
        assert dtypes.pick_dtype("auto") == expected
    assert dtypes.describe_cpu() == {
        "model": "Some CPU",
        "amx_bf16": True,
        "avx512_bf16": False,
        "threads": torch.get_num_threads(),
    }
    assert dtypes.pick_dtype("float32") == torch.float32
    with pytest.raises(ConfigError, match="dtype='bf16'"):
        dtypes.pick_dtype("bf16")
