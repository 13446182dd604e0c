"""Sampling rollouts from the verifier into a store, in batches that can be stopped and resumed anywhere.

The plan (which ids form which batch, and each batch's seed) depends only on the arguments. A resumed run makes
the same plan, skips batches that are complete, and samples an incomplete one as a whole again with its own seed,
keeping what is missing: the store ends up as after an uninterrupted run. Any number of processes may do that at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt, check_count
from specdiff2.data.rollout_plan import RolloutPlan
from specdiff2.data.rollout_progress import Progress, read_progress
from specdiff2.data.rollout_work import OpenBatches
from specdiff2.data.rollouts import RolloutStore, check_fingerprint
from specdiff2.data.seeding import stable_generator
from specdiff2.types import ConfigError, CorruptFileError, SamplingParams


class BatchSampler(Protocol):
    """What is needed of a verifier here (``models.verifier.HFVerifier``)."""

    max_length: int

    def sample_batch(
        self, prompts: list[list[int]], sampling: SamplingParams, max_new_tokens: int, generator: torch.Generator
    ) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class RolloutLaw:
    """How every rollout of a plan is drawn, apart from its temperature."""

    top_k: int
    top_p: float
    max_new_tokens: int
    seed: int


class RolloutEngine(Protocol):
    """What samples: ``VerifierEngine``, or a server (``data.served.ServedEngine``)."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the manifest says about it; JSON-ready."""
        ...

    def fill(self, verifier: Any, work: OpenBatches, law: RolloutLaw) -> None:
        """Sample and append until ``work`` has nothing left."""
        ...


class VerifierEngine:
    """The verifier itself, in this process, a batch at a time."""

    facts: Mapping[str, Any] = {"engine": "transformers"}

    def fill(self, verifier: BatchSampler, work: OpenBatches, law: RolloutLaw) -> None:
        while batch := work.take(wait=True):
            items = batch.items
            sampling = SamplingParams(items[0].temperature, law.top_k, law.top_p)
            # the whole batch, also where only a part is missing: rows share the batch's random numbers
            generator = stable_generator("rollouts", law.seed, *(item.rollout_id for item in items))
            prompts = [item.prompt_ids for item in items]
            completions = verifier.sample_batch(prompts, sampling, law.max_new_tokens, generator)
            sampled = zip(items, completions, batch.missing, strict=True)
            work.append([item.rollout(completion) for item, completion, missing in sampled if missing])
            work.release(batch)


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """``num_reused`` were in the store already, this process sampled ``num_new``: ``num_tokens`` tokens in all."""

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
    engine: RolloutEngine | None = None,
) -> GenerationReport:
    """Sample ``samples_per_prompt`` completions per prompt and temperature (one at temperature 0) into ``store``.

    Returns when the store is complete, whoever sampled it. ``engine`` None: ``verifier`` itself.

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
    plan = RolloutPlan(encoder, prompts, temperatures, samples_per_prompt)
    prompt, num_tokens = plan.longest
    if num_tokens + max_new_tokens > verifier.max_length:
        raise ConfigError(
            f"prompt {prompt.prompt_id!r}: {num_tokens} tokens + max_new_tokens={max_new_tokens} exceed "
            f"the verifier's context of {verifier.max_length}; lower max_new_tokens or leave the prompt out"
        )
    if store.is_complete(len(plan)):
        return GenerationReport(num_reused=len(plan), num_new=0, num_tokens=0)
    law = RolloutLaw(top_k, top_p, max_new_tokens, seed)
    return _fill(engine or VerifierEngine(), verifier, store, plan, batch_size, law, progress)


def _fill(
    engine: RolloutEngine,
    verifier: BatchSampler,
    store: RolloutStore,
    plan: RolloutPlan,
    batch_size: int,
    law: RolloutLaw,
    visible: bool,
) -> GenerationReport:
    writer = store.lock()
    try:
        there = store.num_known
        with (
            Progress(store.folder, writer, len(plan), there, facts=engine.facts, visible=visible) as progress,
            OpenBatches(store, plan, batch_size, progress) as work,
        ):
            engine.fill(verifier, work, law)
            store.refresh()
            progress.show(store.num_known)
        if store.num_known < len(plan):
            raise CorruptFileError(
                f"{store.folder}: {store.num_known} of {len(plan)} rollouts, though all were written; another process "
                "deleted some: run the same command again to sample them"
            )
        store.note_complete(read_progress(store.folder))
        return GenerationReport(num_reused=there, num_new=work.num_new, num_tokens=work.num_new_tokens)
    finally:
        store.close()


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
