"""An EAGLE head in plain torch, without cache, tree or transformers: one full forward per drafted path.

Independent of ``specdiff2.models``: it reads the head's tensors by name and the verifier's hidden states from a plain
transformers forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def true_features(model: Any, tokens: Sequence[int]) -> Tensor:
    """Hidden states after the final norm, one per token."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]


def rotate(x: Tensor, theta: float, first: int) -> Tensor:
    """Rotary positions ``first``, ... on ``[head, token, head_dim]``; angles in float32, as everywhere."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    angle = (first + torch.arange(x.shape[1], dtype=torch.float32))[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def head_outputs(tensors: dict[str, Tensor], config: Any, inputs: Tensor, first: int) -> Tensor:
    """Outputs of the layers for steps ``[step, hidden]`` at the positions ``first``, ..."""
    x = inputs
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    for index in range(config.num_hidden_layers):
        part = {n.split(f"layers.{index}.")[1]: t for n, t in tensors.items() if f"layers.{index}." in n}
        normed = rms(x, part["input_layernorm.weight"], config.rms_norm_eps) if index else x
        q, k, v = (
            F.linear(normed, part[f"self_attn.{n}_proj.weight"], part.get(f"self_attn.{n}_proj.bias"))
            for n in ("q", "k", "v")
        )
        q, k, v = (t.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(0, 1) for t in (q, k, v))
        q, k, v = rotate(q, theta, first), *(t.repeat_interleave(groups, 0) for t in (rotate(k, theta, first), v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), part["self_attn.o_proj.weight"])
        normed = rms(x, part["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = F.silu(normed @ part["mlp.gate_proj.weight"].mT) * (normed @ part["mlp.up_proj.weight"].mT)
        x = x + gated @ part["mlp.down_proj.weight"].mT
    return x


def path_law(drafter: Any, committed: Sequence[int], path: Sequence[int]) -> Tensor:
    """Log-probabilities of the token after ``path``, drafted behind the committed tokens: float32 or float64."""
    model, tensors = drafter.context.verifier.model, dict(drafter.named_parameters())
    embedding, features = model.get_input_embeddings().weight, true_features(model, committed)
    known = [torch.zeros_like(features[0])] if len(committed) == 1 else list(features[:-1])
    tokens = list(committed) if len(committed) == 1 else list(committed[1:])
    for drafted in [None, *path]:
        if drafted is not None:
            known.append(state)  # the prediction of the step before
            tokens.append(drafted)
        inputs = torch.cat([embedding[tokens], torch.stack(known)], dim=-1).to(drafter.dtype)
        inputs = F.linear(inputs, tensors["fc.weight"], tensors.get("fc.bias"))
        with torch.no_grad():
            state = head_outputs(tensors, drafter.stack.config, inputs, min(1, len(committed) - 1))[-1]
    logits = state @ model.lm_head.weight[drafter.draft_vocab_ids].to(state.dtype).mT
    return logits.detach().log_softmax(-1)
