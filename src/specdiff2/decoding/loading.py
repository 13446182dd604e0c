"""Decoders from saved models, for use from Python in three lines."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.drafter_entries import gather, num_drafts_of, read_entries
from specdiff2.decoding.drafter_names import check_gamma, default_sampler, load_drafter_for
from specdiff2.decoding.ensemble import check_num_drafts
from specdiff2.decoding.samplers import check_grown_sampling, check_sampler, make_decoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.decoding.tree_growth import NumNodes, RankPaths
from specdiff2.protocols import Drafter
from specdiff2.types import ConfigError, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


def load_speculative_decoder(
    verifier: str | Path | HFVerifier,
    drafter: str | Path | Drafter | None = None,
    *,
    drafters: Sequence[Mapping[str, Any]] | None = None,
    sampler: str | None = None,
    num_drafts: int | None = None,
    gamma: int | None = None,
    num_nodes: NumNodes | None = None,
    max_nodes: int | None = None,
    tree_temperature: float | None = None,
    lookup_tokens: int | None = None,
    lookup_ngram: int | None = None,
    branching: int | None = None,
    rank_paths: RankPaths | None = None,
    min_confidence: float = 0.0,
    denoising_steps: int | None = None,
    cost_folder: str | Path | None = None,
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
        drafter: folder written by ``save_drafter``, ``"shipped"`` for the one that comes with the package (see
            ``models.shipped``), a folder or hub id of a smaller causal language model (see ``models.ar_drafter``),
            ``"prompt_lookup"`` or ``"prompt_lookup:NUM_TOKENS:NGRAM"``, or a loaded drafter.
        drafters: several instead of one: what ``drafter`` can be, K, temperature and name of each (see
            ``drafter_entries.DrafterEntry``). For samplers that do not read draft probabilities: ``specdiff2``,
            ``tree_match``.
        sampler: a name of ``samplers.SAMPLERS``; None means the one made for the drafter (``default_sampler``).
        gamma: positions drafted in a round, at most the drafter's; None means the drafter's own.
        num_nodes, max_nodes, tree_temperature: of a grown tree (sampler ``tree``): a number of drafted nodes or
            ``"auto"``, the limit of the latter, and the temperature nodes are chosen by.
        lookup_tokens, lookup_ngram: longest chain copied from the text so far into a grown tree (0: none), and the
            longest suffix that is looked up for it.
        branching, rank_paths: of a tree of an EAGLE head (samplers ``eagle`` and ``eagle2``): nodes that each level
            goes on from, or the ranks of a fixed tree; see ``tree_growth.GrowthSettings``.
        min_confidence: end drafts before the probability of the drafter's argmax chain falls below this; 0 never.
        denoising_steps: passes that a window drafter fills its window in; None means its own.
        cost_folder: keeps the cost tables that ``num_nodes="auto"`` measures; None means ``costs`` in the cache
            folder of converted verifiers (``$SPECDIFF2_CACHE``).
        temperature, top_k, top_p: the verifier's law; temperature 0 is greedy decoding.
        draft_temperature: None means the sampler's default (see ``make_decoder``). Of ``drafters``: for entries
            without a temperature.

    Raises:
        ConfigError: a setting out of range, a model that cannot be found, or both or neither of ``drafter`` and
            ``drafters``.
        MismatchError: the drafter belongs to another verifier or tokenizer.
        NotLosslessError: ``drafters`` for a sampler that reads draft probabilities.
    """
    if (drafter is None) == (drafters is None):
        raise ConfigError(f"drafter={drafter!r} and drafters={drafters!r}: expected one of the two")
    verifier_sampling = SamplingParams(temperature, top_k, top_p)
    draft_sampling = None if draft_temperature is None else SamplingParams(draft_temperature)
    # what can be refused without a model is refused before the verifier, the slow part, loads
    entries = () if drafters is None else read_entries(drafters)
    if entries:
        check_num_drafts(num_drafts, num_drafts_of(entries))
        num_drafts, draft_sampling = num_drafts_of(entries), None
    if sampler is None:
        sampler = "specdiff2" if drafter is None else default_sampler(drafter, verifier)
    settings = check_sampler(sampler, num_drafts, num_nodes, several_drafters=bool(entries))
    chosen: list[Any] = [entry.drafter for entry in entries] or [drafter]
    window = min(check_gamma(gamma, one, verifier) for one in chosen)
    grown = settings.growth(num_nodes, max_nodes, tree_temperature, lookup_tokens, lookup_ngram, branching, rank_paths)
    if grown is not None:
        check_grown_sampling(draft_sampling)
        grown.check_gamma(window)
    loaded = load_verifier(verifier, dtype=dtype, device=device)
    load = functools.cache(functools.partial(load_drafter_for, loaded))  # entries of one drafter share it
    return make_decoder(
        loaded,
        gather(entries, load, temperature=draft_temperature) if entries else load(chosen[0]),
        sampler=sampler,
        num_drafts=num_drafts,
        gamma=gamma,
        num_nodes=num_nodes,
        max_nodes=max_nodes,
        tree_temperature=tree_temperature,
        lookup_tokens=lookup_tokens,
        lookup_ngram=lookup_ngram,
        branching=branching,
        rank_paths=rank_paths,
        min_confidence=min_confidence,
        denoising_steps=denoising_steps,
        cost_folder=default_cost_folder() if cost_folder is None else cost_folder,
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


def default_cost_folder() -> Path:
    """Where cost tables are kept unless told otherwise."""
    from specdiff2.models.wheel_checkpoint import default_cache_dir

    return default_cache_dir() / "costs"
