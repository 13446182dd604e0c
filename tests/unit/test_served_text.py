"""From a server's answer to token ids: the seam, EOS, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from helpers import byte_tokenizer, char_tokenizer

from specdiff2.data.generate import RolloutLaw
from specdiff2.data.rollout_plan import PlannedRollout
from specdiff2.data.served_api import DIALECTS, Answer, BadAnswer, Dialect, read_answer, request_body
from specdiff2.data.served_text import completion_of, prompt_as_text
from specdiff2.types import ConfigError, MismatchError

TOKENIZER = byte_tokenizer()
VERIFIER = SimpleNamespace(tokenizer=TOKENIZER, vocab_size=300, eos_ids=frozenset({2, 7}), thinking=None)
PROMPT = TOKENIZER("<s>user: 2 + 2?</s><s>assistant: ", add_special_tokens=False)["input_ids"]


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def answer(text="", ids=None, *, reason="stop", stop_id=None, num_prompt=None, num=None) -> Answer:
    return Answer(ids, text, reason, stop_id, len(PROMPT) if num_prompt is None else num_prompt, num)


def completion(given: Answer, cap: int = 50, prompt=PROMPT, verifier=VERIFIER):
    return completion_of(given, prompt, verifier, cap)


@pytest.mark.parametrize("text", ["the answer is 42.", " 42", "42 äpples 🙂", ""])
def test_text_is_encoded_again(text):
    ids = encode(text)
    assert completion(answer(text, num=len(ids) + 1)) == (
        [*ids, 2], {"finish_reason": "stop", "tokens": "retokenized", "seam": "ok"}
    )  # fmt: skip
    assert completion(answer(text, reason="length", num=len(ids)))[0] == ids, "no EOS where the length ended it"


def test_another_spelling_is_counted():
    """The server sampled letter by letter what the tokenizer writes in fewer tokens."""
    text = "the answer is 42"
    ids, meta = completion(answer(text, num=len(text) + 1))
    assert ids == [*encode(text), 2] and len(ids) < len(text) and meta["seam"] == "count"
    assert completion(answer(text))[1]["seam"] == "ok", "a server that does not count"


def test_half_a_character_is_cut():
    ids, meta = completion(answer("42 appl\ufffd", reason="length"))
    assert ids == encode("42 appl") and meta["seam"] == "cut"
    ids, meta = completion(answer("is\ufffd 42", reason="stop"))
    assert ids == encode("is") and meta["seam"] == "cut", "what follows is not known to follow; no EOS"
    assert completion(answer("\ufffd"))[0] == []


def test_text_that_the_tokenizer_changes_is_cut():
    tokenizer = char_tokenizer()
    verifier = SimpleNamespace(tokenizer=tokenizer, vocab_size=58, eos_ids=frozenset({2}))
    prompt = tokenizer("what? ", add_special_tokens=False)["input_ids"]
    ids, meta = completion(answer("four, Ω or so", num_prompt=6), prompt=prompt, verifier=verifier)
    assert tokenizer.decode(ids) == "four, " and meta["seam"] == "cut"


def test_a_seam_that_would_join_is_kept_apart():
    """The prompt ends inside what the tokenizer would write as one token with the answer."""
    prompt, rest = encode("the answer is 4"), "2 and the rest"
    joint = encode("the answer is 42 and the rest")
    assert joint[: len(prompt)] != prompt, "else this shows nothing"
    ids, meta = completion(answer(rest, num_prompt=len(prompt)), prompt=prompt)
    assert ids == [*encode(rest), 2] and meta["seam"] == "ok"


def test_ids_of_the_server_are_taken_as_they_are():
    given = answer("ignored", [50, 51, 2], num=3)
    assert completion(given) == ([50, 51, 2], {"finish_reason": "stop", "tokens": "server"})
    assert completion(answer(ids=[50, 51], stop_id=7))[0] == [50, 51, 7], "EOS left out, and which one it was"
    assert completion(answer(ids=[50, 51], stop_id=99))[0] == [50, 51, 2]
    assert completion(answer(ids=[50, 51], reason="length"))[0] == [50, 51]
    assert completion(answer(ids=[50, 2, 51], reason="length"))[0] == [50, 2], "nothing after EOS"
    assert completion(answer(ids=[50, 51, 52], reason="length"), cap=2)[0] == [50, 51]
    with pytest.raises(MismatchError, match=r"token id 300, the verifier has 0 \.\. 299"):
        completion(answer(ids=[50, 300]))
    with pytest.raises(MismatchError, match=f"counts 3 tokens in a prompt of {len(PROMPT)}"):
        completion(answer(ids=[50], num_prompt=3))


def test_a_prompt_as_text_encodes_to_the_same_ids():
    adding = char_tokenizer(add_bos=True)
    assert prompt_as_text(adding, [1, 4, 5]) == "ab", "the server's tokenizer adds BOS itself"
    assert prompt_as_text(char_tokenizer(), [1, 4, 5]) == "<s>ab"
    with pytest.raises(ConfigError, match="does not encode to the same ids"):
        prompt_as_text(TOKENIZER, [*encode("the answer"), *encode(" is")[:1], 40, 41, *encode("t"), *encode("he")])


ITEM = PlannedRollout("p/T0.5/0", "p", PROMPT, 0.5, [{"role": "user", "content": "2 + 2?"}])


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_every_dialect_says_the_whole_law(dialect):
    law = RolloutLaw(top_k=0 if dialect.extras == "plain" else 7, top_p=0.9, max_new_tokens=6, seed=0)
    body = request_body(dialect, ITEM, law, "m", VERIFIER)
    said = body.get("sampling_params", body) | json.loads(body.get("generation_config", "{}"))
    assert (said["temperature"], said["top_p"]) == (0.5, 0.9)
    assert said.get("max_tokens", said.get("max_new_tokens")) == 6
    if dialect.extras != "plain":
        assert (said["top_k"], said["repetition_penalty"]) == (7, 1.0)
    assert request_body(dialect, ITEM, law, "m", VERIFIER) == body
    assert ("messages" in body) == (dialect.prompt == "messages")
    if dialect.extras == "plain":
        with pytest.raises(ConfigError, match="top_k=7: the server takes no top_k"):
            request_body(dialect, ITEM, RolloutLaw(7, 0.9, 6, 0), "m", VERIFIER)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("token_ids", {"choices": [{"text": "x", "finish_reason": "stop"}]}, "token_ids"),
        ("token_ids", {"choices": []}, "IndexError"),
        ("token_ids", {"error": "x"}, "choices"),
        ("logprobs", {"choices": [{"logprobs": {"tokens": ["a"]}, "finish_reason": "stop"}]}, "not token_id:N"),
        ("text", {"choices": [{"text": "x", "finish_reason": "content_filter"}]}, "content_filter"),
        ("sglang", {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}}, "abort"),
        ("sglang", [1], "TypeError"),
    ],
)
def test_answers_that_make_no_sense(name, data, says):
    with pytest.raises(BadAnswer, match=says):
        read_answer(Dialect(name, "ids", "extended"), data)


def test_hidden_reasoning_is_refused():
    data = {"choices": [{"message": {"content": "4", "reasoning_content": "2 + 2"}, "finish_reason": "stop"}]}
    with pytest.raises(ConfigError, match="parses the reasoning out"):
        read_answer(Dialect("chat", "messages", "plain"), data)
