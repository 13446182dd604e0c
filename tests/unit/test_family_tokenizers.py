"""Tokenizers of the families without remote code, the mask id, and which ids are never drafted."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from family_checkpoints import FAMILY_NAMES, write_checkpoint, write_parent_tokenizer
from family_tokenizer_files import LLADA_SPECIAL, OWN_TOKENS, QWEN3_ORDINARY, QWEN_ORDINARY, QWEN_SPECIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdiff2.models.families import FAMILIES
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.family_tokenizers import load_family_tokenizer
from specdiff2.types import ConfigError, CorruptFileError, MismatchError

TEXTS = ["The total is 12 + 30 = 42.", "  two  spaces\n\n\tand tabs ", "naïve café 日本語 🙂🏽", "x=['a'];\r\n", ""]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_checkpoint(root / name, name) for name in FAMILY_NAMES}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_texts_come_back_and_ids_are_the_parents(folders, name, tmp_path):
    tokenizer = load_family_tokenizer(folders[name])
    parent = write_parent_tokenizer(tmp_path / "parent", name)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert ids == parent(text).input_ids
    vocabulary, own = tokenizer.get_vocab(), set(OWN_TOKENS.get(name, []))
    assert {token: i for token, i in vocabulary.items() if token not in own} == parent.get_vocab()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_any_text_comes_back_byte_for_byte(folders, text):
    tokenizer = load_family_tokenizer(folders["llada"])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "specials"),
    [
        ("dream", QWEN_SPECIAL + QWEN_ORDINARY + OWN_TOKENS["dream"]),
        ("fast_dllm_v2", QWEN_SPECIAL + QWEN_ORDINARY + OWN_TOKENS["fast_dllm_v2"]),
        ("sdar", QWEN_SPECIAL + QWEN_ORDINARY + QWEN3_ORDINARY + OWN_TOKENS["sdar"]),
        ("llada", LLADA_SPECIAL),
        ("diffullama", ["<s>", "</s>"]),
    ],
)
def test_special_tokens_are_one_token_inside_text(folders, name, specials):
    tokenizer = load_family_tokenizer(folders[name])
    for token in specials:
        ids = tokenizer(f"a{token}b", add_special_tokens=False).input_ids
        assert ids.count(tokenizer.get_vocab()[token]) == 1 and tokenizer.convert_ids_to_tokens(ids)[1:-1] != []
    listed = [tokenizer.get_vocab()[token] for token in specials]
    assert listed == sorted(listed)  # the authors' order


def test_chat_template_and_begin_token(folders):
    qwen = load_family_tokenizer(folders["dream"])
    text = qwen.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert load_family_tokenizer(folders["diffullama"])("hi").input_ids[0] == 1  # Llama 2 puts <s> first
    assert load_family_tokenizer(folders["llada"])("hi").input_ids[0] != 300  # LLaDA does not


# ---------------------------------------------------------------- real ids
@pytest.mark.parametrize(
    ("name", "rows", "first", "end"),
    [("dream", 152064, 151665, 151643), ("fast_dllm_v2", 152064, 151665, 151645), ("sdar", 151936, 151669, 151643)],
)
def test_real_ids_of_the_qwen_families(tmp_path, name, rows, first, end):
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    folder = write_checkpoint(tmp_path / name, name, vocab=rows, first_special_id=151643, **shape)
    base = load_family_model(folder, dtype="bfloat16")
    assert base.mask_token_id == FAMILIES[name].mask_token_id
    assert base.forbidden_ids == frozenset(range(first, rows))
    assert base.tokenizer.eos_token_id == end


def test_forbidden_ids_of_the_llama_families(folders):
    llada = load_family_model(folders["llada"], dtype="float32")
    vocabulary = llada.tokenizer.get_vocab()
    expected = {vocabulary[token] for token in LLADA_SPECIAL if token != "<|endoftext|>"}
    assert llada.forbidden_ids == expected | set(range(316, 352))  # and rows without a token
    llama = load_family_model(folders["diffullama"], dtype="float32")
    assert llama.forbidden_ids == {0, 1, llama.mask_token_id} | set(range(len(llama.tokenizer), 384))
    assert 2 not in llama.forbidden_ids


def test_published_mask_and_pad_of_diffullama(tmp_path):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama", vocab=32000)
    _edit(folder / "config.json", mask_token_id=None)
    base = load_family_model(folder, dtype="bfloat16")
    assert base.mask_token_id == 811 and {811, 30399} <= base.forbidden_ids


# ---------------------------------------------------------------- refusals
def _edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_config_and_tokenizer_must_name_the_same_mask(tmp_path):
    folder = write_checkpoint(tmp_path / "dream", "dream")
    _edit(folder / "config.json", mask_token_id=322)
    with pytest.raises(MismatchError, match=r"mask_token_id=322.*'<\|mask\|>' has id 323"):
        load_family_model(folder, dtype="float32")


@pytest.mark.parametrize(("mask", "told"), [(900, "no embedding"), (-1, "no embedding"), (2, "end-of-text")])
def test_impossible_mask_ids(tmp_path, mask, told):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama")
    _edit(folder / "config.json", mask_token_id=mask)
    with pytest.raises(ConfigError, match=f"mask id {mask}.*{told}"):
        load_family_model(folder, dtype="float32")


def test_published_mask_beyond_the_vocabulary_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama")
    _edit(folder / "config.json", mask_token_id=None)
    with pytest.raises(ConfigError, match="mask id 811 has no embedding"):
        load_family_model(folder, dtype="float32")


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_a_token_with_another_id_than_promised(tmp_path, file):
    folder = write_checkpoint(tmp_path / "fast", "fast_dllm_v2")
    if file == "added_tokens.json":
        _edit(folder / file, **{"<|im_end|>": 17})
    else:
        decoder = json.loads((folder / file).read_text())["added_tokens_decoder"]
        decoder["17"] = decoder.pop("302")
        _edit(folder / file, added_tokens_decoder=decoder)
    with pytest.raises(MismatchError, match=r"<\|im_end\|>.*id 17 but got 302"):
        load_family_tokenizer(folder)


def test_missing_and_damaged_tokenizer_files(tmp_path):
    folder = write_checkpoint(tmp_path / "dream", "dream")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"dream.*fetch"):
        load_family_tokenizer(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer.*tokenizer\.json, vocab\.json, tokenizer\.model"):
        load_family_tokenizer(folder)
    broken = write_checkpoint(tmp_path / "llada", "llada")
    (broken / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CorruptFileError, match="tokenizer cannot be read"):
        load_family_tokenizer(broken)
    lost = write_checkpoint(tmp_path / "sdar", "sdar")
    (lost / "merges.txt").unlink()
    with pytest.raises((ConfigError, CorruptFileError), match="sdar"):
        load_family_tokenizer(lost)


def test_a_sentencepiece_model_alone_is_enough(tmp_path: Path) -> None:
    """As LLaMA-2 style repositories without tokenizer.json have it; against the sentencepiece library itself."""
    folder = write_checkpoint(tmp_path / "diffullama", "diffullama")
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the answer is 42. so the total is 12 + 30 = 42 apples"] * 20), model_writer=stored,
        vocab_size=300, model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(stored.getvalue())
    tokenizer = load_family_tokenizer(folder)
    expected = sentencepiece.SentencePieceProcessor(model_proto=stored.getvalue())
    for text in ("the answer is 42", "naïve 你好, 12+30"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == expected.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
