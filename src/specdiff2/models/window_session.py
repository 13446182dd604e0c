"""What the decoding sessions of block drafters share: from the states of one window to its law and to drafts.

With ``denoising_steps`` S > 1 there are S passes. The first S-1 each fix ceil(remaining / steps left) of the open
positions (by confidence, or another order of ``functional.unmasking``) to their argmax and show those tokens to the
next pass; the law of the positions left comes from the last one. A fixed position is one-hot in the law, so
``tokens ~ draft_probs`` is exact.

With a Markov head a position's law depends on the token before it. Drafts then are drawn position by position. A rule
that reads the draft probabilities of several chains needs one law per position for all of them: it gets the law given
the argmax chain's tokens, which is fixed before anything is drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs
from specdiff2.functional.unmasking import unmasking_scores
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, Draft, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.window_drafter import WindowDrafter


NUM_CANDIDATES = 256  # tokens per position that a tree is grown from


@dataclass(frozen=True, slots=True)
class WindowLaw:
    """See ``protocols.DraftLaw``. ``base``: logits without the Markov head; ``gates``: its gates, or None."""

    drafter: WindowDrafter
    root: int
    base: Float[Tensor, "gamma draft_vocab"]
    gates: Float[Tensor, "gamma rank"] | None
    _lists: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]:
        return self.drafter.draft_vocab_ids

    @property
    def gamma(self) -> int:
        return int(self.base.shape[0])

    @property
    def factorised(self) -> bool:
        return self.gates is None

    def first(self, gamma: int) -> WindowLaw:
        """The law of the first ``gamma`` positions alone."""
        return WindowLaw(self.drafter, self.root, self.base[:gamma], None if self.gates is None else self.gates[:gamma])

    def logits(self, depth: int, previous: Int[Tensor, " parent"]) -> Float[Tensor, "parent draft_vocab"]:
        """Unnormalised, one row for each verifier id in ``previous``."""
        base = self.base[depth].expand(len(previous), -1)
        if self.gates is None or self.drafter.markov is None:
            return base
        gate = self.gates[depth].expand(len(previous), -1)
        return base + self.drafter.markov(gate, self.drafter.to_draft_vocab(previous))

    @torch.inference_mode()
    def log_probs(self, depth: int, previous: Int[Tensor, " parent"]) -> Float[Tensor, "parent draft_vocab"]:
        return self.logits(depth, previous.to(self.base.device)).log_softmax(-1)

    @torch.inference_mode()
    def candidates(
        self, depth: int, previous: Int[Tensor, " parent"]
    ) -> tuple[Float[Tensor, "parent candidate"], Int[Tensor, " candidate"]]:
        """The ``NUM_CANDIDATES`` tokens that are most probable without the Markov head, normalised over the list.

        With a bias for the whole draft vocabulary at every parent a tree would cost more than the drafter's pass.
        """
        ids, base, outputs = self._short_lists()
        if outputs is None or self.gates is None or self.drafter.markov is None:
            return base[depth].log_softmax(-1).expand(len(previous), -1), ids[depth]
        row = self.drafter.to_draft_vocab(previous.to(ids.device))
        bias = self.drafter.markov.inputs(self.gates[depth], row) @ outputs[depth].mT
        return (base[depth] + bias).log_softmax(-1), ids[depth]

    def prepare(self) -> None:
        """Compute what ``candidates`` reads: part of the drafter's pass, not of growing a tree."""
        if not self.factorised:
            self._short_lists()

    def _short_lists(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """For all positions, once per window: verifier ids, base logits and Markov outputs of the candidates."""
        if not self._lists:
            base, index = self.base.topk(min(NUM_CANDIDATES, self.base.shape[-1]), dim=-1)
            markov = self.drafter.markov
            outputs = None if markov is None else markov.token_out[index].to(base.dtype)
            self._lists.append((self.ids[index], base, outputs))
        return self._lists[0]

    @torch.inference_mode()
    def position_log_probs(self) -> Float[Tensor, "gamma draft_vocab"]:
        """Raises ValueError for a law that does not factorise."""
        if not self.factorised:
            raise ValueError("position_log_probs(): the law depends on the previous token; use log_probs")
        return self.base.log_softmax(-1)

    @torch.inference_mode()
    def given_argmax_chain(self) -> Float[Tensor, "gamma draft_vocab"]:
        """Logits of every position given that the ones before it are the most probable tokens."""
        if self.factorised:
            return self.base
        rows, previous = [], torch.tensor([self.root], device=self.base.device)
        for depth in range(self.gamma):
            rows.append(self.logits(depth, previous)[0])
            previous = self.ids[rows[-1].argmax(-1, keepdim=True)]
        return torch.stack(rows)


def confident_length(law: WindowLaw, min_confidence: float) -> int:
    """Leading positions whose joint argmax-chain probability is at least ``min_confidence``; at least 1."""
    path = law.given_argmax_chain().log_softmax(-1).amax(-1).cumsum(-1)
    return max(1, int((path >= math.log(min_confidence)).sum()))


def draw_drafts(
    law: WindowLaw, num_drafts: int, sampling: SamplingParams, rng: RandomSource, needs_probs: bool
) -> Draft:
    """K independent drafts; see the module docstring for laws with a Markov head."""
    if not law.factorised and not (needs_probs and num_drafts > 1):
        tokens, probs = _draw_in_order(law, num_drafts, sampling, rng)
    else:
        probs = logits_to_probs(law.given_argmax_chain(), sampling)
        tokens = rng.chains(probs, num_drafts).to(law.ids.device)
    tokens = law.ids[tokens]
    if not needs_probs:
        return Draft(tokens)
    draft_probs = probs.new_zeros((law.gamma, law.drafter.vocab_size))
    draft_probs[:, law.ids] = probs
    return Draft(tokens, draft_probs)


def _draw_in_order(
    law: WindowLaw, num_drafts: int, sampling: SamplingParams, rng: RandomSource
) -> tuple[Int[Tensor, "K gamma"], Float[Tensor, "gamma draft_vocab"]]:
    """Every position given the drawn token before it; the probabilities are those of the first draft's path."""
    previous = torch.full((num_drafts,), law.root, device=law.base.device)
    tokens, first = [], []
    for depth in range(law.gamma):
        probs = logits_to_probs(law.logits(depth, previous), sampling)
        drawn = rng.chains(probs, 1)[0].to(law.ids.device)  # one draw from each draft's row
        tokens.append(drawn)
        first.append(probs[0])
        previous = law.ids[drawn]
    return torch.stack(tokens, dim=1), torch.stack(first)


class WindowSession(ABC):
    """A session that knows how to run one window; see ``protocols.DrafterSession`` and ``protocols.LawSession``."""

    _drafter: WindowDrafter
    _sampling: SamplingParams
    _generator: torch.Generator | None = None
    min_confidence: float = 0.0  # drafts end before the argmax chain's probability falls below it; see ``propose``
    denoising_steps: int | None = None  # passes of a window; None: as the drafter was trained

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
        with torch.inference_mode():
            fixed = self._denoise(gamma)
            states, base = self.window_outputs(gamma, fixed)
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

    def _denoise(self, gamma: int) -> Int[Tensor, " gamma"] | None:
        """Positions fixed by all passes but the last (draft-vocabulary index, -1 where open); None with one pass."""
        asked = self.denoising_steps or self._drafter.config.denoising_steps
        steps = min(asked, gamma)  # more steps than positions: nothing left to say
        if asked == 1:
            return None
        fixed = torch.full((gamma,), -1, device=self._drafter.device)
        for steps_left in range(steps, 1, -1):
            logits = self.window_logits(gamma, fixed)
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
