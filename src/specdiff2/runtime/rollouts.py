"""Rollouts for a run: reuse a store that matches, continue an unfinished one, sample what is missing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import rollout_fingerprint
from specdiff2.data.prompt import PromptSource
from specdiff2.data.rollouts import RolloutStore
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.vocab import tokenizer_fingerprint

log = logging.getLogger(__name__)
SAMPLING_KEYS = ("temperatures", "top_k", "top_p", "samples_per_prompt", "max_new_tokens", "seed")


def ensure_rollouts(
    verifier: HFVerifier, source: PromptSource, generate: Callable[..., Any], folder: Path, *, named: bool
) -> RolloutStore:
    """A complete store of rollouts for every prompt of ``source``.

    Args:
        generate: ``generate_rollouts`` with its settings bound (``functools.partial``).
        folder: with ``named``, the store itself: other settings than its own are refused. Else its name gets the
            settings' digest appended, so that every setting has its own store.

    Raises:
        MismatchError: ``folder`` was made with other settings.
        ConfigError, CorruptFileError, StorageError: from the prompt source and the store.
    """
    encoder = ChatEncoder(verifier.tokenizer)
    settings = getattr(generate, "keywords", {})
    fingerprint = rollout_fingerprint(
        verifier=verifier.fingerprint,
        tokenizer=str(tokenizer_fingerprint(verifier.tokenizer)),
        chat_template=encoder.fingerprint,
        prompts=source.describe(),
        **{key: settings[key] for key in SAMPLING_KEYS if key in settings},
    )
    if not named:
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:8]
        folder = folder.with_name(f"{folder.name}-{digest}")
    store = RolloutStore(folder, fingerprint)
    report = generate(verifier, encoder, source.load(), store)
    log.info("rollouts in %s: %d reused, %d sampled", folder, report.num_reused, report.num_new)
    return store
