"""What the decoding sessions of block drafters share: from the states of one window to its law and to drafts.

With ``denoising_steps`` S > 1 there are S passes. The first S-1 each fix ceil(remaining / steps left) of the open
positions (by confidence, or another order of ``functional.unmasking``) to their argmax and show those tokens to the
next pass; the law of the positions left comes from the last one. A fixed position is one-hot in the law, so
``tokens ~ draft_probs`` is exact.

Laws and draws are ``models.window_law``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs
from specdiff2.functional.unmasking import unmasking_scores
from specdiff2.models.window_law import WindowLaw, confident_length, draw_drafts
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, Draft, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.window_drafter import WindowDrafter


WindowPass: TypeAlias = tuple[int, Tensor | None]  # gamma and what is shown: arguments of ``window_outputs``
WindowOutputs: TypeAlias = tuple[Tensor, Tensor]  # states and logits


class WindowSession(ABC):
    """A session that knows how to run one window; see ``protocols.DrafterSession`` and ``protocols.LawSession``."""

    _drafter: WindowDrafter
    _sampling: SamplingParams
    _generator: torch.Generator | None = None
    min_confidence: float = 0.0  # drafts end before the argmax chain's probability falls below it; see ``propose``
    denoising_steps: int | None = None  # passes of a window; None: as the drafter was trained
    _prepared: tuple[int, WindowLaw] | None = None  # committed tokens, and the law of the window after them

    @property
    @abstractmethod
    def num_committed(self) -> int:
        """Tokens committed so far, prompt included."""

    @property
    @abstractmethod
    def last_token(self) -> int:
        """The last committed token."""

    @abstractmethod
    def window_states(self, gamma: int, fixed: Int[Tensor, " gamma"] | None = None) -> Float[Tensor, "gamma hidden"]:
        """States of the window after the committed tokens: what ``WindowDrafter.window_states`` gives for this anchor.

        ``fixed`` holds draft-vocabulary indices to show instead of masks, -1 for a mask.
        """

    @torch.no_grad()
    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """K independent drafts from the drafter's law for the next ``gamma`` >= 1 positions.

        Decoders ask for at most the drafter's own gamma: beyond it nothing was trained. With ``min_confidence`` the
        drafts are as long as the argmax chain's probability under the untempered law stays at or above it (one
        position at least): known before any token is drawn, so the shortening is non-anticipating.

        Raises:
            ConfigError: gamma or num_drafts below 1.
        """
        if num_drafts < 1:
            raise ConfigError(f"num_drafts={num_drafts!r}: expected an integer >= 1")
        with torch.inference_mode():
            law = self._law(gamma)
            if self.min_confidence > 0.0:
                law = law.first(confident_length(law, self.min_confidence))
            return draw_drafts(law, num_drafts, self._sampling, rng, needs_probs)

    def law(self, gamma: int) -> WindowLaw:
        """The untempered law of the next ``gamma`` positions (see the module docstring).

        Raises:
            ConfigError: gamma below 1.
        """
        with torch.inference_mode():
            law = self._law(gamma)
            law.prepare()
            return law

    def _law(self, gamma: int) -> WindowLaw:
        if gamma < 1:
            raise ConfigError(f"gamma={gamma!r}: expected an integer >= 1")
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self.num_committed and prepared[1].gamma == gamma:
            return prepared[1]
        with torch.inference_mode():
            steps = self.law_passes(gamma)
            asked = next(steps)
            while True:
                try:
                    asked = steps.send(self.window_outputs(*asked))
                except StopIteration as end:
                    return end.value

    def prepared(self, law: WindowLaw) -> None:
        """The law that the next ``propose`` or ``law`` asks for: somebody ran its passes (``models.drafter_batch``)."""
        self._prepared = self.num_committed, law

    def law_passes(self, gamma: int) -> Generator[WindowPass, WindowOutputs, WindowLaw]:
        """The law of the next ``gamma`` >= 1 positions, asking for each pass: it is sent the outputs of it."""
        fixed = yield from self._denoise(gamma)
        states, base = yield gamma, fixed
        markov = self._drafter.markov
        if fixed is not None:
            is_fixed = fixed >= 0
            base[is_fixed] = float("-inf")
            base[is_fixed, fixed[is_fixed]] = 0.0
        return WindowLaw(self._drafter, self.last_token, base, None if markov is None else markov.gate(states))

    def window_outputs(
        self, gamma: int, fixed: Int[Tensor, " gamma"] | None
    ) -> tuple[Float[Tensor, "gamma hidden"], Float[Tensor, "gamma draft_vocab"]]:
        """``window_states`` and their logits, without the Markov head."""
        states = self.window_states(gamma, fixed)
        return states, self._drafter.embeddings.logits(states)

    def window_logits(
        self, gamma: int, fixed: Int[Tensor, " gamma"] | None = None
    ) -> Float[Tensor, "gamma draft_vocab"]:
        """Logits of one pass, without the Markov head."""
        with torch.inference_mode():
            return self._drafter.embeddings.logits(self.window_states(gamma, fixed))

    def draft_law(self, gamma: int) -> Float[Tensor, "gamma draft_vocab"]:
        """The tempered probabilities of every position (given the argmax chain, with a Markov head)."""
        return logits_to_probs(self.law(gamma).given_argmax_chain(), self._sampling)

    def _denoise(self, gamma: int) -> Generator[WindowPass, WindowOutputs, Int[Tensor, " gamma"] | None]:
        """Positions fixed by all passes but the last (draft-vocabulary index, -1 where open); None with one pass."""
        asked = self.denoising_steps or self._drafter.config.denoising_steps
        steps = min(asked, gamma)  # more steps than positions: nothing left to say
        if asked == 1:
            return None
        fixed = torch.full((gamma,), -1, device=self._drafter.device)
        for steps_left in range(steps, 1, -1):
            _, logits = yield gamma, fixed
            num_fixed = -(-int((fixed < 0).sum()) // steps_left)
            scores = unmasking_scores(logits, self._drafter.unmasking, self._unmasking_generator)
            chosen = scores.masked_fill(fixed >= 0, -torch.inf).topk(num_fixed).indices
            fixed[chosen] = logits.argmax(-1)[chosen]
        return fixed

    @property
    def _unmasking_generator(self) -> torch.Generator:
        """For the random order: its own, so that drafts stay independent of the verifier's draws."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(0)
        return self._generator
