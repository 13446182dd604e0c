"""Decoding with a drafter whose tokenizer is not the verifier's.

The drafter's own session works in the drafter's ids throughout. Around it, committed verifier ids are shown to it as
its own, and its drafts are handed on as verifier ids (``models.tokenizer_bridge``). The law of such a draft over
verifier ids is not known, so only rules that never read it may follow: greedy acceptance and tree match, lossless for
any draft that does not see the verifier's draws. For the same reason there is no ``law`` to grow a tree from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdiff2.models.bridged_text import BridgedText
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, Draft


class RewritableSession(Protocol):
    """A drafter session in the drafter's own vocabulary, whose past may be tokenised anew."""

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool = False) -> Draft: ...

    def rewrite(self, tokens: list[int]) -> None:
        """The committed tokens are now these (at least one)."""
        ...


class RetokenizedSession:
    """See ``protocols.DrafterSession``: in and out go verifier ids."""

    def __init__(self, inner: RewritableSession, text: BridgedText) -> None:
        """``text``: that of the prompt (``TokenizerBridge.start``); ``inner`` may know it already."""
        self._inner, self._text = inner, text

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool = False) -> Draft:
        """Drafts of at most ``gamma`` verifier ids, -1 after the end of a shorter one; ``[K, 0]`` when none is left.

        The drafter fills ``gamma`` of its own positions.

        Raises:
            ConfigError: the law of the drafts is asked for.
        """
        if needs_probs:
            raise ConfigError(
                "draft_probs of a drafter with another tokenizer: its drafts have no known law over the verifier's "
                "tokens; use a rule that never reads it (greedy or tree_match)"
            )
        self._inner.rewrite(self._text.drafter_ids)
        drafted = self._inner.propose(gamma, num_drafts, rng, needs_probs=False).tokens.tolist()
        chains = [self._text.verifier_ids(row, gamma) for row in drafted]
        tokens = torch.full((len(chains), max(map(len, chains))), -1, dtype=torch.long)
        for row, chain in zip(tokens, chains, strict=True):
            row[: len(chain)] = torch.tensor(chain, dtype=torch.long)
        return Draft(tokens)

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Newly committed verifier ids."""
        self._text.extend(tokens)

    @property
    def min_confidence(self) -> float:
        """The drafter's own setting; absent where it has none."""
        return self._inner.min_confidence  # type: ignore[attr-defined]

    @min_confidence.setter
    def min_confidence(self, value: float) -> None:
        self._inner.min_confidence = value  # type: ignore[attr-defined]
