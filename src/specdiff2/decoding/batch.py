"""Decoding several prompts at once, each exactly as it would be decoded alone.

A round runs the steps of ``decoding.rounds`` for every row, with one pass of the drafter and one of the verifier for
all of them. Each row has its own random source, window, tree, accepted length and end; when it ends, its place goes to
the next waiting prompt at once. Nothing of one row enters the law of another.

Verifiers and drafters that do not know batches are served row by row: as exact, their passes are not shared.

Seconds: a row is charged its share of each round, the round's wall time divided by the rows in it, and its own prefill.
So the sum of ``decode_s`` over the generations is the wall time of all rounds (but not how long a row took).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from specdiff2.decoding.engine import Drafting, start_completion, start_drafter, start_row
from specdiff2.decoding.greedy_law import GreedyLaw
from specdiff2.decoding.probs import ProbsBuffer
from specdiff2.decoding.prompting import Prompt, prompt_ids
from specdiff2.decoding.rounds import Row
from specdiff2.decoding.stopping import Completion
from specdiff2.decoding.timing import Stopwatch
from specdiff2.protocols import (
    Drafter,
    DrafterBatch,
    DrafterSession,
    NodeProbs,
    RandomSource,
    Verifier,
    VerifierBatch,
    VerifierSession,
)
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, Generation, SamplingParams

log = logging.getLogger(__name__)


class BatchDecoder:
    """Gives a decoder ``generate_batch``."""

    verifier: Verifier
    drafting: Drafting | None
    sampling: SamplingParams

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        max_new_tokens: int = 256,
        rngs: Sequence[RandomSource] | None = None,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> list[Generation]:
        """One generation per prompt, as ``generate`` gives it, in the order of the prompts.

        Args:
            batch_size: rows decoded at once; None means all of them.
            rngs: one per prompt; None means seeds 0, 1, 2, ...

        Raises:
            ConfigError: ``batch_size`` < 1, another number of ``rngs`` than of prompts, or as ``generate``.
        """
        if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
            raise ConfigError(f"batch_size={batch_size!r}: expected an integer >= 1, or None for all prompts at once")
        sources = [TorchRandomSource(seed) for seed in range(len(prompts))] if rngs is None else rngs
        if len(sources) != len(prompts):
            raise ConfigError(f"{len(sources)} rngs for {len(prompts)} prompts: expected one for each")
        if not prompts:
            return []
        ids = [prompt_ids(self.verifier, prompt) for prompt in prompts]
        completions = [start_completion(self.verifier, max_new_tokens, stop_ids, stop_strings) for _ in ids]
        with torch.no_grad():  # as engine.decode
            batch = Batch(self.verifier, self.sampling, self.drafting, ids, max_new_tokens, batch_size or len(ids))
            return batch.decode(zip(ids, completions, sources, strict=True))


class Batch:
    """The rows being decoded; ``places`` of all lists are the same."""

    def __init__(
        self,
        verifier: Verifier,
        sampling: SamplingParams,
        drafting: Drafting | None,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_rows: int,
    ) -> None:
        """Makes room for ``num_rows`` of the prompts at a time. Raises ConfigError as ``Verifier.start``."""
        self._watch = Stopwatch(getattr(verifier, "device", None))
        self._drafting, self._max_new_tokens = drafting, max_new_tokens
        self._to_probs = ProbsBuffer(sampling)
        self._num_rows = min(num_rows, len(prompts))
        shapes = self._num_rows, prompts, max_new_tokens
        self._verifiers: VerifierBatch = _start_batch(verifier, shapes) or RowByRowVerifier(verifier)
        self._drafters: DrafterBatch | None = None
        if drafting is not None:
            self._drafters = _start_batch(drafting.drafter, shapes) or RowByRowDrafter(drafting.drafter)
        self._rows: list[Row] = []

    def decode(self, work: Iterable[tuple[Sequence[int], Completion, RandomSource]]) -> list[Generation]:
        """Decode everything, in as many places as there are."""
        waiting = list(work)[::-1]
        started = [self._start(place, *waiting.pop()) for place in range(self._num_rows)]
        while self._rows:
            self._round(len(waiting))
            for place, row in enumerate(self._rows):
                if not row.is_open:
                    started.append(self._start(place, *waiting.pop()))
        return [row.generation() for row in started]

    def _start(self, place: int, prompt: Sequence[int], completion: Completion, rng: RandomSource) -> Row:
        session = self._verifiers.start(place, prompt, self._max_new_tokens)
        start = None if self._drafters is None else partial(self._drafters.start, place)
        row = start_row(prompt, self._max_new_tokens, session, self._drafting, start, completion, rng)
        self._rows[place : place + 1] = [row]
        row.prefill_s = self._watch.lap()
        return row

    def _round(self, num_waiting: int) -> None:
        """One round of every row. Then at most ``num_waiting`` rows that ended still have their places."""
        rows, watch = self._rows, self._watch
        gammas = [row.gamma for row in rows]
        if self._drafters is not None and any(gammas):
            self._drafters.prepare(gammas)
        for row in rows:
            row.propose()
        watch.mark()
        for row in rows:
            row.grow_tree()
        watch.mark()
        logits = self._verifiers.score([row.tree for row in rows])
        watch.mark()
        laws = _parts(self._to_probs(logits), [row.tree.num_nodes for row in rows])
        records = [row.finish(law) for row, law in zip(rows, laws, strict=True)]
        self._drop_ended(num_waiting)
        draft_s, tree_s, verify_s, rest_s = (seconds / len(rows) for seconds in watch.laps())
        for record in records:
            record.draft_s, record.verify_s, record.other_s = draft_s, verify_s, tree_s + rest_s

    def _drop_ended(self, num_waiting: int) -> None:
        """Take out the rows that ended and whose places nobody waits for; the last rows fill the holes."""
        ended = [place for place, row in enumerate(self._rows) if not row.is_open]
        kept = list(range(len(self._rows)))
        for place in ended[num_waiting:][::-1]:
            last = kept.pop()
            if last != place:
                kept[kept.index(place)] = last
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in kept]
        if kept:
            self._verifiers.keep(kept)
            if self._drafters is not None:
                self._drafters.keep(kept)


class RowByRowVerifier:
    """A ``VerifierBatch`` of sessions that know nothing of each other."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._sessions: list[VerifierSession] = []

    def start(self, place: int, prompt: Sequence[int], max_new_tokens: int) -> VerifierSession:
        session = self._verifier.start(prompt, max_new_tokens)
        self._sessions[place : place + 1] = [session]
        return session

    def score(self, trees: Sequence[TokenTree]) -> torch.Tensor:
        return torch.cat([session.score(tree) for session, tree in zip(self._sessions, trees, strict=True)])

    def keep(self, places: Sequence[int]) -> None:
        self._sessions = [self._sessions[place] for place in places]


