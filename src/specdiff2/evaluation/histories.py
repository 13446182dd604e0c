"""What the verifier alone answers to the earlier turns of conversations: decoded once, untimed, kept with the records.

The answers are part of the prompts of later turns, so a benchmark that is continued needs the same ones: they are read
back from ``histories.json``. One answer belongs to its prompt's token ids and seed; changed settings are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.multi_turn import unroll_turns
from specdiff2.data.prompt import Prompt
from specdiff2.evaluation.benchmark import Encoder, first_difference, prompt_seed
from specdiff2.evaluation.decoder_info import describe_decoder, portable
from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.protocols import Decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.types import CorruptFileError, MismatchError

HISTORIES_FILE = "histories.json"
log = logging.getLogger(__name__)


def answer_turns(
    prompts: Sequence[Prompt],
    encoder: Encoder,
    decoder: Decoder,
    folder: Path,
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    elsewhere: Sequence[Path] = (),
) -> list[Prompt]:
    """Every turn as a prompt of its own (``data.multi_turn``); prompts of one turn are returned as they are.

    Args:
        decoder: the verifier alone (``decoding.autoregressive``); the other settings are the benchmark's.
        folder: that of the benchmark's records.
        elsewhere: those of other processes with a part of the benchmark, whose answers count as well.

    Raises:
        MismatchError, CorruptFileError: see ``_stored``.
    """
    num_missing = sum(len(prompt.later_turns) for prompt in prompts)
    if num_missing == 0:
        return list(prompts)
    options = {"max_new_tokens": max_new_tokens, "stop_ids": tuple(stop_ids), "stop_strings": tuple(stop_strings)}
    settings = {**options, "seed": seed, "decoder": portable(describe_decoder(decoder))}
    path = folder / HISTORIES_FILE
    answers = _stored([*elsewhere, folder], json.loads(json.dumps(settings)))
    log.info("%d earlier turns are answered by the verifier alone, untimed (%d answers in %s)",
             num_missing, len(answers), path)  # fmt: skip

    def answer(prompt: Prompt) -> str:
        ids = list(encoder.encode(prompt.messages))
        key = hashlib.sha256(json.dumps([seed, prompt.prompt_id, ids]).encode()).hexdigest()[:24]
        if key not in answers:
            rng = TorchRandomSource(prompt_seed(seed, key))
            answers[key] = decoder.generate(ids, rng=rng, **options).text
            write_json(path, {"settings": settings, "answers": answers})
        return answers[key]

    folder.mkdir(parents=True, exist_ok=True)
    return unroll_turns(prompts, answer)


def _stored(folders: Sequence[Path], settings: dict[str, Any]) -> dict[str, str]:
    """The answers in all folders.

    Raises:
        MismatchError: a folder holds answers of other settings.
        CorruptFileError: they cannot be read.
    """
    return {key: text for folder in folders for key, text in _stored_in(folder / HISTORIES_FILE, settings).items()}


def _stored_in(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    remedy = "the answers to earlier turns; use another folder, or delete this one to measure again"
    stored = read_json(path, remedy)
    if stored is None:
        return {}
    if not isinstance(stored, dict) or not {"settings", "answers"} <= stored.keys():
        raise CorruptFileError(f"{path}: expected settings and answers, {remedy}")
    decoder = portable(stored["settings"].get("decoder", {}))
    difference = first_difference({**stored["settings"], "decoder": decoder}, settings)
    if difference is not None:
        key, old, new = difference
        raise MismatchError(
            f"{path}: earlier turns were answered with {key}={old!r}, now {key}={new!r}: expected the same settings to "
            "continue; use another folder, or delete it"
        )
    return dict(stored["answers"])
