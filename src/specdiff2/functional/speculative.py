"""The arithmetic of speculative sampling: acceptance probabilities, residual laws, expected streaks.

Pure functions of probabilities; no randomness and no decisions (``decoding.rules`` makes those). All of it
is float64 on the CPU: a row of 50k probabilities costs tens of microseconds, and ``p - q`` of two nearly
equal float32 numbers would be mostly rounding.

Notation in formulas: p = verifier_probs, q = draft_probs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.protocols import NodeProbs
from specdiff2.tree import TokenTree


def law(probs: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """A row as a float64 law on the CPU that sums to 1: what ``RandomSource`` really draws from."""
    row = probs.detach().to(device="cpu", dtype=torch.float64)
    return row / row.sum()


def accept_prob(verifier_prob: float, draft_prob: float) -> float:
    """``min(1, p/q)``; 0 where p = 0 (also for q = 0), 1 where only q = 0. Never NaN."""
    if verifier_prob <= 0.0:
        return 0.0
    return 1.0 if verifier_prob >= draft_prob else verifier_prob / draft_prob


def residual(
    target: Float[Tensor, " vocab"], draft: Float[Tensor, " vocab"], scale: float = 1.0
) -> Float[Tensor, " vocab"]:
    """The law of a token after a rejection: ``(scale * p - q)+`` normalised.

    Its support lies inside that of p. Where the difference has no mass (p = q, then a draft drawn from q is
    never rejected) the answer is p itself, so rounding can never lead to 0/0.
    """
    excess = (target * scale).sub_(draft).clamp_min_(0.0)
    total = float(excess.sum())
    return excess.div_(total) if total > 0.0 else target


def block_survival(verifier_probs: list[float], draft_probs: list[float]) -> list[float]:
    """Running weights of block verification, ``w_0 = 1``, ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))``.

    Args:
        verifier_probs, draft_probs: p and q of each drafted token given those before it.

    Source: Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444, Algorithm 2.
    """
    weights = [1.0]
    for verifier_prob, draft_prob in zip(verifier_probs, draft_probs, strict=True):
        weights.append(accept_prob(weights[-1] * verifier_prob, draft_prob))
    return weights


def block_accept_prob(weight: float, target: Float[Tensor, " vocab"], draft: Float[Tensor, " vocab"]) -> float:
    """Probability that block verification ends at this prefix, unless a longer one was accepted.

    ``h_i = S / (S + 1 - w_i)`` with ``S = sum_v (w_i p(v) - q(v))+``, p and q being the laws of the NEXT
    position; the last position of the block uses ``h = w`` instead. S = 0 with w = 1 means p = q: 1, since
    nothing is left to correct. Source: as ``block_survival``.
    """
    excess = float((target * weight).sub_(draft).clamp_min_(0.0).sum())
    rest = max(0.0, 1.0 - weight)
    return 1.0 if excess + rest == 0.0 else excess / (excess + rest)


def path_probs(tree: TokenTree, verifier_probs: NodeProbs) -> list[float]:
    """For each node, ``prod_k p(x_k | path)`` from the root down to it; 1 for the root."""
    if tree.num_nodes == 1:
        return [1.0]
    parents = torch.tensor(tree.parents[1:], device=verifier_probs.device)
    tokens = torch.tensor(tree.tokens[1:], device=verifier_probs.device)
    steps = verifier_probs[parents, tokens].double().tolist()  # one gather, one copy to the host
    probs = [1.0]
    for parent, step in zip(tree.parents[1:], steps, strict=True):
        probs.append(probs[parent] * step)
    return probs


def chain_streaks(tree: TokenTree, verifier_probs: NodeProbs) -> list[float]:
    """Expected streak of each chain under greedy acceptance, ``sum_j prod_{k<=j} p(x_k | path)``."""
    probs = path_probs(tree, verifier_probs)
    return [sum(probs[node] for node in chain) for chain in tree.chain_nodes]


def tree_streak(tree: TokenTree, verifier_probs: NodeProbs) -> float:
    """Expected streak of the whole tree under tree match: the sum of ``path_probs`` without the root."""
    return sum(path_probs(tree, verifier_probs)[1:])
