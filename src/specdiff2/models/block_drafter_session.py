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
from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.models.layer_stack import run_stack
from specdiff2.models.window_session import WindowSession
from specdiff2.types import SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.window_drafter import WindowDrafter

PREFILL_CHUNK = 512  # tokens a pass while reading the prompt: bounds the mask to 512 x prompt


class BlockDrafterSession(WindowSession):
    """See ``protocols.DrafterSession``. Reads the prompt at construction."""

    def __init__(
        self, drafter: WindowDrafter, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int
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
                self._cache = PreallocatedCache.allocate(
                    drafter.stack.config, 1, capacity, drafter.dtype, drafter.device
                )
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
            slots = self._slot_embeddings(num_slots(gamma, self._shifted, self._drafter.whole_window), fixed)
            states = self._run_whole(slots) if self._cache is None else self._run_cached(slots, self._cache)
            return states[:gamma]

    def _slot_embeddings(self, count: int, fixed: Tensor | None) -> Float[Tensor, "slot hidden"]:
        assert self._drafter.mask_embedding is not None  # not conditioned
        masks = self._drafter.mask_embedding.expand(count, -1)
        if fixed is None:
            return masks
        shown = fixed[:count]
        ids = self._drafter.draft_vocab_ids[shown.clamp(min=0)]
        return torch.where(shown[:, None] < 0, masks, self._drafter.embeddings.embed(ids, masks.dtype))

    def _run_cached(
        self, slots: Float[Tensor, "slot hidden"], cache: PreallocatedCache
    ) -> Float[Tensor, "gamma hidden"]:
        """One pass over the tokens that are not in the cache yet and the window; the cache keeps the tokens."""
        num_committed = len(self._tokens)
        if self._shifted and cache.length == num_committed:
            cache.truncate(num_committed - 1)  # the anchor's own output is read: compute it again
        num_cached, count = cache.length, slots.shape[0]
        num_new = num_committed - num_cached
        cache.reserve(num_committed + count)
        embeddings = torch.cat([self._embed(num_cached, num_committed), slots])
        mask = decode_mask(num_cached, num_new, count, slots.device)
        first_read = num_new - 1 if self._shifted else num_new
        hidden = self._run(embeddings, mask, num_cached, first_read)
        cache.truncate(num_committed)
        return hidden

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
