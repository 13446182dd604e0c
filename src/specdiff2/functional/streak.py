"""Expected streaks: how many leading draft tokens the verifier accepts.

For one window with acceptance probabilities ``a_1 .. a_gamma`` (each given that all earlier positions were
accepted), the survival of position j is ``S_j = prod_{k<=j} a_k`` and the expected streak is ``sum_j S_j``.
Products are taken **per window and then averaged**: a product of per-position means is a different, wrong
number. Training and validation both use this file. It knows no model, no loss scale and no logging.

Source: SpecDiff-2 (arXiv 2511.00606), Definition 5.1 and identity 5b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

# log of a probability that stands for zero: exp() of it is exactly 0 in float32 and float64, while sums of
# 64 of them stay finite, so that no 0 * inf can appear in a gradient
LOG_ZERO = -1.0e4


def token_log_probs(
    logits: Float[Tensor, "window gamma draft_vocab"], targets: Int[Tensor, "window gamma"]
) -> Float[Tensor, "window gamma"]:
    """``log softmax(logits)[target]`` in float32 (float64 stays float64).

    A target of -1 cannot be drafted (q = 0): it gets ``LOG_ZERO`` and no gradient. So does a token whose
    probability underflows to ``LOG_ZERO``.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    # cross_entropy fuses the softmax with the gather; ignored targets come out as a constant 0
    losses = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    log_probs = -losses.view(targets.shape)
    return log_probs.masked_fill(targets < 0, LOG_ZERO).clamp(min=LOG_ZERO)


def log_inner_product(
    logits: Float[Tensor, "window gamma draft_vocab"], verifier_probs: Float[Tensor, "window gamma draft_vocab"]
) -> Float[Tensor, "window gamma"]:
    """``log sum_v q_v p_v``, ``q = softmax(logits)``: how likely a draft equals the verifier's own draw.

    In float32 or wider, at least about ``LOG_ZERO``, gradient finite. ``p`` need not sum to 1: mass outside the
    draft vocabulary can never be accepted.
    """
    log_draft, log_verifier = _log_laws(logits, verifier_probs)
    return torch.logsumexp(log_draft + log_verifier, dim=-1)


def log_overlap(
    logits: Float[Tensor, "window gamma draft_vocab"], verifier_probs: Float[Tensor, "window gamma draft_vocab"]
) -> Float[Tensor, "window gamma"]:
    """``log sum_v min(q_v, p_v)``, ``q = softmax(logits)``: how likely a token drawn from q is accepted by the ratio
    rules, one minus the total variation between the two laws.

    Computed in log space, where a draft that underflows next to the verifier's tokens still has a useful gradient.
    Ranges and missing mass as ``log_inner_product``.

    Source: Leviathan et al. (arXiv 2211.17192), Definition 3.2 and Theorem 3.5.
    """
    log_draft, log_verifier = _log_laws(logits, verifier_probs)
    return torch.logsumexp(torch.minimum(log_draft, log_verifier), dim=-1)


def _log_laws(logits: Tensor, verifier_probs: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.log_softmax(wide, dim=-1), verifier_probs.to(wide.dtype).log().clamp(min=LOG_ZERO)


def leading_valid(valid: Bool[Tensor, "window gamma"]) -> Bool[Tensor, "window gamma"]:
    """True up to, and not including, the first invalid position of each window."""
    return valid.cumprod(-1).bool()


def survival(
    log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Float[Tensor, "window gamma"]:
    """``S_j = prod_{k<=j} q_k`` per window; 0 from the first invalid position on.

    Computed as ``exp(cumsum(log q))`` in float32 or wider, so that gamma = 64 factors of 1e-6 give 0 with
    a finite gradient instead of an underflowed product with a 0/0 one.
    """
    wide = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    alive = leading_valid(valid)
    return wide.masked_fill(~alive, 0.0).cumsum(-1).exp() * alive


def expected_streak(
    log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Float[Tensor, " window"]:
    """``sum_j prod_{k<=j} q_k`` over the valid prefix of each window, in [0, gamma]. Differentiable."""
    return survival(log_probs, valid).sum(-1)


def reach(
    log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Float[Tensor, "window gamma"]:
    """``R_i = prod_{k<i} q_k``: how likely decoding gets as far as position i; 1 for the first. Differentiable."""
    survived = survival(log_probs, valid)
    return torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=-1)


def credit_weights(
    log_probs: Float[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Float[Tensor, "window gamma"]:
    """``w_i = sum_{j>=i} prod_{k<=j} q_k``: the derivative of the expected streak by ``log q_i``. Detached."""
    return survival(log_probs.detach(), valid).flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True, slots=True)
class AcceptanceCurves:
    """Both per-position curves, never mixed. An entry is None when nothing reached that position.

    Attributes:
        accept_rate: P(position j accepted | 1..j-1 accepted); denominator = rounds that reached j.
        survival: P(positions 1..j all accepted); denominator = windows that have a position j.
        mean_streak: mean number of leading accepted positions, the verifier's bonus token not counted.
        num_windows: windows with at least one position.
    """

    accept_rate: list[float | None]
    survival: list[float | None]
    mean_streak: float | None
    num_windows: int


def acceptance_sums(
    accept: Float[Tensor, "window gamma"] | Bool[Tensor, "window gamma"], valid: Bool[Tensor, "window gamma"]
) -> Float[Tensor, "3 gamma"]:
    """Additive sufficient statistics of the curves, so that batches and ranks add up exactly.

    Args:
        accept: per position, the probability of acceptance given that it was reached, or whether it was.

    Returns:
        float64 rows: windows that have position j; expected windows that reach j; that survive j.
    """
    alive = leading_valid(valid)
    survived = (accept.double() * alive).cumprod(-1)
    ones = torch.ones_like(survived[:, :1])
    reached = torch.cat([ones, survived[:, :-1]], dim=-1) * alive
    return torch.stack([alive.double().sum(0), reached.sum(0), survived.sum(0)])


def curves_from_sums(sums: Float[Tensor, "3 gamma"]) -> AcceptanceCurves:
    """Curves from added-up ``acceptance_sums``."""
    present, reached, survived = sums.tolist()
    num_windows = round(present[0]) if present else 0
    return AcceptanceCurves(
        accept_rate=[_ratio(top, bottom) for top, bottom in zip(survived, reached, strict=True)],
        survival=[_ratio(top, bottom) for top, bottom in zip(survived, present, strict=True)],
        mean_streak=_ratio(sum(survived), num_windows),
        num_windows=num_windows,
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
