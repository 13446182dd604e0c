"""Real vocabulary and tokenizer comparison."""

import pytest
import torch
from helpers import byte_tokenizer, char_tokenizer, tiny_llama, tiny_verifier
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdiff2.models import dtypes
from specdiff2.models.verifier import find_eos_ids
from specdiff2.models.vocab import check_same_tokenizer, real_vocab_size, tokenizer_fingerprint
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, MismatchError, SamplingParams


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))


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
