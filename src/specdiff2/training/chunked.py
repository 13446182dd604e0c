"""Head and loss in chunks of windows, so that memory does not grow with windows x gamma x vocabulary.

A head over 49,152 tokens makes 12 MB of float32 logits per window of eight positions, and a softmax, its gradient and
verifier probabilities as much again each. Here each chunk's logits live only while its loss and the gradient of that
loss are computed, both in the forward pass; what is kept until backward is that gradient with respect to the drafter's
states (``hidden`` numbers per position instead of ``draft_vocab``) and to the head's parameters. Against recomputing
the logits in backward this saves one of three multiplications with the head. Sums over windows make it exact: the
gradient of a sum of chunks is the sum of their gradients, and the outer factor is one number.

Losses are linear in that outer factor, so a float16 loss scaler, which multiplies later, cannot protect the chunks'
own gradients from underflow; bfloat16 and float32 need none. Knows no Lightning and no particular drafter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.protocols import Objective, StatesDrafter
from specdiff2.types import ObjectiveOutput, WindowBatch

ChunkLoss = Callable[[Tensor, slice], Tensor]  # (states of the chunk, which rows they are) -> loss sum
VerifierProbs = Callable[[WindowBatch], Tensor]


def chunked_objective(
    drafter: StatesDrafter,
    batch: WindowBatch,
    states: Float[Tensor, "window gamma hidden"],
    objective: Objective,
    verifier_probs: VerifierProbs | None,
    chunk_windows: int,
) -> ObjectiveOutput:
    """``objective`` on all windows, ``chunk_windows`` at a time; the result is that of one call, up to rounding.

    ``verifier_probs`` is called with the windows of one chunk; chunks then end between two rollouts where they can,
    as the verifier reads a whole rollout for each chunk that has a window in it.
    """
    previous, outputs = previous_tokens(batch), []

    def loss_of(chunk_states: Tensor, chunk: slice) -> Tensor:
        part = select_windows(batch, chunk)
        logits = drafter.states_logits(chunk_states, previous[chunk])
        probs = None if verifier_probs is None else verifier_probs(part)
        output = objective(logits, drafter.to_draft_vocab(part.targets), part.valid & ~part.revealed, probs)
        outputs.append(dataclasses.replace(output, loss_sum=output.loss_sum.detach()))
        return output.loss_sum

    chunks = even_chunks(len(states), chunk_windows)
    if verifier_probs is not None:
        chunks = row_chunks(batch.window_row.tolist(), chunk_windows)
    loss_sum = chunked_sum(loss_of, states, chunks, trainable(drafter))
    return ObjectiveOutput(
        loss_sum=loss_sum,
        num_windows=torch.stack([output.num_windows for output in outputs]).sum(),
        streak=torch.cat([output.streak for output in outputs]),
        parts={name: torch.stack([output.parts[name] for output in outputs]).sum() for name in outputs[0].parts},
    )


def chunked_cross_entropy(
    drafter: StatesDrafter, states: Float[Tensor, "token hidden"], targets: Int[Tensor, " token"], chunk_tokens: int
) -> Float[Tensor, ""]:
    """Sum of the next-token cross-entropies; ``targets`` are verifier ids, undraftable ones add nothing."""
    wanted = drafter.to_draft_vocab(targets)

    def loss_of(chunk_states: Tensor, chunk: slice) -> Tensor:
        return cross_entropy_sum(drafter.token_logits(chunk_states), wanted[chunk])

    return chunked_sum(loss_of, states, even_chunks(len(states), chunk_tokens), trainable(drafter))


def cross_entropy_sum(logits: Float[Tensor, "token draft_vocab"], targets: Int[Tensor, " token"]) -> Float[Tensor, ""]:
    """Sum over tokens, as losses are sums over windows: exact under accumulation and over ranks. -1 is left out."""
    return functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


def trainable(drafter: StatesDrafter) -> list[nn.Parameter]:
    """Parameters that may get a gradient; the head uses some of them."""
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def select_windows(batch: WindowBatch, chunk: slice) -> WindowBatch:
    """The batch with some of its windows; rollouts stay whole."""
    names = ("window_row", "anchor", "targets", "valid", "revealed")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[chunk] for name in names})


def even_chunks(total: int, size: int) -> list[slice]:
    """``0 .. total`` in pieces of ``size``; one empty piece for nothing."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)] or [slice(0, 0)]


def row_chunks(rows: Sequence[int], size: int) -> list[slice]:
    """Pieces of at most ``size`` neighbours that end where the row changes, unless one row alone is longer."""
    chunks, start = [], 0
    while start < len(rows):
        end = min(start + size, len(rows))
        border = end
        while start < border < len(rows) and rows[border] == rows[border - 1]:
            border -= 1
        end = border if border > start else end
        chunks.append(slice(start, end))
        start = end
    return chunks or [slice(0, 0)]


def chunked_sum(
    loss_of: ChunkLoss, states: Tensor, chunks: Sequence[slice], parameters: Sequence[nn.Parameter]
) -> Float[Tensor, ""]:
    """``sum of loss_of(states[chunk], chunk)`` with gradients for ``states`` and ``parameters``, once differentiable.

    Every tensor with a gradient that ``loss_of`` reads must be ``states`` or one of ``parameters``.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, *parameters)):
        total: Tensor = _StoredGradient.apply(loss_of, chunks, states, *parameters)
        return total
    return torch.stack([loss_of(states[chunk], chunk) for chunk in chunks]).sum()


class _StoredGradient(torch.autograd.Function):
    """Computes the gradients of the chunks in forward; backward multiplies them by the outer gradient."""

    @staticmethod
    def forward(ctx: Any, loss_of: ChunkLoss, chunks: Sequence[slice], states: Tensor, *parameters: Tensor) -> Tensor:
        state_gradient = torch.zeros_like(states)
        sums: dict[int, Tensor] = {}
        losses = []
        for chunk in chunks:
            # a leaf of its own: the graph of a chunk ends here and is freed with it
            part = states[chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, chunk)
            losses.append(loss.detach())
            if not loss.requires_grad:
                continue
            of_part, *of_parameters = torch.autograd.grad(loss, (part, *parameters), allow_unused=True)
            if of_part is not None:
                state_gradient[chunk] = of_part
            for index, gradient in enumerate(of_parameters):
                if gradient is not None:
                    sums[index] = sums[index] + gradient if index in sums else gradient
        ctx.used, ctx.num_parameters = list(sums), len(parameters)
        ctx.save_for_backward(state_gradient, *sums.values())
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        state_gradient, *gradients = ctx.saved_tensors
        of_parameters: list[Tensor | None] = [None] * ctx.num_parameters
        for index, gradient in zip(ctx.used, gradients, strict=True):
            of_parameters[index] = gradient * outer.to(gradient.dtype)
        return None, None, state_gradient * outer.to(state_gradient.dtype), *of_parameters
