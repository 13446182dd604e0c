"""Logits -> the law tokens are really drawn from: temperature, then top-k, then top-p.

Used by the verifier, the drafter and every rule alike, so that the law in an acceptance ratio is the law
the tokens came from. Knows no model and draws nothing (see ``rng``).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.types import SamplingParams, SpecDiffError

_NUCLEUS_GUESSES = (256, 4096)  # a nucleus rarely has more tokens; sorting a 50k vocabulary costs 10x this selection


def logits_to_probs(
    logits: Float[Tensor, "... vocab"], sampling: SamplingParams, *, out: Float[Tensor, "... vocab"] | None = None
) -> Float[Tensor, "... vocab"]:
    """``softmax(logits / temperature)``, cut to the top-k, then to the top-p nucleus, then renormalised.

    Temperature 0 gives one-hot on the argmax (the first one on ties). Ties at the border of top-k and top-p
    go to the lowest ids, so exactly k tokens stay and every batch shape gives the same set.

    Args:
        logits: any float dtype; ``-inf`` marks an impossible token. float64 stays float64, all else is float32.
        out: memory for the result, of its shape and dtype. Fresh memory for a tree over 50k tokens can cost more
            than the arithmetic, so decoding uses the same memory every round.

    Raises:
        SpecDiffError: a row holds NaN or +inf, or nothing but -inf.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(peak).all()):
        raise refuse_logits(peak[~torch.isfinite(peak)][0].item())
    if out is None:
        out = torch.empty_like(logits, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if sampling.temperature == 0.0:
        # max, not argmax: on a CPU it is four times faster for bfloat16
        return out.zero_().scatter_(-1, logits.max(dim=-1, keepdim=True).indices, 1.0)
    # the peak goes first: dividing by a tiny temperature can overflow and inf - inf would be NaN
    probs = out.copy_(logits).sub_(peak).div_(sampling.temperature).exp_()
    probs.div_(probs.sum(dim=-1, keepdim=True))
    if 0 < sampling.top_k < probs.shape[-1]:
        _renormalise(probs, _top_k_mask(probs, logits, sampling.top_k))
    if sampling.top_p < 1.0:
        _renormalise(probs, _top_p_mask(probs, sampling.top_p))
    return probs


def refuse_logits(peak: float) -> SpecDiffError:
    """The error for a row of logits whose largest value is not finite."""
    return SpecDiffError(
        f"logits: the largest value of a row is {peak}, expected a finite number; "
        "check the model's weights and dtype (float32 instead of float16), and that not every token is masked"
    )


def _top_k_mask(
    probs: Float[Tensor, "... vocab"], logits: Float[Tensor, "... vocab"], top_k: int
) -> Bool[Tensor, "... vocab"]:
    """Ranked by logits: at low temperatures many probabilities underflow to the same 0."""
    border = logits.topk(top_k, dim=-1).values[..., -1:]
    return _largest(logits, border, torch.full_like(border, top_k, dtype=torch.long)) & (probs > 0)


def _top_p_mask(probs: Float[Tensor, "... vocab"], top_p: float) -> Bool[Tensor, "... vocab"]:
    """The smallest set of most probable tokens with mass >= top_p; never empty."""
    vocab = probs.shape[-1]
    for num_candidates in [*(guess for guess in _NUCLEUS_GUESSES if guess < vocab), vocab]:
        ranked = probs.topk(num_candidates, dim=-1).values
        mass = ranked.double().cumsum(-1)
        if num_candidates == vocab or bool((mass[..., -1] >= top_p).all()):
            break
    # a token belongs to the nucleus when the mass before it has not reached top_p yet
    count = 1 + (mass[..., :-1] < top_p).sum(-1, keepdim=True)
    return _largest(probs, ranked.gather(-1, count - 1), count)


def _largest(
    values: Float[Tensor, "... vocab"], border: Float[Tensor, "... 1"], count: Tensor
) -> Bool[Tensor, "... vocab"]:
    """Exactly ``count`` largest values per row, ``border`` being the count-th; ties go to the lowest ids."""
    above, level = values > border, values == border
    room = count - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) > room).any()):
        level &= level.cumsum(-1) <= room
    return above | level


def _renormalise(probs: Float[Tensor, "... vocab"], keep: Bool[Tensor, "... vocab"]) -> None:
    probs.masked_fill_(~keep, 0.0)
    probs.div_(probs.sum(dim=-1, keepdim=True))
