"""Completion and Detokenizer: cases 9 and 10 without any model."""

from __future__ import annotations

import pytest
from helpers import byte_tokenizer, char_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff2.decoding.detokenize import Detokenizer
from specdiff2.decoding.stopping import Completion
from specdiff2.types import ConfigError

BYTES = byte_tokenizer()
CHARS = char_tokenizer()
EOS = 2


class WordTokenizer:
    """Ids are words: enough to spell out stop strings by token."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words = words
        self.all_special_ids: list[int] = []

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        return "".join(self.words[token] for token in token_ids)


class Stream:
    def __init__(self) -> None:
        self.calls: list[tuple[list[int], str]] = []

    def __call__(self, tokens: list[int], text: str) -> None:
        self.calls.append((tokens, text))

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.calls for token in tokens]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.calls)


def push_all(completion: Completion, tokens: list[int], size: int) -> None:
    """As the decoders do: rounds of ``size`` tokens until the output ends."""
    for start in range(0, len(tokens), size):
        if completion.stop_reason is not None:
            return
        completion.push(tokens[start : start + size])


# ---------------------------------------------------------------- EOS and length
@pytest.mark.parametrize("slot", range(5))
@pytest.mark.parametrize("eos_ids", [{7}, {7, 8}])
def test_output_ends_at_the_first_eos(slot: int, eos_ids: set[int]) -> None:
    tokens = [10, 11, 12, 13, 14]
    tokens[slot] = 7
    stream = Stream()
    completion = Completion(max_new_tokens=100, eos_ids=eos_ids, on_tokens=stream)
    assert completion.push([*tokens, 8, 9]) == slot + 1
    assert completion.tokens == stream.tokens == tokens[: slot + 1]
    assert completion.stop_reason == "eos"


def test_without_eos_ids_only_the_length_ends() -> None:
    completion = Completion(max_new_tokens=3)
    assert completion.push([7, 7]) == 2 and completion.stop_reason is None and completion.num_left == 1
    assert completion.push([7, 7]) == 1 and completion.stop_reason == "length" and completion.tokens == [7, 7, 7]


def test_eos_as_the_last_allowed_token_is_eos() -> None:
    completion = Completion(max_new_tokens=2, eos_ids={7})
    completion.push([1, 7])
    assert completion.stop_reason == "eos"


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
def test_bad_max_new_tokens_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        Completion(max_new_tokens=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["STOP", ["a", ""], [3]])
def test_bad_stop_strings_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="stop_strings"):
        Completion(max_new_tokens=3, stop_strings=value, tokenizer=CHARS)  # type: ignore[arg-type]


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Completion(max_new_tokens=3, stop_strings=["x"])


# ---------------------------------------------------------------- stop strings
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("cap", "expected", "reason"), [(5, [10, 11, 12], "stop"), (2, [10, 11], "length")])
def test_case_10_stop_token_in_a_window(size: int, cap: int, expected: list[int], reason: str) -> None:
    tokenizer = WordTokenizer({10: "x", 11: "y", 12: "STOP", 20: "a", 21: "b"})
    stream = Stream()
    completion = Completion(max_new_tokens=cap, stop_strings=["STOP"], tokenizer=tokenizer, on_tokens=stream)
    push_all(completion, [10, 11, 12, 20, 21], size)
    assert (completion.tokens, completion.stop_reason) == (expected, reason)
    assert stream.tokens == expected and stream.text == completion.text() == "xy"


@pytest.mark.parametrize("size", range(1, 7))
def test_stop_string_over_tokens_and_window_borders(size: int) -> None:
    """``\\n\\nQ:`` ends inside token 5; the text before it stays, the token that completes it is the last one."""
    tokenizer = WordTokenizer({1: "7.", 2: "\n", 3: "\nQ", 4: "so", 5: ": why", 6: "never"})
    stream = Stream()
    completion = Completion(max_new_tokens=50, stop_strings=["###", "\n\nQ:"], tokenizer=tokenizer, on_tokens=stream)
    push_all(completion, [4, 2, 4, 1, 2, 3, 5, 6, 6], size)
    assert completion.tokens == [4, 2, 4, 1, 2, 3, 5]
    assert completion.text() == stream.text == "so\nso7."
    assert all("Q" not in text for _, text in stream.calls)


def test_earliest_of_several_stop_strings_cuts_the_text() -> None:
    tokenizer = WordTokenizer({1: "abcdef"})
    completion = Completion(max_new_tokens=5, stop_strings=["ef", "cd"], tokenizer=tokenizer)
    completion.push([1])
    assert completion.text() == "ab" and completion.stop_reason == "stop"


def test_a_beginning_of_a_stop_string_is_released_when_it_goes_on_differently() -> None:
    tokenizer = WordTokenizer({1: "a", 2: "##", 3: "b"})
    stream = Stream()
    completion = Completion(max_new_tokens=4, stop_strings=["###"], tokenizer=tokenizer, on_tokens=stream)
    push_all(completion, [1, 2, 3, 2], 1)
    assert [text for _, text in stream.calls] == ["a", "", "##b", "##"]


def test_a_special_token_can_be_a_stop_string() -> None:
    completion = Completion(max_new_tokens=9, stop_strings=["</s>"], tokenizer=CHARS)
    completion.push([*CHARS("ab", add_special_tokens=False)["input_ids"], EOS, 5])
    assert completion.stop_reason == "stop" and completion.text() == "ab"


def test_eos_is_not_shown() -> None:
    stream = Stream()
    completion = Completion(max_new_tokens=9, eos_ids={EOS}, tokenizer=CHARS, on_tokens=stream)
    completion.push([*CHARS("ab", add_special_tokens=False)["input_ids"], EOS, 5])
    assert completion.text() == stream.text == "ab"


# ---------------------------------------------------------------- multi-byte characters
@pytest.mark.parametrize("size", range(1, 5))
def test_multi_byte_characters_are_streamed_whole(size: int) -> None:
    text = "Größe 東京 👩‍🔬 ok"
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    stream = Stream()
    completion = Completion(max_new_tokens=len(tokens), tokenizer=BYTES, on_tokens=stream)
    push_all(completion, tokens, size)
    assert stream.text == completion.text() == text
    assert all("\ufffd" not in piece for _, piece in stream.calls)


def test_a_character_cut_off_by_the_length_is_left_out_of_the_text_only() -> None:
    tokens = BYTES("a東", add_special_tokens=False)["input_ids"][:-1]
    stream = Stream()
    completion = Completion(max_new_tokens=len(tokens), tokenizer=BYTES, on_tokens=stream)
    push_all(completion, tokens, 1)
    assert completion.tokens == stream.tokens == tokens and completion.text() == stream.text == "a"


def test_stop_string_before_an_incomplete_character_stops_at_once() -> None:
    tokenizer = WordTokenizer({1: "x END \ufffd", 2: "never"})
    completion = Completion(max_new_tokens=9, stop_strings=["END"], tokenizer=tokenizer)
    completion.push([1, 2])
    assert completion.tokens == [1] and completion.text() == "x "


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=12), size=st.integers(1, 5), stop=st.text(min_size=1, max_size=2))
def test_streamed_text_equals_the_final_text(text: str, size: int, stop: str) -> None:
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    stream = Stream()
    streamed = Completion(max_new_tokens=len(tokens), tokenizer=BYTES, on_tokens=stream, stop_strings=[stop])
    silent = Completion(max_new_tokens=len(tokens), tokenizer=BYTES, stop_strings=[stop])
    push_all(streamed, tokens, size)
    push_all(silent, tokens, size)
    assert stream.text == streamed.text() == silent.text()
    assert streamed.tokens == silent.tokens == stream.tokens
    if stop not in text and "\ufffd" not in text:
        assert stream.text == text and streamed.stop_reason == "length"
    if stop in text and "\ufffd" not in text:
        assert stream.text == text[: text.index(stop)] and streamed.stop_reason == "stop"


def test_pieces_join_to_the_plain_decoding() -> None:
    tokens = BYTES("the answer is 42 € so", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(BYTES)
    assert "".join(detokenizer.push([token]) for token in tokens) == BYTES.decode(tokens)


# ---------------------------------------------------------------- stop ids
@pytest.mark.parametrize("slot", range(4))
def test_output_ends_at_the_first_stop_id(slot: int) -> None:
    tokens = [10, 11, 12, 13]
    tokens[slot] = 5
    completion = Completion(max_new_tokens=100, eos_ids={7}, stop_ids=[5, 6])
    assert completion.push([*tokens, 6, 7]) == slot + 1
    assert completion.tokens == tokens[: slot + 1] and completion.stop_reason == "stop"


def test_order_of_eos_stop_id_and_length() -> None:
    def reason(tokens: list[int], **options: object) -> str | None:
        completion = Completion(max_new_tokens=2, eos_ids={7}, **options)  # type: ignore[arg-type]
        completion.push(tokens)
        return completion.stop_reason

    assert reason([1, 7], stop_ids={7}) == "eos"  # EOS before stop
    assert reason([1, 5], stop_ids={5}) == "stop"  # stop before length
    assert reason([1, 2], stop_ids={5}) == "length"


@pytest.mark.parametrize("stop_ids", [[-1], [True], ["5"], [1.0]])
def test_bad_stop_ids_are_refused(stop_ids: list[object]) -> None:
    with pytest.raises(ConfigError, match="stop_ids="):
        Completion(max_new_tokens=1, stop_ids=stop_ids)  # type: ignore[arg-type]
