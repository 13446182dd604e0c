"""The law of one masked window, and drafts from it.

With a Markov head a position's law depends on the token before it. Drafts then are drawn position by position. A rule
that reads the draft probabilities of several chains needs one law per position for all of them: it gets the law given
the argmax chain's tokens, which is fixed before anything is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs, refuse_logits
from specdiff2.protocols import RandomSource
from specdiff2.types import Draft, SamplingParams

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
    if sampling.temperature == 0.0 and not needs_probs:
        return Draft(law.ids[_most_probable(law, num_drafts, rng)])
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


def _most_probable(law: WindowLaw, num_drafts: int, rng: RandomSource) -> Int[Tensor, "K gamma"]:
    """The argmax chain, K times: what drawing from one-hot rows gives, without rows over the whole vocabulary.

    As many random numbers are used up as for drawing, so a seed means the same tokens either way.

    Raises:
        SpecDiffError: logits that are no law (see ``logits_to_probs``).
    """
    peaks, tokens = law.given_argmax_chain().max(dim=-1)
    if not bool(torch.isfinite(peaks).all()):
        raise refuse_logits(peaks[~torch.isfinite(peaks)][0].item())
    for rows, num_draws in [(law.gamma, num_drafts)] if law.factorised else [(num_drafts, 1)] * law.gamma:
        rng.chains(torch.ones(rows, 1), num_draws)
    return tokens.expand(num_drafts, -1)


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
