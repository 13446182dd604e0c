"""Closed-form start of a conditioned drafter's input: ridge regression onto the verifier's own hidden states.

The drafter's layers are copies of verifier layers from ``first`` on, and they read the verifier's own keys and values.
What is missing is their input, the hidden state that the verifier would have before layer ``first``. Regressed from
what is known at drafting time, it makes the untrained drafter draft well already (SmolLM2-135M, gsm_symbolic: greedy
streak 0.59 before the first training step).

It knows no training loop. Statistics are accumulated in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter

MAX_SLOTS = 3  # slots whose hidden states the shared slot projection is fitted to; later ones are hardly predictable


@torch.no_grad()
def fit_context_input(drafter: BlockDrafter, rows: Sequence[tuple[Sequence[int], int]], ridge: float = 1e-2) -> float:
    """Overwrite the drafter's input projections; returns R^2 of the anchor's fit on the same rows.

    Args:
        rows: (token ids, index of the first anchor) of rollouts.
        ridge: relative to the mean diagonal of the normal matrix.

    Raises:
        ConfigError: the drafter is not conditioned, or no row holds an anchor.
    """
    if drafter.context_input is None or drafter.context is None:
        raise ConfigError("fit_context_input: expected a drafter with conditioning='verifier_kv'")
    rows = [row for row in rows if len(row[0]) - row[1] > MAX_SLOTS]
    if not rows:
        raise ConfigError("fit_context_input: no rollout with enough tokens; sample rollouts first")
    width = drafter.context_input.anchor.in_features
    anchor, slots = Regression(width), Regression(width)
    for ids, first in rows:
        fused, target = _example(drafter, list(ids), first)
        anchor.add(fused, target)
        for offset in range(1, min(MAX_SLOTS, drafter.gamma - 1) + 1):
            slots.add(fused[: len(fused) - offset], target[offset:])
    weight, bias = anchor.solve(ridge)
    drafter.context_input.anchor.weight.copy_(weight)
    drafter.context_input.anchor.bias.copy_(bias)
    if drafter.gamma > 1:
        weight, bias = slots.solve(ridge)
        drafter.context_input.slot.weight.copy_(weight)
        drafter.context_input.slot_bias.copy_(bias.expand_as(drafter.context_input.slot_bias))
    return anchor.r_squared(ridge)


def _example(drafter: BlockDrafter, ids: list[int], first: int) -> tuple[Tensor, Tensor]:
    """Fused inputs at the tokens ``first ..``, and the hidden states there before the first copied layer."""
    context, source = drafter.context, drafter.context_input
    assert context is not None and source is not None  # checked by the caller
    verifier = context.verifier
    tokens = torch.tensor([ids], device=verifier.device)
    _, hidden = verifier.forward(tokens, cache=None, logits_to_keep=1, output_hidden_states=True)
    assert hidden is not None  # just asked for
    features = torch.cat([hidden[index][0] for index in context.shape.feature_layers], dim=-1)
    features = torch.cat([torch.zeros_like(features[:1]), features[:-1]])  # those of the token before
    embedding = drafter.embeddings.embed(tokens[0], torch.float32)
    fused = source.fuse(embedding, features.float())[first:]
    return fused, hidden[context.shape.layer_indices[0]][0, first:].float()


class Regression:
    """Ridge regression with an intercept from accumulated sums."""

    def __init__(self, width: int) -> None:
        self._normal = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self._moment: Tensor | None = None
        self._square = 0.0

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        x = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=-1).double().cpu()
        y = targets.double().cpu()
        self._normal += x.T @ x
        self._moment = x.T @ y if self._moment is None else self._moment + x.T @ y
        self._square += float(y.square().sum())

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """(weight [target, input], bias [target])."""
        assert self._moment is not None  # at least one row
        penalty = ridge * self._normal.diagonal()[:-1].mean()
        damped = self._normal.clone()
        damped.diagonal()[:-1] += penalty
        damped.diagonal()[-1] += 1e-9  # the intercept is not damped
        solution = torch.linalg.solve(damped, self._moment)
        return solution[:-1].T.float(), solution[-1].float()

    def r_squared(self, ridge: float) -> float:
        assert self._moment is not None
        weight, bias = self.solve(ridge)
        solution = torch.cat([weight.T, bias[None]]).double()
        residual = self._square - 2 * (solution * self._moment).sum() + (solution * (self._normal @ solution)).sum()
        count = self._normal[-1, -1]
        total = self._square - float((self._moment[-1].square() / count).sum())
        return 1.0 - float(residual) / max(total, 1e-12)
