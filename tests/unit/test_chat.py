"""Case 20: the same prompt ids everywhere, with exactly one BOS."""

from __future__ import annotations

import pytest
from helpers import char_tokenizer

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts
from specdiff2.data.prompts import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.windows import WindowCollator
from specdiff2.types import ConfigError

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Echo:
    """Completes every prompt with its own first tokens."""

    max_length = 256

    def sample_batch(self, prompts, sampling, max_new_tokens, generator):
        return [prompt[:max_new_tokens] for prompt in prompts]


def bos_twice():
    """The trap: the template renders BOS and the tokenizer adds one."""
    tokenizer = char_tokenizer(add_bos=True)
    tokenizer.chat_template = BOS_TEMPLATE
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_case_20_one_bos_in_rollouts_training_and_evaluation(tmp_path):
    tokenizer = bos_twice()
    encoder = ChatEncoder(tokenizer)
    prompt = Prompt("p", [{"role": "user", "content": "what is 1+1?"}])
    ids = encoder.encode(prompt)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "user: what is 1+1?\nassistant: "
    store = RolloutStore(tmp_path, {})
    generate_rollouts(Echo(), encoder, [prompt], store, max_new_tokens=4, progress=False)
    (rollout,) = store.load()
    assert rollout.prompt_ids == ids
    batch = WindowCollator(gamma=2, windows_per_rollout=2)([rollout])
    assert batch.input_ids[0, : len(ids)].tolist() == ids


def test_text_messages_and_prompt_encode_alike():
    encoder = ChatEncoder(bos_twice())
    messages = [{"role": "user", "content": "hi"}]
    assert encoder.encode("hi") == encoder.encode(messages) == encoder.encode(Prompt("p", messages))


def test_empty_prompts_are_refused():
    encoder = ChatEncoder(bos_twice())
    for empty in ("", "  ", []):
        with pytest.raises(ConfigError):
            encoder.encode(empty)


def test_fingerprint_follows_the_template():
    one, other = char_tokenizer(), bos_twice()
    assert ChatEncoder(one).fingerprint == ChatEncoder(char_tokenizer()).fingerprint != ChatEncoder(other).fingerprint
