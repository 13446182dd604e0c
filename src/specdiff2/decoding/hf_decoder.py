"""transformers' own decoders as benchmark methods: ``generate``, prompt lookup and assisted generation.

They run on the very model our decoders run on (weights, dtype, packed linears), in transformers' own loops. The clock
is read where ours is: ``prefill_s`` is everything up to the first decoding pass (the assistant's prefill too, as our
drafter's), ``decode_s`` the rest, in which every token is produced. For that all of the prompt but its last token is
read beforehand, and the first pass inside ``generate`` gets that cache and only the tokens after it: given a cache,
transformers 5.24 would read those tokens again in assisted generation. What is inexact favours transformers: its
preparations and the first n-gram search count as prefill. It tells nothing of its rounds, so there are none.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specdiff2.decoding.prompting import Prompt, prompt_ids
from specdiff2.decoding.speculative import own_sampling
from specdiff2.decoding.stopping import Completion, OnTokens
from specdiff2.decoding.timing import Stopwatch
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.vocab import check_same_tokenizer, head_rows
from specdiff2.protocols import RandomSource
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, Generation, MismatchError, SamplingParams

KINDS = ("generate", "prompt_lookup", "assisted")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_SEED_BITS = 48
_BY_POSITION = ("input_ids", "position_ids", "cache_position", "token_type_ids")  # inputs cut with the cached tokens


@dataclass(frozen=True)
class HFOptions:
    """Which of transformers' decoders, and its own settings under their own names; each kind reads its own.

    Attributes:
        kind: ``generate`` (one token a pass), ``prompt_lookup`` (drafts copied from the text so far) or ``assisted``
            (a smaller model drafts one token a pass).
        assistant_confidence_threshold: drafting stops after a token less probable than this; 0 never stops early.

    Raises:
        ConfigError: a value outside its range.
    """

    kind: str = "generate"
    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 2
    num_assistant_tokens: int = 5
    num_assistant_tokens_schedule: str = "constant"
    assistant_confidence_threshold: float = 0.4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.num_assistant_tokens_schedule not in SCHEDULES:
            raise ConfigError(
                f"num_assistant_tokens_schedule={self.num_assistant_tokens_schedule!r}: expected one of "
                f"{', '.join(SCHEDULES)}"
            )
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected an integer >= 1")
        if not 0.0 <= self.assistant_confidence_threshold < 1.0:
            raise ConfigError(
                f"assistant_confidence_threshold={self.assistant_confidence_threshold!r}: expected 0 <= value < 1"
            )

    def of_kind(self) -> dict[str, Any]:
        """The settings that this kind reads."""
        names = {
            "generate": (),
            "prompt_lookup": ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
            "assisted": ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        }[self.kind]
        return {name: getattr(self, name) for name in names}


class HFDecoder:
    """See ``protocols.Decoder``. ``rounds`` of its generations is empty."""

    def __init__(
        self,
        verifier: HFVerifier,
        options: HFOptions = HFOptions(),
        *,
        assistant: HFVerifier | None = None,
        sampling: SamplingParams | None = None,
        name: str | None = None,
    ) -> None:
        """
        Args:
            assistant: the model that drafts (``models.causal_export.load_assistant``), for ``assisted`` only.
            sampling: the law to follow; None means the verifier's own setting.

        Raises:
            ConfigError: an assistant is missing or not used.
            MismatchError: the assistant has another vocabulary or dtype.
        """
        if (assistant is not None) != (options.kind == "assisted"):
            given = "none" if assistant is None else assistant.name
            raise ConfigError(f"kind={options.kind!r} with assistant {given}: expected one for kind='assisted' only")
        if assistant is not None:
            _check_assistant(verifier, assistant)
        self.verifier = verifier
        self.options = options
        self.assistant = assistant
        self.name = f"hf_{options.kind}" if name is None else name
        self.sampling = own_sampling(verifier) if sampling is None else sampling
        self._assistant_defaults = _generation_config(**options.of_kind()) if assistant is not None else None

    def describe(self) -> dict[str, Any]:
        """For the fingerprint of records."""
        own = {"kind": self.options.kind, "transformers": transformers.__version__, **self.options.of_kind()}
        # transformers' own loop never uses compiled passes
        own["verifier_runtime_mode"] = "packed" if self.verifier.num_packed else "eager"
        return own if self.assistant is None else {**own, "assistant": self.assistant.fingerprint}

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        rng: RandomSource | None = None,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Decode one prompt; as ``SpeculativeDecoder.generate``. ``rng`` seeds torch's generator for the call."""
        verifier = self.verifier
        ids = prompt_ids(verifier, prompt)
        completion = Completion(
            max_new_tokens=max_new_tokens, eos_ids=verifier.eos_ids, stop_ids=stop_ids, stop_strings=stop_strings,
            tokenizer=verifier.tokenizer, on_tokens=on_tokens,
        )  # fmt: skip
        verifier.check_prompt(ids, max_new_tokens)
        if any(token >= verifier.vocab_size for token in stop_ids):
            raise ConfigError(f"stop_ids={list(stop_ids)!r}: expected ids below {verifier.vocab_size}")
        followed = bool(stop_strings) or on_tokens is not None
        criteria = StoppingCriteriaList([_Follow(completion, len(ids))] if followed else [])
        with ExitStack() as stack:
            stack.enter_context(_defaults_replaced(verifier, _generation_config()))
            if self.assistant is not None and self._assistant_defaults is not None:
                stack.enter_context(_defaults_replaced(self.assistant, self._assistant_defaults))
            if self.sampling.temperature > 0:
                stack.enter_context(_seeded(TorchRandomSource(0) if rng is None else rng, verifier.device))
            output, prefill_s, decode_s = self._run(ids, self._config(max_new_tokens, stop_ids), criteria)
        if completion.stop_reason is None:
            completion.push(output[len(ids) + len(completion.tokens) :])
        return Generation(completion.tokens, [], completion.reason(), completion.text(), prefill_s, decode_s)

    @torch.no_grad()
    def _run(
        self, ids: Sequence[int], config: GenerationConfig, criteria: StoppingCriteriaList
    ) -> tuple[list[int], float, float]:
        """(prompt and new tokens, prefill seconds, decode seconds)."""
        watch = Stopwatch(self.verifier.device)
        input_ids = torch.tensor([list(ids)], device=self.verifier.device)
        models = [self.verifier.model] + ([] if self.assistant is None else [self.assistant.model])
        passes = [_FirstPass(model, input_ids) for model in models]
        prefill_s: list[float] = []  # whichever model runs first, the verifier or its assistant, ends the prefill
        for first in passes:
            first.on_start = lambda: None if prefill_s else prefill_s.append(watch.lap())
        try:
            output = self.verifier.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),  # or tokens equal to the padding id would be hidden
                generation_config=config,
                stopping_criteria=criteria,
                assistant_model=None if self.assistant is None else self.assistant.model,
            )
        finally:
            for first in passes:
                first.remove()
        decode_s = watch.lap()
        return output[0].tolist(), prefill_s[0], decode_s

    def _config(self, max_new_tokens: int, stop_ids: Collection[int]) -> GenerationConfig:
        """Everything said, so that nothing of the checkpoint's own generation config comes in."""
        eos = sorted({*self.verifier.eos_ids, *stop_ids})
        lookup = self.options.of_kind() if self.options.kind == "prompt_lookup" else {}
        law: dict[str, Any] = {"do_sample": False}
        if self.sampling.temperature > 0:
            law = {"do_sample": True, "temperature": self.sampling.temperature}
            law |= {"top_k": self.sampling.top_k, "top_p": self.sampling.top_p}  # 0 and 1.0 keep all tokens
        num_rows = head_rows(self.verifier.model)
        padded = list(range(self.verifier.vocab_size, num_rows))  # rows of the head that are no tokens
        return _generation_config(
            max_new_tokens=max_new_tokens, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0,
            suppress_tokens=padded or None, **law, **lookup,
        )  # fmt: skip