class RowByRowDrafter:
    """A ``DrafterBatch`` of sessions that know nothing of each other."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(
        self,
        place: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: VerifierSession,
    ) -> DrafterSession:
        return start_drafter(self._drafter, prompt, sampling, max_new_tokens, verifier_session)

    def prepare(self, gammas: Sequence[int]) -> None:
        """Every session runs its own passes."""

    def keep(self, places: Sequence[int]) -> None:
        """Nothing is kept by place."""


def _start_batch(model: Verifier | Drafter, shapes: tuple[int, Sequence[Sequence[int]], int]) -> Any:
    """The model's own batch, or None (said once) where it has none."""
    start = getattr(model, "start_batch", None)
    batch = None if start is None else start(*shapes)
    if batch is None:
        _say_row_by_row(type(model).__name__)
    return batch


@cache
def _say_row_by_row(name: str) -> None:
    log.warning("%s runs row by row in a batch: exact, but its passes are not shared", name)


def _parts(probs: NodeProbs, counts: Sequence[int]) -> list[NodeProbs]:
    """The law after each node, by row."""
    spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    if isinstance(probs, GreedyLaw):
        return [GreedyLaw(probs.tokens[span], probs.shape[1], probs.device, probs.dtype) for span in spans]
    return [probs[span] for span in spans]
