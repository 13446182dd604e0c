"""A digest that tells two models apart: architecture essentials and weights, whatever folder they came from."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel

SERVED = "served:"  # begins what stands for a model that only a server holds: nobody here has seen its weights
FULL_HASH_VALUES = 10**9  # larger models hash a strided sample of each tensor
SAMPLED_VALUES = 65536
# where a model was stored or how it runs does not change what it computes
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def is_served(fingerprint: str) -> bool:
    """Whether this is ``served:NAME``, no digest."""
    return fingerprint.startswith(SERVED)


def model_fingerprint(model: PreTrainedModel, vocab_size: int) -> str:
    """Hex digest over config, ``vocab_size``, and name, shape and bfloat16 value of every parameter.

    Rounded to bfloat16, so that one checkpoint run in bfloat16 here and in float32 there is one verifier: a drafter
    and rollouts made with either fit both. Models above a billion parameters: an evenly strided sample of about
    65,536 values per parameter. Where the weights lie does not matter: one device, several, on disk, or split over
    processes (which must all call this at the same time).

    A quantised model is one of its own: the digest is over its quantisation settings and everything it stores (packed
    integers bit by bit, scales; tensors of torchao as the values they stand for).
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    digest.update(json.dumps([config, vocab_size], sort_keys=True, default=str).encode())
    total = sum(p.numel() for p in model.parameters())
    quantised = getattr(model, "is_quantized", False)
    for name, value in _stored(model) if quantised else _parameters(model):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(_value_bytes(value, sampled=total > FULL_HASH_VALUES))
    return digest.hexdigest()


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, tied ones once."""
    tied = _tied(model)
    for name in sorted(name for name, _ in model.named_parameters() if name not in tied):
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        with _in_memory(module):
            value = getattr(module, leaf).detach()
            yield name, value.full_tensor() if hasattr(value, "full_tensor") else value


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that quantised modules save, by name: their parameters alone may lack the scales."""
    tied = _tied(model)
    for prefix, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        with _in_memory(module):
            values: dict[str, object] = {}
            module._save_to_state_dict(values, f"{prefix}.", keep_vars=False)
            for name in sorted(values.keys() - tied):
                value = values[name]
                if isinstance(value, Tensor):
                    yield name, value if type(value) is Tensor else value.dequantize()


def _tied(model: PreTrainedModel) -> set[str]:
    """Names that repeat another parameter. accelerate may untie them, and they are still one."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def _in_memory(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """The module's own tensors, fetched from where accelerate has put them, if it has."""
    if all(p.device.type != "meta" for p in module.parameters(recurse=False)):
        return contextlib.nullcontext()
    return align_module_device(module)


def _value_bytes(tensor: Tensor, *, sampled: bool) -> memoryview:
    flat = tensor.reshape(-1)
    if sampled:
        flat = flat[:: max(1, flat.numel() // SAMPLED_VALUES)]
    if flat.is_floating_point():
        flat = flat.to(torch.bfloat16)
    return flat.cpu().contiguous().view(torch.uint8).numpy().data
