"""Window drafters of several prompts at once: one pass over the windows of all rows.

Every row keeps its own session, which draws its drafts, shortens them and says which passes its law needs; only the
passes are run together here. Windows may differ in length (the end of an output), prefixes always do: shorter ones are
masked (``functional.ragged_masks``), so that a row's law is what it is alone, up to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.ragged_masks import ragged_decode_mask, ragged_window_mask
from specdiff2.models.block_drafter_session import BlockDrafterSession, allocate_cache, slot_embeddings
from specdiff2.models.context_drafter_session import ContextDrafterSession, window_inputs
from specdiff2.models.layer_stack import run_stack
from specdiff2.models.row_cache import RowCache, SharedCache
from specdiff2.models.transfer import to_device
from specdiff2.models.verifier_context import prefix_cache
from specdiff2.models.window_session import WindowPass, WindowSession
from specdiff2.types import SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter
    from specdiff2.models.verifier_session import HFVerifierSession
    from specdiff2.models.window_drafter import WindowDrafter

Session = TypeVar("Session", bound=WindowSession)


class WindowDrafterBatch(ABC, Generic[Session]):
    """See ``protocols.DrafterBatch``."""

    def __init__(self, drafter: WindowDrafter) -> None:
        self._drafter = drafter
        self._sessions: list[Session] = []

    @torch.inference_mode()
    def prepare(self, gammas: Sequence[int]) -> None:
        """All rows that still need a pass go through it together, until every law is there."""
        laws = {row: self._sessions[row].law_passes(gamma) for row, gamma in enumerate(gammas) if gamma > 0}
        asked = {row: next(steps) for row, steps in laws.items()}
        while asked:
            states = self._states(asked)
            logits = self._drafter.embeddings.logits(states)
            lengths = [gamma for gamma, _ in asked.values()]
            outputs = zip(states.split(lengths), logits.split(lengths), strict=True)
            for row, output in zip(list(asked), outputs, strict=True):
                try:
                    asked[row] = laws[row].send(output)
                except StopIteration as end:
                    self._sessions[row].prepared(end.value)
                    del asked[row]

    def keep(self, places: Sequence[int]) -> None:
        self._sessions = [self._sessions[place] for place in places]

    def _seat(self, place: int, session: Session) -> Session:
        """Give a new row its place."""
        self._sessions[place : place + 1] = [session]
        return session

    @abstractmethod
    def _states(self, asked: dict[int, WindowPass]) -> Float[Tensor, "position hidden"]:
        """States of the asked windows, one row after the other, as ``WindowSession.window_states`` gives them."""

    def _fixed(self, asked: dict[int, WindowPass], width: int) -> Int[Tensor, "row gamma"] | None:
        """What the windows of all rows show, -1 for a mask; None where nobody shows anything."""
        if all(fixed is None for _, fixed in asked.values()):
            return None
        shown = torch.full((len(self._sessions), width), -1, device=self._drafter.device)
        for row, (_, fixed) in asked.items():
            if fixed is not None:
                shown[row, : len(fixed)] = fixed[:width]
        return shown


class ContextDrafterBatch(WindowDrafterBatch[ContextDrafterSession]):
    """Conditioned drafters: the windows stand behind the longest row of the verifier's cache for the time of a pass."""

    _drafter: BlockDrafter

    def start(
        self,
        place: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: HFVerifierSession,
    ) -> ContextDrafterSession:
        self._drafter.check_prompt(prompt)
        return self._seat(place, ContextDrafterSession(self._drafter, prompt, sampling, verifier_session))

    def _states(self, asked: dict[int, WindowPass]) -> Float[Tensor, "position hidden"]:
        drafter, sessions = self._drafter, self._sessions
        row_cache = sessions[0].session.cache
        assert isinstance(row_cache, RowCache) and drafter.context is not None  # of a HFVerifierBatch; conditioned
        cache, layers = row_cache.shared, drafter.context.shape.layer_indices
        gammas = [asked[row][0] if row in asked else 0 for row in range(len(sessions))]
        lengths, width = [session.num_committed - 1 for session in sessions], max(gammas)
        start = cache.begin(lengths, width)
        numbers = to_device([[session.last_token for session in sessions], lengths, gammas], drafter.device)
        tokens, past, windows = numbers.unbind()
        features = torch.stack([session.features() for session in sessions])
        inputs = window_inputs(drafter, tokens, features, width, self._fixed(asked, width))
        mask = ragged_window_mask(past, windows, start, width, inputs.dtype).expand(-1, -1, width, -1)
        positions = past[:, None] + torch.arange(width, device=drafter.device)
        read = to_device([row * width + j for row, gamma in enumerate(gammas) for j in range(gamma)], drafter.device)
        lent = cache.lend(layers)  # written in place; another dtype reads converted copies instead
        if sessions[0].session.cache_dtype != drafter.dtype:
            lent = prefix_cache([cache.keys_values(index) for index in layers])
        return run_stack(drafter.stack, inputs, mask, positions, read, lent)


