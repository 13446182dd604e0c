"""The verifier's laws along windows of its own rollouts: what distillation compares with.

One row at a time, only the positions that windows need, and their full-vocabulary probabilities in chunks: the logits
of a whole batch would not fit in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.functional.sampling import logits_to_probs
from specdiff2.types import SamplingParams, WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

PROBS_CHUNK = 128  # positions whose full-vocabulary float32 probabilities exist at once


@torch.no_grad()
def window_probs(
    verifier: HFVerifier, batch: WindowBatch, draft_vocab_ids: Int[Tensor, " draft_vocab"], sampling: SamplingParams
) -> Float[Tensor, "window gamma draft_vocab"]:
    """Entry [w, j]: law of the token at position ``anchor + 1 + j``; positions past the end of the row are 0.

    float32, on the batch's device. Restricted to ``draft_vocab_ids`` and NOT renormalised: the missing mass is what no
    draft can match. (no_grad, not inference_mode: losses save these probabilities for their backward pass.)
    """
    gamma, device = batch.targets.shape[1], verifier.device
    ids = draft_vocab_ids.to(device)
    probs = torch.zeros((batch.num_windows, gamma, ids.numel()), device=device)
    for row, length in enumerate(batch.lengths.tolist()):
        windows = (batch.window_row == row).nonzero()[:, 0].to(device)
        # the token at t + 1 is predicted by row t
        predictor = batch.anchor.to(device)[windows, None] + torch.arange(gamma, device=device)
        inside = predictor + 1 < length
        if not bool(inside.any()):
            continue
        needed, slot = predictor[inside].unique(return_inverse=True)  # windows overlap: each position once
        tokens = batch.input_ids[row : row + 1, :length].to(device)
        logits, _ = verifier.forward(tokens, cache=None, logits_to_keep=needed)
        law = [logits_to_probs(part, sampling)[:, ids].float() for part in logits[0].split(PROBS_CHUNK)]
        window, offset = inside.nonzero(as_tuple=True)
        probs[windows[window], offset] = torch.cat(law)[slot]
    return probs.to(batch.input_ids.device)
