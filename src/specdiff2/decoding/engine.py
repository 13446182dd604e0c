"""Speculative decoding of one prompt: propose, build tree, score, accept, commit.

``decode`` is the one loop behind every decoder: without ``drafting`` each round is a tree of the root alone,
which is autoregressive decoding. The steps of a round are ``decoding.rounds``; ``decoding.batch`` runs them for several
prompts at once. It knows no particular verifier, drafter or rule; those come in through ``protocols``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import torch

from specdiff2.decoding.probs import ProbsBuffer
from specdiff2.decoding.rounds import Row
from specdiff2.decoding.stopping import Completion, OnTokens
from specdiff2.decoding.timing import Stopwatch
from specdiff2.decoding.tree_growth import TreeGrowth
from specdiff2.protocols import (
    AcceptanceRule,
    ConditionedDrafter,
    Drafter,
    DrafterSession,
    RandomSource,
    Selector,
    Verifier,
    VerifierSession,
)
from specdiff2.types import ConfigError, Generation, SamplingParams

StartDrafter: TypeAlias = Callable[[Sequence[int], SamplingParams, int, VerifierSession], DrafterSession]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, how much, and which rule decides about it.

    ``growth`` None: ``num_drafts`` chains are drawn; else a tree is grown from the drafter's untempered law, and
    ``num_drafts`` and ``sampling`` have no part in it.
    """

    drafter: Drafter
    rule: AcceptanceRule
    selector: Selector | None
    gamma: int
    num_drafts: int
    sampling: SamplingParams
    growth: TreeGrowth | None = None
    min_confidence: float = 0.0
    denoising_steps: int | None = None  # passes of a window drafter; None: its own


def decode(
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams,
    drafting: Drafting | None,
    max_new_tokens: int,
    rng: RandomSource,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continue ``prompt`` until EOS, a stop id or string, or ``max_new_tokens``; the text follows the verifier's law.

    ``draft_s`` is the time in the drafter's ``propose``, ``law`` or passes over paths, ``verify_s`` in the verifier's
    ``score``, ``other_s`` everything else of the round. A window is shortened only to what ``max_new_tokens`` leaves
    room for and to what a grown tree holds, both known before the verifier looks; with room for one token no draft is
    made.

    Raises:
        ConfigError: a stop id outside the vocabulary; see ``Completion`` and ``Verifier.start``.
    """
    completion = start_completion(verifier, max_new_tokens, stop_ids, stop_strings, on_tokens)
    with torch.no_grad():  # not inference_mode: a drafter in training may keep a tensor it makes in here
        watch = Stopwatch(getattr(verifier, "device", None))
        session = verifier.start(prompt, max_new_tokens)
        start = partial(start_drafter, drafting.drafter) if drafting else None
        row = start_row(prompt, max_new_tokens, session, drafting, start, completion, rng)
        row.prefill_s = watch.lap()
        to_probs = ProbsBuffer(sampling)
        while row.is_open:
            row.propose()
            watch.mark()
            row.grow_tree()
            watch.mark()
            logits = session.score(row.tree)
            watch.mark()
            record = row.finish(to_probs(logits))
            record.draft_s, tree_s, record.verify_s, rest_s = watch.laps()
            record.other_s = tree_s + rest_s
    return row.generation()


def start_completion(
    verifier: Verifier,
    max_new_tokens: int,
    stop_ids: Collection[int],
    stop_strings: Sequence[str],
    on_tokens: OnTokens | None = None,
) -> Completion:
    """The empty output of one prompt. Raises ConfigError as ``decode``."""
    completion = Completion(
        max_new_tokens=max_new_tokens,
        eos_ids=verifier.eos_ids,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        tokenizer=getattr(verifier, "tokenizer", None),
        on_tokens=on_tokens,
    )
    if any(token >= verifier.vocab_size for token in stop_ids):
        raise ConfigError(
            f"stop_ids={list(stop_ids)!r}: expected ids below {verifier.vocab_size}, the verifier's tokens"
        )
    return completion


def start_row(
    prompt: Sequence[int],
    max_new_tokens: int,
    session: VerifierSession,
    drafting: Drafting | None,
    start: StartDrafter | None,
    completion: Completion,
    rng: RandomSource,
) -> Row:
    """A prompt that the verifier has read, with its drafter's session (told when to shorten its window and how to fill
    it) and the growth of its trees. ``start`` opens the drafter's session; None without ``drafting``."""
    drafter, grow = None, None
    if drafting is not None and start is not None:
        drafter = start(prompt, drafting.sampling, max_new_tokens, session)
        shorten_windows(drafter, drafting.drafter, drafting.min_confidence)
        change_steps(drafter, drafting.drafter, drafting.denoising_steps)
        grow = None if drafting.growth is None else drafting.growth.start(prompt)
    return Row(session, drafting, drafter, grow, completion, rng, prompt[-1])


def start_drafter(
    drafter: Drafter,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    session: VerifierSession | None,
) -> DrafterSession:
    """The drafter's session; a conditioned drafter reads the verifier's."""
    if getattr(drafter, "needs_verifier_session", False):
        conditioned = cast(ConditionedDrafter, drafter)
        return conditioned.start(prompt, sampling, max_new_tokens, verifier_session=cast(VerifierSession, session))
    return drafter.start(prompt, sampling, max_new_tokens)


def shorten_windows(started: DrafterSession, drafter: Drafter, min_confidence: float) -> None:
    """Tell a session to end drafts before their confidence falls below ``min_confidence``; 0 asks for nothing.

    Raises:
        ConfigError: this drafter cannot shorten its window.
    """
    if min_confidence <= 0.0:
        return
    if not hasattr(started, "min_confidence"):
        raise ConfigError(
            f"min_confidence={min_confidence} with drafter {type(drafter).__name__}, which cannot shorten "
            "its window; use 0, or a BlockDrafter"
        )
    started.min_confidence = min_confidence


def change_steps(started: DrafterSession, drafter: Drafter, denoising_steps: int | None) -> None:
    """Tell a session to fill each window in ``denoising_steps`` passes; None asks for nothing.

    Raises:
        ConfigError: this drafter fills no masked windows.
    """
    if denoising_steps is None:
        return
    if not hasattr(started, "denoising_steps"):
        raise ConfigError(
            f"denoising_steps={denoising_steps} with drafter {type(drafter).__name__}, which does not fill masked "
            "windows with the verifier's tokens; use null, or a block drafter"
        )
    started.denoising_steps = denoising_steps
