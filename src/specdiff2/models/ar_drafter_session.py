"""Decoding with an autoregressive drafter: one token a pass, with an exact key/value cache of its own.

The drafter reads text with the session that verifiers use (``models.verifier_session``: preallocated cache, compiled
passes where there are some), as a chain instead of a tree. A round of ``gamma`` tokens is ``gamma`` passes: the first
reads everything that was committed since (the token that replaced a rejected one, or the last draft token and the
bonus token), and what was rejected is taken back before.

Knows nothing of acceptance, and not how the verifier's ids and the drafter's rows go together (``models.ar_drafter``).

Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.verifier_session import HFVerifierSession
from specdiff2.protocols import RandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, Draft, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.ar_drafter import ARDrafter


class ReaderSession(HFVerifierSession):
    """A session that can take tokens back."""

    def rewrite(self, num_kept: int, following: Sequence[int]) -> list[int]:
        """Committed are now the first ``num_kept`` tokens, and then ``following``.

        The root of the next pass is the first token whose keys and values are not cached. Returns what comes after it
        and is to be read in the same pass.
        """
        del self._tokens[num_kept:]
        self.cache.truncate(min(self.cache.length, num_kept))
        if following and self.cache.length == num_kept:
            self._tokens.append(following[0])
            return list(following[1:])
        return list(following)


class ARDrafterSession:
    """See ``protocols.DrafterSession``. Reads the prompt at construction."""

    def __init__(
        self, drafter: ARDrafter, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int
    ) -> None:
        self._drafter, self._sampling = drafter, sampling
        self._reader = ReaderSession(drafter.model, drafter.shown(prompt), max_new_tokens)
        self._unread: list[int] = []  # committed tokens after the reader's root
        self._drafted: list[int] = []  # tokens of the reader that nobody has committed yet

    @torch.inference_mode()
    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """One draft; row j of its ``draft_probs`` is the law of token j given the draft tokens before it.

        Raises:
            ConfigError: ``gamma`` below 1, or several drafts.
        """
        if gamma < 1:
            raise ConfigError(f"gamma={gamma!r}: expected an integer >= 1")
        if num_drafts != 1:
            raise ConfigError(
                f"K={num_drafts!r} with autoregressive drafter {self._drafter.model.name}: expected K=1; use sampler "
                "sps, leviathan or specdiff, which take one draft"
            )
        self.observe([])  # takes back a draft of which nothing was committed
        tree, rows = TokenTree.from_chains(self._reader.last_token, [self._unread]), []
        self._unread = []
        for _ in range(gamma):
            probs = logits_to_probs(self._drafter.drafted_logits(self._reader.score(tree)[-1]), self._sampling)
            index = int(probs.argmax()) if self._sampling.temperature == 0.0 else rng.categorical(probs)
            token = self._drafter.token_of(index)
            self._reader.commit(range(1, tree.num_nodes), token)
            self._drafted.append(token)
            rows.append(probs)
            tree = TokenTree.root_only(token)
        tokens = torch.tensor([self._drafted])
        return Draft(tokens, self._drafter.verifier_law(torch.stack(rows))) if needs_probs else Draft(tokens)

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Newly committed tokens: draft tokens among them stay cached, the other ones are read by ``propose``."""
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self._drafted, strict=False)))
        num_before = self._reader.num_committed - len(self._drafted)
        following = [*self._unread, *self._drafter.shown(tokens[num_kept:])]
        self._unread = self._reader.rewrite(num_before + num_kept, following)
        self._drafted = []
