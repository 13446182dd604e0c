"""A digest that tells two models apart: architecture essentials and weights, whatever folder they came from."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

FULL_HASH_VALUES = 10**9  # larger models hash a strided sample of each tensor
SAMPLED_VALUES = 65536
# where a model was stored or how it runs does not change what it computes
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def model_fingerprint(model: PreTrainedModel, vocab_size: int) -> str:
    """Hex digest over config, ``vocab_size``, and name, shape and bfloat16 value of every parameter.

    Rounded to bfloat16, so that one checkpoint run in bfloat16 here and in float32 there is one verifier: a drafter
    and rollouts made with either fit both. Models above a billion parameters: an evenly strided sample of about
    65,536 values per parameter.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    digest.update(json.dumps([config, vocab_size], sort_keys=True, default=str).encode())
    parameters = list(model.named_parameters())
    total = sum(p.numel() for _, p in parameters)
    for name, parameter in sorted(parameters, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(_value_bytes(parameter.detach(), sampled=total > FULL_HASH_VALUES))
    return digest.hexdigest()


def _value_bytes(tensor: Tensor, *, sampled: bool) -> memoryview:
    flat = tensor.reshape(-1)
    if sampled:
        flat = flat[:: max(1, flat.numel() // SAMPLED_VALUES)]
    return flat.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().data
