"""Decoding with a conditioned drafter: its layers read the live cache of the verifier's session.

One pass over ``gamma`` columns a round, whatever was accepted: nothing is computed for committed tokens, and there is
no cache of the drafter's own. The window's keys and values are written behind the committed ones of the verifier's
cache, where the next tree overwrites them, and are taken back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.models.layer_stack import run_stack
from specdiff2.models.verifier_context import ContextShape, prefix_cache
from specdiff2.models.window_session import WindowSession
from specdiff2.types import ConfigError, MismatchError, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter
    from specdiff2.models.verifier_session import HFVerifierSession


class ContextDrafterSession(WindowSession):
    """See ``protocols.DrafterSession``. ``observe`` has nothing to do: the verifier's session knows what is committed.

    Raises:
        ConfigError: no verifier session.
        MismatchError: the session is one of another verifier, or of another prompt.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        prompt: Sequence[int],
        sampling: SamplingParams,
        verifier_session: HFVerifierSession | None,
    ) -> None:
        if verifier_session is None:
            raise ConfigError(
                "a drafter with conditioning=verifier_kv reads the verifier's cache: start(..., verifier_session=...) "
                "got None; decode with SpeculativeDecoder, which passes it"
            )
        found, expected = verifier_session.verifier.fingerprint, drafter.config.verifier_fingerprint
        if found != expected:
            raise MismatchError(
                f"features of verifier {verifier_session.verifier.name} ({found}) for a drafter that was made for "
                f"{drafter.config.verifier_name} ({expected}); decode with the verifier it was made for"
            )
        if verifier_session.tokens[: len(prompt)] != list(prompt):
            raise MismatchError("the verifier's session was started with another prompt; start both with the same")
        assert drafter.context is not None and drafter.context_input is not None  # conditioned
        self._drafter = drafter
        self._sampling = sampling
        self.session = verifier_session
        self._shape: ContextShape = drafter.context.shape
        self._lent = verifier_session.cache.lend(self._shape.layer_indices)
        self._steps = torch.arange(drafter.gamma, device=drafter.device)

    @property
    def num_committed(self) -> int:
        """Tokens committed so far, prompt included."""
        return self.session.num_committed

    @property
    def last_token(self) -> int:
        return self.session.last_token

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Newly committed tokens; the verifier's session has them."""

    @torch.inference_mode()
    def window_outputs(
        self, gamma: int, fixed: Int[Tensor, " gamma"] | None
    ) -> tuple[Float[Tensor, "gamma hidden"], Float[Tensor, "gamma draft_vocab"]]:
        """One compiled pass where the verifier's passes are compiled and this window has one, else the eager pass."""
        passes, session = self.session.passes, self.session
        if passes is None or fixed is not None or not passes.can_draft(self._drafter):
            return super().window_outputs(gamma, fixed)
        return passes.draft(
            self._drafter, session.last_token, gamma, self.features(), session.num_committed - 1, session.cache
        )

    @torch.inference_mode()
    def window_states(self, gamma: int, fixed: Int[Tensor, " gamma"] | None = None) -> Float[Tensor, "gamma hidden"]:
        drafter, session = self._drafter, self.session
        token = torch.tensor(self.last_token, device=drafter.device)
        inputs = window_inputs(drafter, token, self.features(), gamma, fixed)
        num_cached = session.num_committed - 1
        positions = self._steps[None, :gamma] + num_cached
        cache = session.cache
        cache.truncate(num_cached)  # drops the nodes of a tree that was scored and never committed
        cache.reserve(num_cached + gamma)
        mask = inputs.new_zeros((1, 1, gamma, num_cached + gamma))  # every column sees the prefix and the window
        lent = self._lent  # written in place; another dtype reads converted copies instead
        if session.cache_dtype != drafter.dtype:
            lent = prefix_cache([cache.keys_values(index) for index in self._shape.layer_indices])
        hidden = run_stack(drafter.stack, inputs[None], mask, positions, self._steps[:gamma], lent)
        cache.truncate(num_cached)
        return hidden

    def features(self) -> Float[Tensor, " feature_width"]:
        """Hidden states right before the last committed token; zero where there are none (a prompt of one token)."""
        features = self.session.anchor_features(self._shape.feature_layers)
        if features is not None:
            return features
        width = len(self._shape.feature_layers) * self._shape.hidden_size
        return torch.zeros(width, dtype=self._drafter.dtype, device=self._drafter.device)


def window_inputs(
    drafter: BlockDrafter,
    token: Int[Tensor, "*row"],
    features: Float[Tensor, "*row feature_width"],
    gamma: int,
    fixed: Int[Tensor, "*row gamma"] | None,
) -> Float[Tensor, "*row gamma hidden"]:
    """What the layers see of one window, or of the windows of several rows; ``fixed`` as in ``window_states``."""
    context = drafter.context_input
    assert context is not None  # conditioned
    inputs = context(context.fuse(drafter.embeddings.embed(token, drafter.dtype), features), gamma)
    if fixed is None or gamma == 1:
        return inputs
    shown = fixed[..., : gamma - 1]
    ids = drafter.draft_vocab_ids[shown.clamp(min=0)]
    beside = features[..., None, :].expand(*shown.shape, -1)
    anchors = context.anchor(context.fuse(drafter.embeddings.embed(ids, drafter.dtype), beside))
    slots = torch.where(shown[..., None] < 0, inputs[..., 1:, :], anchors)
    return torch.cat([inputs[..., :1, :], slots], dim=-2)
