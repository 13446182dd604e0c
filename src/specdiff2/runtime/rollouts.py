"""Rollouts for a run: reuse a store that matches, continue an unfinished one, sample what is missing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import rollout_fingerprint
from specdiff2.data.rollout_files import ROLLOUTS_FILE, write_json_atomic
from specdiff2.data.rollouts import MANIFEST_FILE, RolloutStore, read_manifest
from specdiff2.data.signatures import sign_prompts
from specdiff2.models.fingerprint import SERVED, is_served
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.runtime.prompts import LoadedPrompts
from specdiff2.types import ConfigError, SamplingParams

log = logging.getLogger(__name__)
SAMPLING_KEYS = ("temperatures", "top_k", "top_p", "samples_per_prompt", "max_new_tokens", "seed")


def check_sampling(rollouts: Mapping[str, Any]) -> None:
    """Check section ``data.rollouts`` as sampling will, before any model loads.

    Raises:
        ConfigError: a temperature, count or cut-off is outside its range.
    """
    rollout_fingerprint(verifier="", tokenizer="", chat_template="", prompts={}, **_settings(rollouts))


def teacher_sampling(rollouts: Mapping[str, Any]) -> SamplingParams:
    """The law that the rollouts are drawn from: what an objective reads as the verifier's probabilities.

    Raises:
        ConfigError: rollouts of several temperatures are drawn from several laws.
    """
    temperatures = list(rollouts.get("temperatures", (1.0,)))
    if len(temperatures) != 1:
        raise ConfigError(
            f"data.rollouts.temperatures={temperatures}: expected one with objective streak_expected, which compares "
            "the drafter with the one law that its rollouts are drawn from; choose one, or another objective"
        )
    law = SamplingParams(float(temperatures[0]), rollouts.get("top_k", 0), rollouts.get("top_p", 1.0))
    log.info("verifier probabilities in training: %s, the law of the rollouts", law)
    if law.temperature == 0:
        log.warning("at temperature 0 those are one-hot, so streak_expected equals streak, which needs no verifier in "
                    "training; for another law set e.g. data.rollouts.temperatures=[1.0]")  # fmt: skip
    return law


def note_rollouts(run: Path, stores: Sequence[RolloutStore]) -> None:
    """Write into a run's folder which stores it trains and validates on: evaluation compares its prompts with them."""
    folders = [str(store.folder.resolve()) for store in stores]
    write_json_atomic(run / ROLLOUTS_FILE, dict(zip(("train", "val"), folders, strict=True)))


def _settings(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: source[key] for key in SAMPLING_KEYS if key in source}


def ensure_rollouts(
    verifier: HFVerifier, loaded: LoadedPrompts, generate: Callable[..., Any], folder: Path, *, named: bool
) -> RolloutStore:
    """A complete store of rollouts for every prompt. Several processes may ask for the same one: they share the work.

    Args:
        generate: ``generate_rollouts`` with its settings bound (``functools.partial``).
        folder: with ``named``, the store itself: other settings than its own are refused. Else its name gets the
            settings' digest appended, so that every setting has its own store.

    Raises:
        MismatchError: ``folder`` was made with other settings.
        ConfigError, CorruptFileError, StorageError: from sampling and the store; or a server sampled ``folder``, and it
            is not complete.
    """
    encoder = ChatEncoder.of(verifier)
    fingerprint = store_fingerprint(verifier, loaded, generate)
    if not named:
        folder = folder.with_name(f"{folder.name}-{digest_of(fingerprint)}")
    origin = read_manifest(folder).get("verifier", "") if (folder / MANIFEST_FILE).exists() else ""
    if is_served(str(origin)) and origin != verifier.fingerprint:
        log.warning("%s was sampled from %s: nobody can tell here whether that has the weights of %s", folder,
                    origin.removeprefix(SERVED), verifier.name)  # fmt: skip
        store = RolloutStore(folder, fingerprint | {"verifier": origin})
        if not store.is_complete():
            raise ConfigError(f"{folder}: not all of these rollouts of a server are there yet; run the same rollout.py "
                              "command again to go on with it")  # fmt: skip
        return store
    store = RolloutStore(folder, fingerprint)
    report = generate(verifier, encoder, loaded.prompts, store)
    store.note_prompts(sign_prompts(loaded.prompts), loaded.sources)
    log.info("rollouts in %s: %d reused, %d sampled", folder, report.num_reused, report.num_new)
    return store


def store_fingerprint(verifier: HFVerifier, loaded: LoadedPrompts, generate: Callable[..., Any]) -> dict[str, Any]:
    """What the rollouts of these prompts depend on. Raises ConfigError: a sampling setting out of range."""
    encoder = ChatEncoder.of(verifier)
    return rollout_fingerprint(
        verifier=verifier.fingerprint,
        tokenizer=str(tokenizer_fingerprint(verifier.tokenizer)),
        chat_template=encoder.fingerprint,
        prompts=loaded.origin,
        thinking=encoder.thinking_mode,
        bos=encoder.bos,
        **_settings(getattr(generate, "keywords", {})),
    )


def digest_of(fingerprint: Any) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:8]
