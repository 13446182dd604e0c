"""The token before each drafted position, on the teacher's path: what a head conditioned on its predecessor reads."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from specdiff2.types import WindowBatch


def previous_tokens(batch: WindowBatch) -> Int[Tensor, "window gamma"]:
    """Verifier ids: the anchor's token before position 1, then the teacher's tokens, one position late.

    Behind the end of a rollout, where ``targets`` hold anything, the anchor's token stands in: always an id that an
    embedding has, at positions that no loss reads.
    """
    anchor = batch.input_ids[batch.window_row, batch.anchor][:, None]
    return torch.cat([anchor, torch.where(batch.valid, batch.targets, anchor)[:, :-1]], dim=1)
