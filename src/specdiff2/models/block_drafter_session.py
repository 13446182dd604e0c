"""Decoding with a block drafter: the same function as its training forward, one window at a time.

Causal prefix: each ``propose`` is one forward pass over the newly committed tokens and the masked window; the tokens'
keys and values stay in a preallocated cache, the window's are dropped. Bidirectional: the whole prefix is read again.

Denoising, laws and draws are those of every window session (``models.window_session``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.window_masks import decode_mask, num_slots
from specdiff2.models.kv_cache import AnyCache, PreallocatedCache
from specdiff2.models.layer_stack import run_stack
from specdiff2.models.window_session import WindowSession
from specdiff2.types import SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.window_drafter import WindowDrafter

PREFILL_CHUNK = 512  # tokens a pass while reading the prompt: bounds the mask to 512 x prompt


class BlockDrafterSession(WindowSession):
    """See ``protocols.DrafterSession``. Reads the prompt at construction.

    ``cache``: an empty one for a causal prefix; None makes one.
    """

    def __init__(
        self,
        drafter: WindowDrafter,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        cache: PreallocatedCache | None = None,
    ) -> None:
        self._drafter = drafter
        self._sampling = sampling
        self._shifted = drafter.config.shifted
        self._tokens = list(prompt)
        capacity = len(prompt) + max_new_tokens + drafter.gamma + 1
        self._positions = torch.arange(capacity, device=drafter.device)
        self._cache: PreallocatedCache | None = None
        if drafter.config.attention == "causal_prefix":
            with torch.inference_mode():
                self._cache = allocate_cache(drafter, 1, capacity) if cache is None else cache
                self._prefill()

    @property
    def num_committed(self) -> int:
        """Tokens committed so far, prompt included."""
        return len(self._tokens)

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Newly committed tokens. They are read by the next ``propose``."""
        self._tokens.extend(tokens)

    def rewrite(self, tokens: Sequence[int]) -> None:
        """The committed tokens are now these (at least one): what they share with the old ones stays cached."""
        shared = 0
        while shared < min(len(tokens), len(self._tokens)) and tokens[shared] == self._tokens[shared]:
            shared += 1
        self._tokens = list(tokens)
        if self._cache is not None and self._cache.length > shared:
            self._cache.truncate(shared)

    @property
    def last_token(self) -> int:
        return self._tokens[-1]

    def window_states(self, gamma: int, fixed: Int[Tensor, " gamma"] | None = None) -> Float[Tensor, "gamma hidden"]:
        with torch.inference_mode():
            slots = slot_embeddings(self._drafter, self.num_slots(gamma), fixed)
            states = self._run_whole(slots) if self._cache is None else self._run_cached(slots, self._cache)
            return states[:gamma]

    def num_slots(self, gamma: int) -> int:
        """Columns behind the committed tokens that a window of ``gamma`` positions takes."""
        return num_slots(gamma, self._shifted, self._drafter.whole_window)

    def _run_cached(
        self, slots: Float[Tensor, "slot hidden"], cache: PreallocatedCache
    ) -> Float[Tensor, "gamma hidden"]:
        """One pass over the tokens that are not in the cache yet and the window; the cache keeps the tokens."""
        num_committed = len(self._tokens)
        num_new, count = len(self.unread_tokens()), slots.shape[0]
        num_cached = num_committed - num_new
        cache.reserve(num_committed + count)
        embeddings = torch.cat([self._embed(num_cached, num_committed), slots])
        mask = decode_mask(num_cached, num_new, count, slots.device)
        first_read = num_new - 1 if self._shifted else num_new
        hidden = self._run(embeddings, mask, num_cached, first_read)
        cache.truncate(num_committed)
        return hidden

    def unread_tokens(self) -> list[int]:
        """Committed tokens that the next pass has to read: those behind the cache, the anchor always among them where
        its own output is read."""
        assert self._cache is not None
        if self._shifted and self._cache.length == len(self._tokens):
            self._cache.truncate(len(self._tokens) - 1)
        return self._tokens[self._cache.length :]

    def read_tokens(self, start: int) -> None:
        """A pass over several rows has put the keys and values of ``unread_tokens`` behind slot ``start``."""
        assert self._cache is not None
        num_new = len(self._tokens) - self._cache.length
        num_cached = self._cache.length
        self._cache.filled(start + num_new)
        self._cache.gather(num_cached, range(start, start + num_new))

    def _run_whole(self, slots: Float[Tensor, "slot hidden"]) -> Float[Tensor, "gamma hidden"]:
        """One bidirectional pass over everything."""
        num_tokens = len(self._tokens)
        embeddings = torch.cat([self._embed(0, num_tokens), slots])
        mask = torch.ones((1, 1, len(embeddings), len(embeddings)), dtype=torch.bool, device=slots.device)
        return self._run(embeddings, mask, 0, num_tokens - 1 if self._shifted else num_tokens)

    def _prefill(self) -> None:
        """Put the prompt's keys and values into the cache; a shifted drafter reads its last token with the window."""
        end = len(self._tokens) - 1 if self._shifted else len(self._tokens)
        for start in range(0, end, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, end)
            mask = decode_mask(start, stop - start, 0, self._drafter.device)
            self._run(self._embed(start, stop), mask, start, stop - start)

    def _embed(self, start: int, stop: int) -> Float[Tensor, "token hidden"]:
        drafter = self._drafter
        ids = torch.tensor(self._tokens[start:stop], dtype=torch.long, device=drafter.device)
        return drafter.embeddings.embed(ids, drafter.dtype)

    def _run(self, embeddings: Tensor, mask: Tensor, first_position: int, first_read: int) -> Tensor:
        """Outputs of the rows from ``first_read`` on; rows stand at consecutive positions."""
        num_rows = embeddings.shape[0]
        end = first_position + num_rows
        if end > self._positions.shape[0]:  # a window longer than the drafter's own
            self._positions = torch.arange(2 * end, device=embeddings.device)
        return run_stack(
            self._drafter.stack,
            embeddings[None],
            additive_mask(mask, embeddings.dtype),
            self._positions[None, first_position:end],
            self._positions[first_read:num_rows],
            self._cache,
        )


def allocate_cache(
    drafter: WindowDrafter, batch: int, capacity: int, kind: type[AnyCache] = PreallocatedCache
) -> AnyCache:
    """An empty cache for the drafter's layers."""
    return kind.allocate(drafter.stack.config, batch, capacity, drafter.dtype, drafter.device)


def slot_embeddings(
    drafter: WindowDrafter, count: int, fixed: Int[Tensor, "*row gamma"] | None
) -> Float[Tensor, "*row slot hidden"]:
    """What stands in the ``count`` slots of a window, or of the windows of several rows; ``fixed`` as in
    ``window_states``, of at least ``count`` positions."""
    assert drafter.mask_embedding is not None  # not conditioned
    masks = drafter.mask_embedding.expand(count, -1)
    if fixed is None:
        return masks
    shown = fixed[..., :count]
    ids = drafter.draft_vocab_ids[shown.clamp(min=0)]
    return torch.where(shown[..., None] < 0, masks, drafter.embeddings.embed(ids, masks.dtype))