class BlockDrafterBatch(WindowDrafterBatch[BlockDrafterSession]):
    """Drafters with a causal prefix: each row's new tokens and its window, behind the longest row of their cache."""

    def __init__(
        self, drafter: WindowDrafter, num_rows: int, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        super().__init__(drafter)
        capacity = max(map(len, prompts)) + max_new_tokens + 2 * (drafter.gamma + 1)
        with torch.inference_mode():
            self._cache = allocate_cache(drafter, num_rows, capacity, SharedCache)

    def keep(self, places: Sequence[int]) -> None:
        super().keep(places)
        with torch.inference_mode():
            self._cache.keep_rows(places)

    def start(
        self,
        place: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: HFVerifierSession,
    ) -> BlockDrafterSession:
        self._drafter.check_prompt(prompt)
        cache = self._cache.rows[place]
        with torch.inference_mode():
            cache.clear()
        return self._seat(place, BlockDrafterSession(self._drafter, prompt, sampling, max_new_tokens, cache))

    def _states(self, asked: dict[int, WindowPass]) -> Float[Tensor, "position hidden"]:
        drafter, sessions = self._drafter, self._sessions
        unread = [session.unread_tokens() if row in asked else [] for row, session in enumerate(sessions)]
        slots = [s.num_slots(asked[row][0]) if row in asked else 0 for row, s in enumerate(sessions)]
        committed = [session.num_committed for session in sessions]
        num_new, slot_width = max(map(len, unread)), max(slots)
        width = num_new + slot_width
        start = self._cache.begin([row.length for row in self._cache.rows], width)
        rows = []
        for row, own in enumerate(unread):
            facts = self._cache.rows[row].length, len(own), slots[row], committed[row]
            rows.append([*own, *[0] * (num_new - len(own)), *facts])
        numbers = to_device(rows, drafter.device)
        ids, (past, new, window, anchor) = numbers[:, :num_new], numbers[:, num_new:].unbind(1)
        masks = slot_embeddings(drafter, slot_width, self._fixed(asked, slot_width))
        tokens = drafter.embeddings.embed(ids, drafter.dtype)
        embeddings = torch.cat([tokens, masks.expand(len(rows), -1, -1)], dim=1)
        steps = torch.arange(width, device=drafter.device)
        positions = torch.cat([past[:, None] + steps[:num_new], anchor[:, None] + steps[:slot_width]], dim=1)
        mask = ragged_decode_mask(past, new, window, start, num_new, slot_width, drafter.dtype)
        read = to_device(self._columns_read(asked, unread, num_new, width), drafter.device)
        states = run_stack(drafter.stack, embeddings, mask, positions, read, self._cache)
        for row in asked:
            sessions[row].read_tokens(start)
        return states

    def _columns_read(
        self, asked: dict[int, WindowPass], unread: list[list[int]], num_new: int, width: int
    ) -> list[int]:
        """Flat indices of the columns whose outputs predict the drafted positions: the slots, after the anchor where
        the drafter is shifted."""
        columns = []
        for row, (gamma, _) in asked.items():
            anchor = [len(unread[row]) - 1] if self._drafter.config.shifted else []
            own = [*anchor, *range(num_new, num_new + gamma - len(anchor))]
            columns += [row * width + column for column in own]
        return columns
