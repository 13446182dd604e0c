"""Weights of linear layers packed once for oneDNN: faster small-batch inference on CPUs in bfloat16.

``F.linear`` re-packs a bfloat16 weight at every call. For the few rows of a decoding step or a token tree that costs
more than the product itself: 2x fewer microseconds at 1-9 rows, 1.3x at 32-65 (SmolLM2 shapes, AVX-512-BF16). The
price is a second copy of the weights.

Private operators of torch (the ones inductor's freezing emits), so their absence only means no packing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_PACKED_BYTES = 4 * 2**30  # a second copy of a larger model is not worth its memory


class PackedLinear(nn.Linear):
    """A Linear (by ``__class__`` assignment) that uses its packed weight where that is valid.

    Valid: gradients are off (the packed product has no backward) and ``weight`` is the very tensor that was packed,
    unchanged. Copies and moved or retrained modules therefore compute with their own weights.
    """

    _packed: Tensor | None = None
    _packed_from: tuple[int, int] = (0, 0)

    def pack(self) -> None:
        weight = self.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._packed_from = (weight.data_ptr(), self.weight._version)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)  # inductor packs frozen weights by itself
        usable = (
            self._packed is not None
            and not torch.is_grad_enabled()
            and self._packed_from == (self.weight.data_ptr(), self.weight._version)
        )
        if not usable:
            return F.linear(input.contiguous(), self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input.contiguous(), self._packed, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, object]:
        # packed tensors can be neither pickled nor copied; a copy starts unpacked
        return {key: value for key, value in self.__dict__.items() if key not in ("_packed", "_packed_from")}


def pack_linears(model: nn.Module) -> int:
    """Pack every bfloat16 ``nn.Linear`` on the CPU; the number packed (0 where it cannot help).

    Parameters, state dict and module names stay as they are.
    """
    # quantised and split weights are tensors of other classes
    linears = [m for m in model.modules() if type(m) is nn.Linear and _packable(m.weight)]
    if sum(m.weight.numel() * m.weight.element_size() for m in linears) > MAX_PACKED_BYTES or not _available():
        return 0
    for linear in linears:
        linear.__class__ = PackedLinear
        assert isinstance(linear, PackedLinear)
        linear.pack()
    return len(linears)


def _packable(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _available() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
