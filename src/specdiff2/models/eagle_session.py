"""Decoding with an EAGLE head: the draft tree is grown node by node, each node reading what its parent predicted.

Keys and values of the committed tokens' steps, made from the verifier's own hidden states, stay in a preallocated
cache: token i has its step at position i. The nodes of a round are written behind them and dropped with the next
round, since a committed token's step is computed again from its true hidden state. A pass over several nodes has an
additive mask (committed steps, the node's ancestors, itself) and explicit positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.kv_cache import PreallocatedCache
from specdiff2.models.layer_stack import run_stack
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, Draft, MismatchError, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.eagle_drafter import EagleDrafter
    from specdiff2.models.verifier_session import HFVerifierSession

READ_CHUNK = 512  # steps a pass while reading the prompt: bounds the mask to 512 x prompt
TREE_HEADROOM = 64  # slots beyond prompt + max_new_tokens; a larger tree makes the cache grow


class EagleSession:
    """See ``protocols.PathLawSession``. Reads the prompt at construction.

    Raises:
        ConfigError: no verifier session, or one that keeps no hidden states.
        MismatchError: the session is one of another verifier, or of another prompt.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafter: EagleDrafter,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: HFVerifierSession | None,
    ) -> None:
        features = prompt_features(drafter, prompt, verifier_session)
        self._drafter, self._sampling = drafter, sampling
        self._num_committed = len(prompt)
        capacity = len(prompt) + max_new_tokens + TREE_HEADROOM
        self._cache = PreallocatedCache.allocate(drafter.stack.config, 1, capacity, drafter.dtype, drafter.device)
        self._states = self._visible = torch.empty(0)  # of the tree's nodes; set by ``_read``
        self._depths: list[int] = []
        self._first_alone = len(prompt) == 1  # the first token's step, without a hidden state before it
        if self._first_alone:
            width = drafter.stack.config.hidden_size
            self._read(prompt, torch.zeros((1, width), device=drafter.device), first_position=0)
        else:
            self._read(prompt[1:], features, first_position=1)

    @property
    def num_committed(self) -> int:
        """Tokens committed so far, prompt included."""
        return self._num_committed

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]:
        """Verifier ids of the draft vocabulary."""
        return self._drafter.draft_vocab_ids

    @torch.inference_mode()
    def observe(self, tokens: Sequence[int], features: Float[Tensor, "token hidden"] | None = None) -> None:
        """Newly committed tokens, and the verifier's hidden states of the token before each of them.

        Raises:
            ConfigError: no hidden states, or not as many as tokens.
        """
        if features is None or len(features) != len(tokens):
            found = "None" if features is None else f"{len(features)} of them"
            raise ConfigError(
                f"an EAGLE head needs the verifier's hidden states of {len(tokens)} tokens, got {found}; use a "
                "verifier with output_features=True"
            )
        self._cache.truncate(0 if self._first_alone else self._num_committed - 1)
        self._first_alone = False
        self._read(tokens, features, first_position=self._num_committed)
        self._num_committed += len(tokens)

    @torch.inference_mode()
    def start_tree(self) -> Float[Tensor, " draft_vocab"]:
        """Log-probabilities of the token after the committed ones; the nodes of an earlier tree are dropped."""
        self._cache.truncate(1 if self._first_alone else self._num_committed - 1)
        self._states, self._depths = self._states[:1], [0]
        self._visible = torch.zeros((1, 0), dtype=torch.bool)
        return self._log_probs(self._states)[0]

    @torch.inference_mode()
    def expand(self, tokens: Sequence[int], parents: Sequence[int]) -> Float[Tensor, "node draft_vocab"]:
        """Add nodes to the tree in one pass; log-probabilities of the token after each of them.

        Args:
            tokens: verifier ids.
            parents: nodes of this tree: 0 is the last committed token, 1 the first node added, and so on.
        """
        drafter, device = self._drafter, self._drafter.device
        num_read, num_before, num_new = self._cache.length, len(self._depths), len(tokens)
        num_committed = num_read - (num_before - 1)
        depths = [self._depths[parent] + 1 for parent in parents]
        parent = torch.tensor(list(parents))
        # columns: the nodes added so far, the root apart, which is a committed step
        visible = torch.cat([self._visible[parent], torch.eye(num_new, dtype=torch.bool)], dim=1)
        allowed = torch.cat([torch.ones((num_new, num_committed), dtype=torch.bool), visible], dim=1).to(device)
        inputs = drafter.head_input(torch.tensor(list(tokens), device=device), self._states[parent.to(device)])
        positions = torch.tensor([self._num_committed - 1 + depth for depth in depths], device=device)
        states = self._run(inputs, allowed, positions)
        self._states = torch.cat([self._states, states])
        self._depths += depths
        padding = torch.zeros((num_before, num_new), dtype=torch.bool)
        self._visible = torch.cat([torch.cat([self._visible, padding], dim=1), visible])
        return self._log_probs(states)

    @torch.inference_mode()
    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """K drafts, each drawn token by token along its own path; ``draft_probs`` are those along the path.

        Raises:
            ConfigError: gamma or num_drafts below 1, or draft probabilities of several drafts: each position's law
                depends on the tokens before it, so that they have no common one.
        """
        if gamma < 1 or num_drafts < 1:
            raise ConfigError(f"gamma={gamma!r}, num_drafts={num_drafts!r}: expected integers >= 1")
        if needs_probs and num_drafts > 1:
            raise ConfigError(
                f"K={num_drafts} with a rule that reads draft probabilities and {type(self._drafter).__name__}, whose "
                "drafts follow no common law; use K=1, or sampler eagle or eagle2"
            )
        log_probs = self.start_tree().expand(num_drafts, -1)
        nodes, tokens, first = [0] * num_drafts, list[Tensor](), list[Tensor]()
        for depth in range(gamma):
            probs = logits_to_probs(log_probs, self._sampling)
            tokens.append(self.ids[rng.chains(probs, 1)[0].to(self.ids.device)])
            first.append(probs[0])
            if depth + 1 < gamma:
                added = len(self._depths)
                log_probs = self.expand(tokens[-1].tolist(), nodes)
                nodes = list(range(added, added + num_drafts))
        drafted = torch.stack(tokens, dim=1)
        if not needs_probs:
            return Draft(drafted)
        probs = torch.stack(first)
        draft_probs = probs.new_zeros((gamma, self._drafter.vocab_size))
        draft_probs[:, self.ids] = probs
        return Draft(drafted, draft_probs)

    def _read(self, tokens: Sequence[int], features: Tensor, first_position: int) -> None:
        """Steps of committed tokens behind those in the cache; the last one's output is what a tree starts from."""
        drafter, device = self._drafter, self._drafter.device
        ids = torch.tensor(list(tokens), device=device)
        inputs = drafter.head_input(ids, features.to(device))
        for start in range(0, len(ids), READ_CHUNK):
            part = inputs[start : start + READ_CHUNK]
            num_cached, count = self._cache.length, len(part)
            allowed = torch.ones((count, num_cached + count), dtype=torch.bool, device=device).tril(num_cached)
            positions = torch.arange(count, device=device) + first_position + start
            self._states = self._run(part, allowed, positions)[-1:]
        self._depths = [0]

    def _run(
        self, inputs: Float[Tensor, "step hidden"], allowed: Tensor, positions: Int[Tensor, " step"]
    ) -> Float[Tensor, "step hidden"]:
        self._cache.reserve(self._cache.length + len(inputs))
        mask = additive_mask(allowed, inputs.dtype)[None, None]
        rows = torch.arange(len(inputs), device=inputs.device)
        return run_stack(self._drafter.stack, inputs[None], mask, positions[None], rows, self._cache)

    def _log_probs(self, states: Float[Tensor, "node hidden"]) -> Float[Tensor, "node draft_vocab"]:
        return self._drafter.embeddings.logits(states).log_softmax(-1)


def prompt_features(
    drafter: EagleDrafter, prompt: Sequence[int], session: HFVerifierSession | None
) -> Float[Tensor, "token hidden"]:
    """The verifier's hidden states of all tokens of the prompt but the last; checks whose session it is."""
    if session is None:
        raise ConfigError(
            "an EAGLE head reads the verifier's hidden states: start(..., verifier_session=...) got None; decode with "
            "SpeculativeDecoder, which passes it"
        )
    made_for, given = drafter.context.verifier, session.verifier
    if given is not made_for and given.fingerprint != made_for.fingerprint:
        raise MismatchError(
            f"features of verifier {given.name} ({given.fingerprint}) for a head around {made_for.name} "
            f"({made_for.fingerprint}); decode with the verifier it was made for"
        )
    if session.tokens[: len(prompt)] != list(prompt):
        raise MismatchError("the verifier's session was started with another prompt; start both with the same")
    features = session.prompt_features
    if features is None and len(prompt) > 1:
        raise ConfigError("an EAGLE head needs the verifier's hidden states; use a verifier with output_features=True")
    return torch.empty(0) if features is None else features
