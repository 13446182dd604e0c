"""Several prompts being decoded by a HF verifier at once: the trees of all rows in one forward pass.

Each row is a session of its own (``models.verifier_session``) in a row of one cache, with its own length, positions and
accepted path. Prompts are read one by one, so a place can be given to the next prompt at any time. Passes are eager,
also where those of single sessions are compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.functional.ragged_masks import ragged_tree_mask
from specdiff2.models.row_cache import SharedCache
from specdiff2.models.transfer import to_device
from specdiff2.models.verifier_session import TREE_HEADROOM, HFVerifierSession
from specdiff2.tree import TokenTree

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

log = logging.getLogger(__name__)


class HFVerifierBatch:
    """See ``protocols.VerifierBatch``. Built by ``HFVerifier.start_batch``, which checks the prompts."""

    @torch.inference_mode()
    def __init__(
        self, verifier: HFVerifier, num_rows: int, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        if verifier.passes is not None:
            _say_eager(verifier.name)
        self._verifier = verifier
        self._sessions: list[HFVerifierSession] = []
        capacity = max(map(len, prompts)) + max_new_tokens + TREE_HEADROOM
        self.cache = verifier.allocate_cache(num_rows, capacity, SharedCache)

    @torch.inference_mode()
    def start(self, place: int, prompt: Sequence[int], max_new_tokens: int) -> HFVerifierSession:
        cache = self.cache.rows[place]
        cache.clear()
        session = HFVerifierSession(self._verifier, prompt, max_new_tokens, cache)
        self._sessions[place : place + 1] = [session]
        return session

    @torch.inference_mode()
    def score(self, trees: Sequence[TokenTree]) -> Float[Tensor, "node vocab"]:
        """Raises ValueError: not one tree per place, or a root that is not the last committed token."""
        sessions, verifier = self._sessions, self._verifier
        if not len(trees) == len(sessions) == self.cache.batch:
            raise ValueError(f"{len(trees)} trees for {len(sessions)} sessions in {self.cache.batch} places: fill all")
        for session, tree in zip(sessions, trees, strict=True):
            session.check_root(tree)
        lengths = [session.num_committed - 1 for session in sessions]
        width = max(tree.num_nodes for tree in trees)
        start = self.cache.begin(lengths, width)
        numbers = to_device(_numbers(trees, lengths, width), verifier.device)  # one transfer
        ids, parents, positions = numbers.unflatten(1, (3, width)).unbind(1)
        # a plain step of rows of one length is one query each that sees everything: no mask needed
        plain = width == 1 and min(lengths) == start
        mask = None if plain else ragged_tree_mask(parents, positions[:, 0], start, verifier.dtype)
        logits, hidden = verifier.forward(ids, cache=self.cache, mask=mask, positions=positions)
        for row, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            session.cache.filled(start + width)
            session.scored(tree, hidden, row, start)
        if all(tree.num_nodes == width for tree in trees):
            return logits.flatten(0, 1)
        return torch.cat([row[: tree.num_nodes] for row, tree in zip(logits, trees, strict=True)])

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> None:
        self.cache.keep_rows(places)
        self._sessions = [self._sessions[place] for place in places]


@cache
def _say_eager(name: str) -> None:
    log.warning("%s is compiled for single prompts: the passes of a batch run eagerly", name)


def _numbers(trees: Sequence[TokenTree], lengths: Sequence[int], width: int) -> list[list[int]]:
    """Ids, parents and positions of each row, filled up with nodes that are their own parents."""
    rows = []
    for tree, length in zip(trees, lengths, strict=True):
        extra = range(tree.num_nodes, width)
        ids = tree.tokens + [0 for _ in extra]
        positions = [length + depth for depth in tree.depths()] + [length for _ in extra]
        rows.append([*ids, *tree.parents, *extra, *positions])
    return rows
