"""Embedding and head of a drafter that has its own: those of a whole masked-diffusion language model.

The interface of ``models.borrowed``; here gradients flow where the weights are trained. Committed ids that the drafter
does not know are shown as a token that it does; head rows of ids that cannot be drafted are never used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from specdiff2.models.borrowed import BorrowedEmbeddings


class OwnEmbeddings(BorrowedEmbeddings):
    """See ``BorrowedEmbeddings``.

    Args:
        model: the drafter's language model.
        ids: rows of the head to use, in this order.
        shown: by committed id, the id that is looked up for it.
    """

    def __init__(self, model: PreTrainedModel, ids: Int[Tensor, " draft_vocab"], shown: Sequence[int]) -> None:
        super().__init__(model, ids)
        self._shown = torch.tensor(shown)
        self._is_prefix = bool((self._ids == torch.arange(len(self._ids))).all())

    def embed(self, ids: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape hidden"]:
        if self._shown.device != ids.device:
            self._shown = self._shown.to(ids.device)
        return self._embedding(self._shown[ids]).to(dtype)

    def rows(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Head rows (and bias): a view where the ids are the first ones, as 7B heads are too large to copy."""
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        if self._is_prefix:
            count = len(self._ids)
            return weight[:count].to(device, dtype), None if bias is None else bias[:count].to(device, dtype)
        if not weight.requires_grad:
            return super().rows(dtype, device)
        ids = self._ids.to(weight.device)
        return weight[ids].to(device, dtype), None if bias is None else bias[ids].to(device, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnEmbeddings:
        """A copied drafter reads the copied model."""
        copied = copy.copy(self)
        copied.__dict__ = {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()}
        return copied
