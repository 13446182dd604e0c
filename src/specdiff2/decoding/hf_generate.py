"""Speculative decoding as transformers' ``model.generate(..., custom_generate=speculative_generate)``.

    model.generate(input_ids, max_new_tokens=100, do_sample=False,
                   custom_generate=speculative_generate, drafter="outputs/drafters/smollm2_block/best")

``generate`` prepares the inputs and the generation config and then calls the function below. Whatever the
caller asked for that speculative decoding would not honour is refused, never ignored. Tested with
transformers 5.24, where ``generate`` hands extra arguments only to parameters it finds by name in the signature,
and keeps ``streamer`` and ``tokenizer`` for itself (hence ``on_tokens`` and ``text_tokenizer`` here).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdiff2.decoding.drafter_names import default_sampler, load_drafter_for
from specdiff2.decoding.samplers import make_decoder
from specdiff2.decoding.stopping import OnTokens
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Drafter
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, SamplingParams

# the three that SamplingParams covers, applied by transformers in the same order
_HONOURED_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
_HONOURED_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


def speculative_generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "1 length"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: str | Path | Drafter | None = None,
    sampler: str | None = None,
    num_drafts: int | None = None,
    gamma: int | None = None,
    draft_temperature: float | None = None,
    seed: int | None = None,
    text_tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: Sequence[str] = (),
    on_tokens: OnTokens | None = None,
    **model_kwargs: Any,
) -> Int[Tensor, "1 length_and_new"]:
    """Prompt and continuation, as ``generate`` returns them.

    Uses ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``eos_token_id`` and the length limits of the
    generation config. A drafter given as a folder is loaded at every call: pass a loaded one to decode often.

    Args:
        drafter, sampler: see ``decoding.loading.load_speculative_decoder``.
        text_tokenizer: the model's tokenizer; needed for stop strings, streamed text and a drafter given as a folder.
        seed: None draws one from torch's global generator, so that ``torch.manual_seed`` governs.

    Raises:
        ConfigError: no drafter, a batch of more than one prompt, or a setting that would be ignored.
    """
    if drafter is None:
        raise ConfigError("drafter is missing: pass generate(..., drafter=<folder or drafter>)")
    _refuse_unsupported(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    with _unchanged(model):
        verifier = HFVerifier(
            model, text_tokenizer, name=model.name_or_path or type(model).__name__, eos_ids=_eos_ids(generation_config)
        )
        decoder = make_decoder(
            verifier,
            load_drafter_for(verifier, drafter),
            sampler=default_sampler(drafter, verifier) if sampler is None else sampler,
            num_drafts=num_drafts,
            gamma=gamma,
            verifier_sampling=_sampling(generation_config),
            draft_sampling=None if draft_temperature is None else SamplingParams(draft_temperature),
        )
        generation = decoder.generate(
            input_ids[0].tolist(),
            max_new_tokens=int(generation_config.max_length) - input_ids.shape[1],
            rng=TorchRandomSource(int(torch.randint(2**62, ())) if seed is None else seed),
            stop_strings=stop_strings,
            on_tokens=on_tokens,
        )
    return torch.cat([input_ids, input_ids.new_tensor([generation.tokens])], dim=1)


@contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[None]:
    """A verifier is frozen, in eval mode and has a hook on its head; the caller's model is given back as it came."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hooks = head._forward_pre_hooks
    known = set(hooks)
    was_training, trainable = model.training, [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        model.train(was_training)
        for key in [key for key in hooks if key not in known]:
            del hooks[key]
        for parameter in trainable:
            parameter.requires_grad_(True)


def _refuse_unsupported(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    if (config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams={config.num_beams}: speculative_generate knows no beams; use num_beams=1")
    if input_ids.shape[0] != 1:
        raise ConfigError(f"input_ids has {input_ids.shape[0]} rows: speculative_generate decodes one prompt a call")
    if model_kwargs.get("attention_mask") is not None:  # generate drops a mask of ones
        raise ConfigError("attention_mask hides tokens of the prompt: pass the prompt without padding")
    cache = model_kwargs.get("past_key_values", model_kwargs.get("cache"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError(f"past_key_values holds {cache.get_seq_length()} tokens: pass the whole prompt, no cache")
    _refuse_others("logits processor", logits_processor, _HONOURED_PROCESSORS)
    _refuse_others("stopping criterion", stopping_criteria, _HONOURED_CRITERIA)
    for name in ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "token_healing"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}=True: speculative_generate returns token ids only")


def _refuse_others(kind: str, given: Sequence[Any], honoured: tuple[type, ...]) -> None:
    for item in given:
        if type(item) not in honoured:
            names = ", ".join(cls.__name__ for cls in honoured)
            raise ConfigError(f"{kind} {type(item).__name__}: speculative_generate honours only {names}; switch it off")


def _sampling(config: GenerationConfig) -> SamplingParams:
    if not config.do_sample:
        return SamplingParams(temperature=0.0)
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return SamplingParams(temperature, int(config.top_k or 0), 1.0 if config.top_p is None else float(config.top_p))


def _eos_ids(config: GenerationConfig) -> list[int]:
    eos = config.eos_token_id
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
