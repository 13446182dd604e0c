"""What is asked of a server that samples rollouts, and what it answers: JSON bodies, no network.

Interfaces, the best first:

- ``token_ids``: ``/completions`` of vLLM, prompt and answer as ids (``return_token_ids``, ``choices[].token_ids``).
- ``logprobs``: the same of older vLLM, ids as ``token_id:N`` in the log-probabilities (``return_tokens_as_token_ids``).
- ``sglang``: SGLang's own ``/generate`` (``input_ids``, ``output_ids``).
- ``text``: ``/completions`` of any server; the answer is text (``data.served_text`` makes ids of it).
- ``chat``: ``/chat/completions``: the server applies its own chat template; the answer is text.

A server samples with the defaults of the model's generation_config.json where it is told nothing (vLLM: a repetition
penalty of 1.05, top_k 20 for Qwen2.5), so everything that changes the law is sent, neutral where the law knows nothing
of it. Sources: vllm-project/vllm, vllm/entrypoints/openai/completion/protocol.py; docs.sglang.io, basic_usage/
sampling_params and native_api; transformers 5.24, cli/serving (which takes the rest as ``generation_config``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specdiff2.data.generate import RolloutLaw
from specdiff2.data.rollout_plan import PlannedRollout
from specdiff2.data.seeding import stable_seed
from specdiff2.data.served_text import prompt_as_text
from specdiff2.types import ConfigError

InterfaceName = Literal["token_ids", "logprobs", "sglang", "text", "chat"]
Prompt = Literal["ids", "text", "messages"]
Extras = Literal["extended", "transformers", "plain"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to ask.

    Attributes:
        prompt: what the prompt is sent as.
        extras: how a server is told what OpenAI's interface has no field for, such as top_k: fields of their own
            (vLLM, SGLang, llama.cpp), transformers' generation config, or not at all.
    """

    name: InterfaceName
    prompt: Prompt
    extras: Extras

    @property
    def path(self) -> str:
        """Below the server's URL; ``..`` is the URL without its ``/v1``."""
        return {"sglang": "../generate", "chat": "/chat/completions"}.get(self.name, "/completions")

    def __str__(self) -> str:
        return f"{self.name} (prompt as {self.prompt}, {self.extras} fields)"


DIALECTS = (
    Dialect("token_ids", "ids", "extended"),
    Dialect("logprobs", "ids", "extended"),
    Dialect("sglang", "ids", "extended"),
    Dialect("text", "ids", "extended"),
    *(Dialect("text", "text", extras) for extras in ("extended", "transformers", "plain")),
    *(Dialect("chat", "messages", extras) for extras in ("extended", "transformers", "plain")),
)


class BadAnswer(Exception):
    """An answer that is not of the form expected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as the server gave it.

    Attributes:
        token_ids: None where it gave only ``text``.
        stop_id: the token that ended it, where the server says so.
        num_prompt_tokens, num_tokens: as the server counted; None where it does not say.
    """

    token_ids: list[int] | None
    text: str
    finish_reason: str
    stop_id: int | None
    num_prompt_tokens: int | None
    num_tokens: int | None


def request_body(dialect: Dialect, item: PlannedRollout, law: RolloutLaw, model: str, verifier: Any) -> dict[str, Any]:
    """What to send for one rollout; its seed depends only on its id and ``law.seed``.

    Args:
        verifier: tokenizer, EOS ids and thinking mode are read.

    Raises:
        ConfigError: a law or prompt that this dialect cannot say.
    """
    seed = stable_seed("served", law.seed, item.rollout_id) % 2**31  # servers take 32 bits
    if dialect.name == "sglang":
        return {"input_ids": item.prompt_ids, "sampling_params": _sglang_law(item, law, seed), "stream": False}
    body = {
        "model": model,
        "max_tokens": law.max_new_tokens,
        "temperature": item.temperature,
        "top_p": law.top_p,
        "seed": seed,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stream": False,
        **_extras(dialect, item, law, verifier),
    }
    if dialect.prompt == "messages":
        thinking = {} if verifier.thinking is None else {"chat_template_kwargs": {"enable_thinking": verifier.thinking}}
        return body | {"messages": item.messages} | thinking
    as_text = dialect.prompt == "text"
    return body | {"prompt": prompt_as_text(verifier.tokenizer, item.prompt_ids) if as_text else item.prompt_ids}


