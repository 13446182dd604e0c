"""Decoders from saved models, for use from Python in three lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.engine import SpeculativeDecoder
from specdiff2.decoding.samplers import check_sampler, make_decoder
from specdiff2.protocols import Drafter
from specdiff2.types import ConfigError, MismatchError, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


def load_speculative_decoder(
    verifier: str | Path | HFVerifier,
    drafter: str | Path | Drafter,
    *,
    sampler: str = "specdiff2",
    num_drafts: int | None = None,
    gamma: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> SpeculativeDecoder:
    """Load both models and put them together.

    Args:
        verifier: hub id, local folder, GGUF file or ``wheel:...`` (see ``HFVerifier.from_pretrained``), or a
            loaded verifier (``dtype`` and ``device`` are then its own).
        drafter: folder written by ``save_drafter``, or a loaded drafter.
        sampler: a name of ``samplers.SAMPLERS``.
        gamma: positions drafted in a round, at most the drafter's; None means the drafter's own.
        temperature, top_k, top_p: the verifier's law; temperature 0 is greedy decoding.
        draft_temperature: None means the sampler's default (see ``make_decoder``).

    Raises:
        ConfigError: a setting out of range, or a model that cannot be found.
        MismatchError: the drafter belongs to another verifier or tokenizer.
    """
    verifier_sampling = SamplingParams(temperature, top_k, top_p)
    draft_sampling = None if draft_temperature is None else SamplingParams(draft_temperature)
    # what can be refused without a model is refused before the verifier, the slow part, loads
    check_sampler(sampler, num_drafts)
    check_gamma(gamma, drafter)
    loaded = load_verifier(verifier, dtype=dtype, device=device)
    return make_decoder(
        loaded,
        load_drafter_for(loaded, drafter),
        sampler=sampler,
        num_drafts=num_drafts,
        gamma=gamma,
        verifier_sampling=verifier_sampling,
        draft_sampling=draft_sampling,
    )


def load_autoregressive_decoder(
    verifier: str | Path | HFVerifier,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    dtype: str = "auto",
    device: str = "auto",
) -> AutoregressiveDecoder:
    """The verifier alone; arguments as ``load_speculative_decoder``."""
    sampling = SamplingParams(temperature, top_k, top_p)
    return AutoregressiveDecoder(load_verifier(verifier, dtype=dtype, device=device), sampling=sampling)


def load_verifier(verifier: str | Path | HFVerifier, *, dtype: str = "auto", device: str = "auto") -> HFVerifier:
    """``verifier`` itself where it is loaded already."""
    from specdiff2.models.verifier import HFVerifier

    if isinstance(verifier, str | Path):
        return HFVerifier.from_pretrained(str(verifier), dtype=dtype, device=device)
    return verifier


def check_gamma(gamma: int | None, drafter: str | Path | Drafter) -> None:
    """The drafter must be readable and trained for at least ``gamma`` positions.

    Raises:
        ConfigError: it was trained for fewer.
        CorruptFileError: its folder is missing or damaged.
    """
    from specdiff2.models.pretrained import read_drafter_config

    most = read_drafter_config(drafter).gamma if isinstance(drafter, str | Path) else drafter.gamma
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int) or not 1 <= gamma <= most):
        raise ConfigError(f"gamma={gamma!r}: expected an integer from 1 to the drafter's {most}")


def load_drafter_for(verifier: HFVerifier, drafter: str | Path | Drafter) -> Drafter:
    """``drafter`` itself where it is loaded already.

    Raises:
        MismatchError: it was made for another verifier.
    """
    from specdiff2.models.pretrained import load_drafter

    if isinstance(drafter, str | Path):
        return load_drafter(drafter, verifier)
    vocab_size = getattr(drafter, "vocab_size", verifier.vocab_size)
    if vocab_size != verifier.vocab_size:
        raise MismatchError(
            f"the drafter knows {vocab_size} tokens, verifier {verifier.name} {verifier.vocab_size}: expected the same "
            "vocabulary; use the verifier it was made for"
        )
    return drafter
