"""A digest that tells two models apart: architecture essentials and weights, whatever folder they came from."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL_HASH_BYTES = 2 * 2**30  # larger models hash a strided sample of each tensor
SAMPLED_VALUES = 65536
# where a model was stored or how it runs does not change what it computes
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def model_fingerprint(model: PreTrainedModel, vocab_size: int) -> str:
    """Hex digest over config, ``vocab_size``, and name, shape, dtype and bytes of every parameter.

    Models above 2 GiB: name, shape, dtype and an evenly strided sample of 65,536 values per parameter.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    digest.update(json.dumps([config, vocab_size], sort_keys=True, default=str).encode())
    parameters = list(model.named_parameters())
    total = sum(p.numel() * p.element_size() for _, p in parameters)
    for name, parameter in sorted(parameters, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(_raw_bytes(parameter.detach(), sampled=total > FULL_HASH_BYTES))
    return digest.hexdigest()


def _raw_bytes(tensor: Tensor, *, sampled: bool) -> memoryview:
    flat = tensor.reshape(-1)
    if sampled:
        flat = flat[:: max(1, flat.numel() // SAMPLED_VALUES)]
    return flat.cpu().contiguous().view(torch.uint8).numpy().data
