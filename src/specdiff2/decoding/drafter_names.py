"""From a drafter, or the name of one, to the drafter: what Python and configurations have in common.

A name is a folder of one of our drafters (``models.pretrained``), ``shipped`` (``models.shipped``), ``prompt_lookup``
(``decoding.prompt_lookup``), or a folder or hub id of a smaller causal language model (``models.ar_drafter``) or of a
published EAGLE head (``models.eagle_files``). What only a configuration can say is ``runtime.named_drafters``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdiff2.decoding.prompt_lookup import PromptLookupDrafter, read_prompt_lookup
from specdiff2.decoding.speculative import is_unlimited, window_length
from specdiff2.models.ar_drafter import DEFAULT_GAMMA, ARDrafter
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.causal_export import check_assistant_source, is_autoregressive, is_causal_source, peek_config
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_files import GAMMA as EAGLE_GAMMA
from specdiff2.models.eagle_files import check_eagle_source, is_eagle_source, load_eagle_checkpoint
from specdiff2.models.pretrained import load_drafter, read_drafter_config
from specdiff2.models.shipped import drafter_folder, is_shipped, shipped_candidates
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Drafter
from specdiff2.types import MismatchError


def default_sampler(drafter: str | Path | Drafter, verifier: str | Path | HFVerifier) -> str:
    """The sampler made for the kind of ``drafter``. Raises as ``check_gamma``."""
    kind = drafter_kind(drafter, verifier)
    return {"prompt_lookup": "prompt_lookup", "by_token": "sps", "eagle": "eagle2", "window": "specdiff2"}[kind]


def drafter_kind(drafter: str | Path | Drafter, verifier: str | Path | HFVerifier) -> str:
    """``prompt_lookup`` (copies), ``by_token`` (``models.ar_drafter``), ``eagle`` (a head over the verifier's features)
    or ``window``; also of what only a name is known of, and of a name of nothing (``window``)."""
    if isinstance(drafter, PromptLookupDrafter) or read_prompt_lookup(drafter) is not None:
        return "prompt_lookup"
    if isinstance(drafter, ARDrafter):
        return "by_token"
    configs: list[Any] = []
    if not isinstance(drafter, str | Path):
        configs = [getattr(drafter, "config", None)]
    elif is_shipped(drafter):
        configs = list(shipped_candidates(str(drafter), verifier).values())
    elif is_own_folder(drafter):
        configs = [read_drafter_config(drafter)]
    elif is_eagle_source(drafter):
        return "eagle"
    elif is_causal_source(drafter):
        return "by_token"
    if any(map(is_autoregressive, configs)):
        return "by_token"
    return "eagle" if any(isinstance(config, EagleConfig) for config in configs) else "window"


def check_gamma(gamma: int | None, drafter: str | Path | Drafter, verifier: str | Path | HFVerifier) -> int:
    """The window that will be drafted: the drafter must be there, and able to draft ``gamma`` positions.

    Raises:
        ConfigError: it was trained for fewer, there is no such model, or no drafter is shipped for ``verifier``.
        CorruptFileError: its folder is missing or damaged.
    """
    kind, lookup = drafter_kind(drafter, verifier), read_prompt_lookup(drafter)
    if lookup is not None:
        return window_length(gamma, lookup[0])
    if kind == "by_token":
        if isinstance(drafter, str | Path) and not is_shipped(drafter):
            check_assistant_source(str(drafter), None, "drafter")
        return window_length(gamma, DEFAULT_GAMMA, unlimited=True)
    if not isinstance(drafter, str | Path):
        return window_length(gamma, drafter.gamma, unlimited=is_unlimited(drafter))
    if is_shipped(drafter):
        own = max(config.gamma for config in shipped_candidates(str(drafter), verifier).values())
    elif is_eagle_source(drafter):
        check_eagle_source(drafter)
        own = EAGLE_GAMMA
    else:
        own = read_drafter_config(drafter).gamma
    return window_length(gamma, own, unlimited=kind == "eagle")


def load_drafter_for(
    verifier: HFVerifier, drafter: str | Path | Drafter, cache_dir: str | Path | None = None
) -> Drafter:
    """``drafter`` itself where it is loaded already; a block drafter of one position becomes an ``ARDrafter``.

    Args:
        cache_dir: of models that have to be converted; None means that of converted verifiers.

    Raises:
        MismatchError: it was made for another verifier.
        ConfigError: no drafter is shipped for it, or there is no such model.
    """
    lookup = read_prompt_lookup(drafter)
    if lookup is not None:
        return PromptLookupDrafter(*lookup, eos_ids=verifier.eos_ids)
    if isinstance(drafter, str | Path):
        folder = drafter_folder(drafter, verifier)
        kind = drafter_kind(folder, verifier)
        if kind == "by_token":
            return ARDrafter.from_pretrained(folder, verifier, cache_dir)
        public_head = kind == "eagle" and not is_own_folder(folder)
        return load_eagle_checkpoint(folder, verifier) if public_head else load_drafter(folder, verifier)
    vocab_size = getattr(drafter, "verifier_vocab_size", verifier.vocab_size)
    if vocab_size != verifier.vocab_size:
        raise MismatchError(
            f"the drafter knows {vocab_size} tokens, verifier {verifier.name} {verifier.vocab_size}: expected the same "
            "vocabulary; use the verifier it was made for"
        )
    if isinstance(drafter, BlockDrafter) and is_autoregressive(drafter.config):
        return ARDrafter.from_block(drafter, verifier)
    return drafter


def is_own_folder(name: str | Path) -> bool:
    """Whether ``name`` is a folder in one of our formats."""
    return "format" in peek_config(name)
