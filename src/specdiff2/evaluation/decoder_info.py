"""What a decoder is, as plain JSON values: part of the fingerprint of its records.

Reads public attributes only, so that test decoders and decoders from elsewhere can be described too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from specdiff2.protocols import Decoder

_LAW_KEYS = ("temperature", "top_k", "top_p")
_MACHINE_KEYS = ("dtype", "device", "runtime_mode")  # of a verifier
_DIGEST_VALUES = 4096  # per tensor: a trained step changes nearly every value


def describe_decoder(decoder: Decoder) -> dict[str, Any]:
    """Settings of a decoder as plain JSON values, read from the attributes that the decoders of this package
    share; a decoder with its own ``describe()`` adds to them, and one with neither is known by its name."""
    described: dict[str, Any] = {}
    sampling = getattr(decoder, "sampling", None)
    drafting = getattr(decoder, "drafting", None)
    members = getattr(getattr(drafting, "drafter", None), "members", ())
    sources = (
        (sampling, _LAW_KEYS, ""),
        (drafting, ("gamma", "num_drafts"), ""),
        (None if members else getattr(drafting, "sampling", None), _LAW_KEYS, "draft_"),
        (decoder, ("gamma", "num_drafts"), ""),
    )
    for source, keys, prefix in sources:
        for key in keys:
            value = getattr(source, key, None)
            if isinstance(value, (int, float)):
                described.setdefault(prefix + key, value)
    for key in ("rule", "selector"):
        if isinstance(getattr(getattr(drafting, key, None), "name", None), str):
            described[key] = getattr(drafting, key).name
    for key, model in (
        ("verifier", getattr(decoder, "verifier", None)),
        ("drafter", getattr(drafting, "drafter", None)),
    ):
        digest = model_digest(model)
        if digest is not None:
            described[key] = digest
    if members:  # several drafters: by name, in the order that RoundRecord.winners counts them
        described["drafters"] = {member.name: _describe_member(member) for member in members}
    for key in _MACHINE_KEYS:  # the same weights round, and run, differently
        value = getattr(getattr(decoder, "verifier", None), key, None)
        if value is not None:  # without the number of a GPU: which one it is changes nothing
            described[f"verifier_{key}"] = str(value).removeprefix("torch.").partition(":")[0]
    own = getattr(decoder, "describe", None)
    return {**described, **(own() if own is not None else {})}


def portable(described: Mapping[str, Any]) -> dict[str, Any]:
    """``describe_decoder`` without what depends on the machine: the same for all processes of one evaluation."""
    return {key: value for key, value in described.items() if key not in {f"verifier_{one}" for one in _MACHINE_KEYS}}


def _describe_member(member: Any) -> dict[str, Any]:
    """One of several drafters (``decoding.ensemble.Member``)."""
    law = {f"draft_{key}": getattr(member.sampling, key) for key in _LAW_KEYS}
    return {"num_drafts": member.num_drafts, **law, "drafter": model_digest(member.drafter)}


def model_digest(model: Any) -> str | None:
    """A model's own ``fingerprint``, else a digest of evenly spaced values of every tensor; None without either."""
    own = getattr(model, "fingerprint", None)
    if isinstance(own, str):
        return own
    if not isinstance(model, torch.nn.Module):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _DIGEST_VALUES)].double().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]
