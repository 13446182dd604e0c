"""Conversations: one history for every method, answered once by the verifier alone, kept across a resumed benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Script, Tab, byte_tokenizer, char_tokenizer, tiny_verifier

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.multi_turn import num_turns, unroll_turns
from specdiff2.data.prompt import Prompt
from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.benchmark import Benchmark
from specdiff2.evaluation.histories import HISTORIES_FILE, answer_turns
from specdiff2.evaluation.metrics import summarize
from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.types import CorruptFileError, MismatchError, SamplingParams


def conversation(name: str, *turns: str, answer: str | None = None) -> Prompt:
    return Prompt(name, [{"role": "user", "content": turns[0]}], answer, {"category": "math"}, turns[1:])


def messages(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


# ---------------------------------------------------------------- unrolling
def test_every_turn_is_a_prompt_with_what_came_before() -> None:
    asked: list[str] = []

    def answer(prompt: Prompt) -> str:
        asked.append(prompt.prompt_id)
        return f"answer to {prompt.messages[-1]['content']}"

    single, three = conversation("s", "one"), conversation("t", "a", "b", "c", answer="42")
    assert (num_turns(single), num_turns(three)) == (1, 3)
    first, *turns = unroll_turns([single, three], answer)
    assert first is single and asked == ["t/turn1", "t/turn2"], "the last turn is left to the methods"
    assert [prompt.prompt_id for prompt in turns] == ["t/turn1", "t/turn2", "t/turn3"]
    assert messages(turns[0]) == [("user", "a")]
    assert messages(turns[2]) == [
        ("user", "a"), ("assistant", "answer to a"), ("user", "b"), ("assistant", "answer to b"), ("user", "c")
    ]  # fmt: skip
    assert [prompt.answer for prompt in turns] == [None, None, "42"]
    assert turns[1].meta == {"category": "math", "conversation": "t", "turn": 2}
    assert not any(prompt.later_turns for prompt in turns) and messages(three) == [("user", "a")]


def test_the_encoder_renders_the_history() -> None:
    tokenizer = byte_tokenizer()
    _, turn = unroll_turns([conversation("t", "hi", "and?")], lambda prompt: "yes")
    shown = tokenizer.decode(ChatEncoder(tokenizer).encode(turn))
    assert shown == "<s>user: hi</s><s>assistant: yes</s><s>user: and?</s><s>assistant: "
    base = byte_tokenizer()
    base.chat_template = None  # a base model: the texts, one after the other
    assert base.decode(ChatEncoder(base).encode(turn)) == "hi\n\nyes\n\nand?"


# ---------------------------------------------------------------- answers of the verifier
def decoder_and_encoder(temperature: float = 0.0) -> tuple[AutoregressiveDecoder, ChatEncoder]:
    verifier = tiny_verifier(300, tokenizer=byte_tokenizer())
    return AutoregressiveDecoder(verifier, sampling=SamplingParams(temperature)), ChatEncoder(verifier.tokenizer)


PROMPTS = [conversation("p", "hi", "more", "end"), conversation("q", "you"), conversation("r", "hi", "more")]


def answered(folder: Path, temperature: float = 0.0, prompts: Any = PROMPTS, **changes: Any) -> list[Prompt]:
    decoder, encoder = decoder_and_encoder(temperature)
    options = {"max_new_tokens": 6, "seed": 3, **changes}
    return answer_turns(prompts, encoder, decoder, folder, **options)


def test_answers_are_the_verifiers_own_and_seeded(tmp_path: Path) -> None:
    turns = answered(tmp_path / "a")
    assert [p.prompt_id for p in turns] == ["p/turn1", "p/turn2", "p/turn3", "q", "r/turn1", "r/turn2"]
    decoder, encoder = decoder_and_encoder()
    own = decoder.generate(encoder.encode(turns[0]), max_new_tokens=6).text
    assert turns[1].messages[1] == {"role": "assistant", "content": own}
    warm = [answered(tmp_path / name, 1.0) for name in ("b", "c")]
    assert warm[0] == warm[1] != answered(tmp_path / "d", 1.0, seed=4)
    # two prompts of one text draw their own answers
    assert warm[0][1].messages[1] != warm[0][5].messages[1]


def test_stored_answers_are_read_back_not_decoded(tmp_path: Path) -> None:
    first = answered(tmp_path, 1.0)
    path = tmp_path / HISTORIES_FILE
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert len(stored["answers"]) == 3
    kept = dict.fromkeys(stored["answers"], "as stored")
    path.write_text(json.dumps({**stored, "answers": kept}), encoding="utf-8")
    again = answered(tmp_path, 1.0)
    assert [p.prompt_id for p in again] == [p.prompt_id for p in first]
    # turn 2 of p and r comes from disk; what follows another history than before has another key, and is decoded
    assert again[1].messages[1]["content"] == again[5].messages[1]["content"] == "as stored"
    assert again[2].messages[3]["content"] != "as stored"


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = answered(tmp_path / "whole", 1.0)
    answered(tmp_path / "cut", 1.0, PROMPTS[:1])  # as if killed before the last conversation
    assert answered(tmp_path / "cut", 1.0) == whole


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    answered(tmp_path)
    with pytest.raises(MismatchError, match=r"histories\.json.*seed=3, now seed=4.*use another folder"):
        answered(tmp_path, seed=4)
    with pytest.raises(MismatchError, match="max_new_tokens=6, now max_new_tokens=7"):
        answered(tmp_path, max_new_tokens=7)
    with pytest.raises(MismatchError, match=r"decoder\.temperature=0\.0, now decoder\.temperature=1\.0"):
        answered(tmp_path, 1.0)
    (tmp_path / HISTORIES_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"histories\.json"):
        answered(tmp_path)
    (tmp_path / HISTORIES_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="expected settings and answers"):
        answered(tmp_path)


def test_prompts_of_one_turn_write_nothing(tmp_path: Path) -> None:
    assert answered(tmp_path / "none", prompts=[PROMPTS[1]]) == [PROMPTS[1]] and not (tmp_path / "none").exists()


# ---------------------------------------------------------------- in a benchmark
def test_methods_are_paired_turn_by_turn(tmp_path: Path) -> None:
    """All methods, at a temperature, continue the same history; a resumed benchmark too."""
    tokenizer = char_tokenizer()
    law = [1 / 64] * 64
    verifier = Tab(law, sampling=SamplingParams(1.0), tokenizer=tokenizer)
    decoders = {
        "autoregressive": AutoregressiveDecoder(verifier),
        "script": SpeculativeDecoder(verifier, Script([5, 6], 64), rule=make_rule("greedy")),
    }
    encoder = ChatEncoder(tokenizer)

    def run() -> list[Any]:
        turns = answer_turns([conversation("c", "a", "b")], encoder, decoders["autoregressive"], tmp_path,
                             max_new_tokens=4)  # fmt: skip
        path = Benchmark(turns, encoder, decoders, max_new_tokens=4, num_warmup=0, progress=False).run(tmp_path)
        assert path == tmp_path / RECORDS_FILE
        return read_records(path)

    records = run()
    assert [(r.method, r.prompt_id) for r in records] == [
        ("autoregressive", "c/turn1"), ("script", "c/turn1"), ("script", "c/turn2"), ("autoregressive", "c/turn2")
    ]  # fmt: skip
    assert records[2].prompt_ids == records[3].prompt_ids != records[0].prompt_ids
    assert run() == records, "nothing is decoded again"
    assert {row["num_prompts"] for row in summarize(records)["rows"]} == {2}
