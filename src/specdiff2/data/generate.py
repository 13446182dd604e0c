"""Sampling rollouts from the verifier into a store, in batches that can be stopped and resumed anywhere.

The plan (which ids form which batch, and each batch's seed) depends only on the arguments. A resumed run makes
the same plan, skips batches that are complete, and samples an incomplete one as a whole again with its own seed,
keeping what is missing: the store ends up as after an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt, check_count, require_unique_ids
from specdiff2.data.rollouts import RolloutStore, check_fingerprint
from specdiff2.data.seeding import stable_generator
from specdiff2.types import ConfigError, Rollout, SamplingParams


class BatchSampler(Protocol):
    """What is needed of a verifier here (``models.verifier.HFVerifier``)."""

    max_length: int

    def sample_batch(
        self, prompts: list[list[int]], sampling: SamplingParams, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One completion to be sampled."""

    rollout_id: str
    prompt_id: str
    prompt_ids: list[int]
    temperature: float


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """``num_reused`` were in the store already, ``num_new`` were sampled: ``num_tokens`` tokens in all."""

    num_reused: int
    num_new: int
    num_tokens: int


def rollout_fingerprint(
    *,
    verifier: str,
    tokenizer: str,
    chat_template: str,
    prompts: dict[str, Any],
    thinking: str | bool | None = None,
    bos: int | None = None,
    temperatures: Sequence[float] = (1.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    samples_per_prompt: int = 1,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> dict[str, Any]:
    """The fingerprint for ``RolloutStore``: everything that decides which law, and which draw, a rollout is.

    ``verifier``, ``tokenizer`` and ``chat_template`` are the fingerprints of those objects, ``prompts`` is the
    source's ``describe()``. ``thinking`` and ``bos`` (``ChatEncoder.thinking_mode``, ``.bos``) are keys only where they
    are not None: stores of chat templates without them keep the fingerprint that they have. The batch size is not part
    of it: it changes draws, never the law.
    """
    fingerprint = {
        "verifier": verifier,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
    }
    fingerprint |= {key: value for key, value in (("thinking", thinking), ("bos", bos)) if value is not None}
    return fingerprint | _sampling_key(temperatures, top_k, top_p, samples_per_prompt, seed)


def generate_rollouts(
    verifier: BatchSampler,
    encoder: ChatEncoder,
    prompts: Sequence[Prompt],
    store: RolloutStore,
    *,
    temperatures: Sequence[float] = (1.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    samples_per_prompt: int = 1,
    batch_size: int = 32,
    max_new_tokens: int = 256,
    seed: int = 0,
    progress: bool = True,
) -> GenerationReport:
    """Sample ``samples_per_prompt`` completions per prompt and temperature (one at temperature 0) into ``store``.

    Raises:
        ConfigError: a count below 1, no prompt, or a prompt that does not fit the verifier's context.
        MismatchError: the store was made with other sampling arguments.
        StorageError: the disk is full; completed batches are safe.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        check_count(name, value, 1)
    sampling_key = _sampling_key(temperatures, top_k, top_p, samples_per_prompt, seed)
    wanted = sampling_key | {"max_new_tokens": max_new_tokens}
    wanted = {key: value for key, value in wanted.items() if key in store.fingerprint}
    check_fingerprint(store.fingerprint, wanted, store.folder, exact=False)
    plan = plan_rollouts(encoder, prompts, temperatures, samples_per_prompt)
    for item in plan:
        if len(item.prompt_ids) + max_new_tokens > verifier.max_length:
            raise ConfigError(
                f"prompt {item.prompt_id!r}: {len(item.prompt_ids)} tokens + max_new_tokens={max_new_tokens} exceed "
                f"the verifier's context of {verifier.max_length}; lower max_new_tokens or leave the prompt out"
            )
    store.lock()
    try:
        return _sample_missing(verifier, plan, store, top_k, top_p, batch_size, max_new_tokens, seed, progress)
    finally:
        store.close()


def plan_rollouts(
    encoder: ChatEncoder, prompts: Sequence[Prompt], temperatures: Sequence[float], samples_per_prompt: int
) -> list[PlannedRollout]:
    """Everything to be sampled: grouped by temperature, longest prompts first (memory and ETA are honest early)."""
    require_unique_ids(prompts, "rollouts")
    encoded = [(prompt.prompt_id, encoder.encode(prompt)) for prompt in prompts]
    encoded.sort(key=lambda pair: (-len(pair[1]), pair[0]))
    return [
        PlannedRollout(f"{prompt_id}/T{float(temperature):g}/{sample}", prompt_id, ids, float(temperature))
        for temperature in temperatures
        for prompt_id, ids in encoded
        for sample in range(samples_per_prompt if temperature > 0 else 1)
    ]


def _sample_missing(
    verifier: BatchSampler,
    plan: list[PlannedRollout],
    store: RolloutStore,
    top_k: int,
    top_p: float,
    batch_size: int,
    max_new_tokens: int,
    seed: int,
    progress: bool,
) -> GenerationReport:
    have = store.ids()
    num_missing = sum(item.rollout_id not in have for item in plan)
    num_tokens = 0
    with tqdm(total=num_missing, desc="rollouts", unit="rollout", disable=not progress or not num_missing) as bar:
        for batch in plan_batches(plan, batch_size):
            missing = [item.rollout_id not in have for item in batch]
            if not any(missing):
                continue
            sampling = SamplingParams(batch[0].temperature, top_k, top_p)
            # the whole batch, also where only a part is missing: rows share the batch's random numbers
            generator = stable_generator("rollouts", seed, *(item.rollout_id for item in batch))
            prompts = [item.prompt_ids for item in batch]
            completions = verifier.sample_batch(prompts, sampling, max_new_tokens, generator)
            new = [
                Rollout(item.rollout_id, item.prompt_ids, completion, item.temperature, {"prompt_id": item.prompt_id})
                for item, completion, wanted in zip(batch, completions, missing, strict=True)
                if wanted
            ]
            store.append(new)
            num_tokens += sum(len(rollout.completion_ids) for rollout in new)
            bar.update(len(new))
    return GenerationReport(num_reused=len(plan) - num_missing, num_new=num_missing, num_tokens=num_tokens)


def plan_batches(plan: list[PlannedRollout], batch_size: int) -> list[list[PlannedRollout]]:
    """Consecutive items of one temperature."""
    batches: list[list[PlannedRollout]] = []
    for item in plan:
        if not batches or len(batches[-1]) == batch_size or batches[-1][0].temperature != item.temperature:
            batches.append([])
        batches[-1].append(item)
    return batches


def _sampling_key(
    temperatures: Sequence[float], top_k: int, top_p: float, samples_per_prompt: int, seed: int
) -> dict[str, Any]:
    """Raises:
    ConfigError: no or repeated temperatures, or a value out of range.
    """
    check_count("samples_per_prompt", samples_per_prompt, 1)
    values = [SamplingParams(float(temperature), top_k, top_p).temperature for temperature in temperatures]
    if not values or len(set(values)) != len(values):
        raise ConfigError(f"temperatures={list(temperatures)!r}: expected at least one, none twice")
    key: dict[str, Any] = {"temperatures": values, "top_k": top_k, "top_p": float(top_p)}
    return key | {"samples_per_prompt": samples_per_prompt, "seed": seed}
