"""Where a fresh EAGLE head starts: copies of verifier layers, written in the coordinates of the features.

A head reads and predicts hidden states after the verifier's final norm, f = w h / rms(h), and has no norm in front of
its first layer. A copied layer expects h. So its weights are rewritten for x = w h / r, r the typical size of h: the
layer then computes for x what the verifier's computes for h, up to the norms' dependence on the token. The input
projection is regressed (``fit_fc``) onto the x that belongs to the input of the copied layer, so that the untrained
head drafts what the verifier's last layer makes of that guess.

It knows no training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.models.layer_stack import base_of
from specdiff2.models.projection_fit import Regression
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.eagle_drafter import EagleDrafter
    from specdiff2.models.verifier import HFVerifier

NUM_PROBE_TOKENS = 64  # to see how large hidden states are


@torch.no_grad()
def start_layers(drafter: EagleDrafter, verifier: HFVerifier) -> None:
    """Copy and rewrite the layers; ``fc`` passes the feature on and adds the token's embedding."""
    base, config = base_of(verifier.model), drafter.config
    first = config.layer_indices[0]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(0, verifier.vocab_size, (NUM_PROBE_TOKENS,), generator=generator).tolist()
    hidden, _ = inner_states(verifier, probe)
    size = typical_size(hidden[-1])
    scale = feature_scale(verifier) / size  # x = scale * h
    for position, (layer, index) in enumerate(zip(drafter.stack.layers, config.layer_indices, strict=True)):
        state = {name: tensor.float().cpu() for name, tensor in base.layers[index].state_dict().items()}
        norm = state.pop("input_layernorm.weight")
        if position == 0:  # the norm becomes a constant
            columns = norm / (scale * typical_size(hidden[first]))
            for name in ("q_proj", "k_proj", "v_proj"):
                state[f"self_attn.{name}.weight"] = state[f"self_attn.{name}.weight"] * columns
        else:
            state["input_layernorm.weight"] = norm * size_ratio(hidden[index], scale) / scale
        middle = hidden[index + 1]  # behind the attention; the layer's output is about as large
        state["post_attention_layernorm.weight"] *= size_ratio(middle, scale) / scale
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"{name}.weight"] = scale[:, None] * state[f"{name}.weight"]
            if f"{name}.bias" in state:
                state[f"{name}.bias"] = scale * state[f"{name}.bias"]
        layer.load_state_dict(state)
    width = scale.shape[0]
    drafter.fc.weight.copy_(torch.cat([scale.diag(), torch.eye(width)], dim=1))
    if drafter.fc.bias is not None:
        drafter.fc.bias.zero_()


@torch.no_grad()
def fit_fc(drafter: EagleDrafter, rows: Sequence[tuple[Sequence[int], int]], ridge: float = 1e-3) -> float:
    """Overwrite ``fc``; returns R^2 of the fit on the same rows.

    Args:
        rows: (token ids, index of the first anchor) of rollouts.
        ridge: relative to the mean diagonal of the normal matrix.

    Raises:
        ConfigError: no row holds an anchor behind its first token, or the head was trained elsewhere.
    """
    verifier, indices = drafter.context.verifier, drafter.config.layer_indices
    if not indices:
        raise ConfigError("fit_fc: the head's layers did not start from the verifier's; it needs no fit")
    rows = [(ids, max(first, 1)) for ids, first in rows if len(ids) > max(first, 1)]
    if not rows:
        raise ConfigError("fit_fc: no rollout with enough tokens; sample rollouts first")
    sizes, examples = [], []
    for ids, first in rows:
        hidden, features = inner_states(verifier, list(ids))
        sizes.append(typical_size(hidden[-1][first:]))
        embedding = drafter.embeddings.embed(torch.tensor(list(ids), device=verifier.device), torch.float32).cpu()
        examples.append((torch.cat([embedding[first:], features[first - 1 : -1]], -1), hidden[indices[0]][first:]))
    regression = Regression(2 * features.shape[-1])
    scale = feature_scale(verifier) / (sum(sizes) / len(sizes))
    for inputs, target in examples:
        regression.add(inputs, target * scale)
    weight, bias = regression.solve(ridge)
    drafter.fc.weight.copy_(weight)
    if drafter.fc.bias is not None:
        drafter.fc.bias.copy_(bias)
    return regression.r_squared(ridge)


def inner_states(
    verifier: HFVerifier, ids: list[int]
) -> tuple[list[Float[Tensor, "token hidden"]], Float[Tensor, "token hidden"]]:
    """(hidden states before each layer and before the final norm, those after it); float32 on the CPU."""
    before_norm: list[Tensor] = []
    norm: Any = base_of(verifier.model).norm
    hook = norm.register_forward_pre_hook(lambda _, arguments: before_norm.append(arguments[0]))
    try:
        tokens = torch.tensor([ids], device=verifier.device)
        _, hidden = verifier.forward(tokens, cache=None, logits_to_keep=1, output_hidden_states=True)
    finally:
        hook.remove()
    assert hidden is not None  # just asked for
    *states, features = [state[0].float().cpu() for state in (*hidden[:-1], before_norm[0], hidden[-1])]
    return states, features


def feature_scale(verifier: HFVerifier) -> Float[Tensor, " hidden"]:
    """Weights of the final norm, away from 0, since coordinates are divided by them."""
    weight = base_of(verifier.model).norm.weight.float().cpu()
    least = 1e-2 * weight.abs().mean()
    return torch.where(weight.abs() < least, least * weight.sign().masked_fill(weight == 0, 1.0), weight)


def typical_size(states: Float[Tensor, "token hidden"]) -> float:
    """Median over tokens of the root mean square: single tokens can be a hundred times larger."""
    return float(states.square().mean(-1).sqrt().median().clamp(min=1e-12))


def size_ratio(states: Float[Tensor, "token hidden"], scale: Float[Tensor, " hidden"]) -> float:
    """How much larger states are, typically, in the coordinates of the features."""
    return typical_size(states * scale) / typical_size(states)
