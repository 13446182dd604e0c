"""The verifier's embedding and head, lent to a drafter.

A plain object, not a module: held by a drafter it adds nothing to its parameters, state_dict, optimizer or
checkpoints. Weights are read through the verifier's own modules at each use, so they follow it to another device.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff2.models.placement import check_copyable


class BorrowedEmbeddings:
    """Frozen embedding and head of ``model``; the head cut to the ids that can be drafted.

    Args:
        model: the verifier's model.
        ids: rows of the head to use, in this order.

    Raises:
        ConfigError: the model is spread over devices, split over processes or quantised.
    """

    def __init__(self, model: PreTrainedModel, ids: Int[Tensor, " draft_vocab"]) -> None:
        check_copyable(model, "a drafter that borrows the verifier's embedding and head")
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        self._ids = ids.cpu()
        self._cut: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor | None]] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the embedding, padded ones included."""
        return int(self._embedding.weight.shape[0])

    @torch.no_grad()
    def embed(self, ids: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape hidden"]:
        return self._embedding(ids).to(dtype)

    @torch.no_grad()
    def mean_row(self, vocab_size: int) -> Float[Tensor, " hidden"]:
        """Mean of the real tokens' embeddings, stretched to the typical length of one (means of many are short)."""
        rows = self._embedding.weight[:vocab_size].float()
        mean = rows.mean(0)
        return mean * (rows.norm(dim=-1).mean() / mean.norm().clamp(min=1e-12))

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape draft_vocab"]:
        """Scores of the draftable ids, float32 (float64 for float64 states)."""
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        weight, bias = self.rows(dtype, hidden.device)
        logits = nn.functional.linear(hidden.to(dtype), weight, bias)
        return logits if logits.dtype == torch.float64 else logits.float()

    def rows(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Head rows (and bias), gathered and cast once: every step would otherwise copy them again."""
        found = self._cut.get((dtype, device))
        if found is None:
            # never as inference tensors: the rows made while decoding are saved for the backward of training
            with torch.inference_mode(False), torch.no_grad():
                ids = self._ids.to(self._head.weight.device)
                bias = getattr(self._head, "bias", None)
                weight = self._head.weight.index_select(0, ids).to(device=device, dtype=dtype)
                bias = None if bias is None else bias.index_select(0, ids).to(device=device, dtype=dtype)
            found = self._cut[dtype, device] = (weight, bias)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> BorrowedEmbeddings:
        """A copied drafter still borrows from the same verifier."""
        return self