class _FirstPass:
    """Makes the first forward of ``model`` in ``generate`` start from a cache that holds all but its last prompt token.

    Built before ``generate``: reads the prompt. Removes itself after that forward has begun.
    """

    def __init__(self, model: Any, input_ids: Int[Tensor, "1 length"]) -> None:
        self._num_cached, self._length = input_ids.shape[1] - 1, input_ids.shape[1]
        self._cache: Any = None
        if self._num_cached > 0:
            self._cache = DynamicCache(config=model.config)
            model(input_ids=input_ids[:, :-1], use_cache=True, logits_to_keep=1, **{_cache_name(model): self._cache})
        self.on_start: Any = None
        self._name = _cache_name(model)
        self._handle = model.register_forward_pre_hook(self._start, with_kwargs=True)

    def remove(self) -> None:
        self._handle.remove()

    def _start(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        self.remove()
        if self._cache is not None:
            full = kwargs["input_ids"].shape[-1]
            cut = {n: kwargs[n] for n in _BY_POSITION if isinstance(kwargs.get(n), Tensor)}
            cut = {n: value[..., self._num_cached :] for n, value in cut.items() if value.shape[-1] == full}
            kwargs = {**kwargs, **cut, self._name: self._cache}
        self.on_start()
        return args, kwargs


class _Follow(StoppingCriteria):
    """Hands new tokens to a completion, which streams them and finds stop strings."""

    def __init__(self, completion: Completion, prompt_length: int) -> None:
        self._completion, self._num_seen = completion, prompt_length

    def __call__(self, input_ids: Int[Tensor, "1 length"], scores: Any, **kwargs: Any) -> Bool[Tensor, "1"]:
        new = input_ids[0, self._num_seen :].tolist()
        self._num_seen = input_ids.shape[1]
        if new and self._completion.stop_reason is None:
            self._completion.push(new)
        return torch.full((1,), self._completion.stop_reason is not None, device=input_ids.device)


def _check_assistant(verifier: HFVerifier, assistant: HFVerifier) -> None:
    remedy = "use one of the verifier's family, or one of our drafters trained with model.gamma=1"
    if verifier.tokenizer is not None and assistant.tokenizer is not None:
        check_same_tokenizer(verifier.tokenizer, assistant.tokenizer)
    rows = {head_rows(verifier.model), head_rows(assistant.model)}
    if len(rows) > 1:
        raise MismatchError(
            f"assistant {assistant.name} scores {head_rows(assistant.model)} ids, verifier {verifier.name} "
            f"{head_rows(verifier.model)}: expected equal numbers; {remedy}"
        )
    if assistant.dtype != verifier.dtype:
        raise MismatchError(f"assistant {assistant.name} is in {assistant.dtype}: expected {verifier.dtype}; {remedy}")


def _generation_config(**values: Any) -> GenerationConfig:
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def _cache_name(model: Any) -> str:
    """Renamed from past_key_values during transformers 5.x."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


@contextmanager
def _defaults_replaced(verifier: HFVerifier, config: GenerationConfig) -> Iterator[None]:
    """``generate`` fills unset values from the model's own config: a checkpoint's penalties would change the law."""
    model: Any = verifier.model
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _seeded(rng: RandomSource, device: torch.device) -> Iterator[None]:
    """torch's global generator seeded from ``rng``, put back afterwards."""
    seed = sum(rng.bernoulli(0.5) << bit for bit in range(_SEED_BITS))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