def _extras(dialect: Dialect, item: PlannedRollout, law: RolloutLaw, verifier: Any) -> dict[str, Any]:
    if dialect.extras == "plain":
        if law.top_k:
            raise ConfigError(f"top_k={law.top_k}: the server takes no top_k; set data.rollouts.top_k=0")
        return {}
    if dialect.extras == "transformers":
        config = {"do_sample": item.temperature > 0, "top_k": law.top_k, "top_p": law.top_p, "repetition_penalty": 1.0,
                  "max_new_tokens": law.max_new_tokens, "eos_token_id": sorted(verifier.eos_ids)}  # fmt: skip
        return {"generation_config": json.dumps(config)}
    ids: dict[str, dict[str, Any]] = {
        "token_ids": {"return_token_ids": True},
        "logprobs": {"logprobs": 0, "return_tokens_as_token_ids": True},
    }
    extended = {"top_k": law.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}
    return {**extended, "skip_special_tokens": False, **ids.get(dialect.name, {})}


def _sglang_law(item: PlannedRollout, law: RolloutLaw, seed: int) -> dict[str, Any]:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    own = {"temperature": item.temperature, "top_p": law.top_p, "top_k": law.top_k or -1, "sampling_seed": seed}
    return {**neutral, **own, "max_new_tokens": law.max_new_tokens, "ignore_eos": False}


def read_models(data: Any) -> list[str]:
    """Names of the models that a server lists. Raises BadAnswer."""
    try:
        return [str(model["id"]) for model in data["data"]]
    except (KeyError, TypeError) as error:
        raise BadAnswer(f"not a list of models: {json.dumps(data)[:300]}") from error


def read_answer(dialect: Dialect, data: Any) -> Answer:
    """Raises:
    BadAnswer: a field is missing or of another type, or the server gave up on the request.
    ConfigError: the server hides a part of what it sampled.
    """
    try:
        answer = _read_sglang(data) if dialect.name == "sglang" else _read_openai(dialect, data)
    except ConfigError:  # it is a ValueError, too
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"{error!r} in {json.dumps(data)[:300]}") from error
    if answer.finish_reason not in ("stop", "length"):
        raise BadAnswer(f"finish_reason={answer.finish_reason!r}, expected stop or length")
    return answer


def _read_openai(dialect: Dialect, data: Mapping[str, Any]) -> Answer:
    choice, usage = data["choices"][0], data.get("usage") or {}
    text, ids = choice.get("text", ""), None
    if dialect.name == "token_ids":
        ids = [int(token) for token in choice["token_ids"]]
    elif dialect.name == "logprobs":
        tokens = choice["logprobs"]["tokens"]
        if not all(token.startswith("token_id:") for token in tokens):
            raise ValueError("tokens that are not token_id:N")
        ids = [int(token.removeprefix("token_id:")) for token in tokens]
    elif dialect.name == "chat":
        message = choice["message"]
        if message.get("reasoning_content") or message.get("reasoning"):
            raise _hidden_reasoning()
        text = message["content"] or ""
    stop = choice.get("stop_reason")
    return Answer(ids, str(text), choice["finish_reason"], stop if isinstance(stop, int) else None,
                  usage.get("prompt_tokens"), usage.get("completion_tokens"))  # fmt: skip


def _read_sglang(data: Mapping[str, Any]) -> Answer:
    meta = data["meta_info"]
    reason, ids = meta["finish_reason"], [int(token) for token in data["output_ids"]]
    matched = reason.get("matched")
    return Answer(ids, str(data.get("text", "")), reason["type"], matched if isinstance(matched, int) else None,
                  meta.get("prompt_tokens"), meta.get("completion_tokens"))  # fmt: skip


def _hidden_reasoning() -> ConfigError:
    return ConfigError(
        "the server parses the reasoning out of its answers, so the sampled text is not known; start it without a "
        "reasoning parser, or use a server with /completions"
    )
