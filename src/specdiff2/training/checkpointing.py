"""What a training checkpoint holds of the model, and the checks when it is read.

It holds the trainable tensors and a signature of the drafter, nothing of the verifier: the drafter shares the
verifier's frozen embedding and head, which come from the verifier again on resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from specdiff2.types import MismatchError

# of the drafter's config: the same tensors mean something else where one of them differs
CONFIG_KEYS = ("shifted", "attention", "denoising_steps", "layer_indices", "mask_token_id", "verifier_fingerprint",
               "conditioning", "feature_layers", "markov_rank",
               "tokenizer_fingerprint", "base_fingerprint", "drafter_tokenizer_fingerprint", "lora")  # fmt: skip


def trainable_names(module: nn.Module) -> set[str]:
    """Names of the parameters that are trained."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


class TrainableOnlyState(nn.Module):
    """A module whose state_dict holds its trainable tensors only, and which loads exactly those."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_keep_trainable)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Frozen tensors and buffers keep the values they have.

        Raises:
            MismatchError: a trainable tensor is missing or an unknown one is there, whatever ``strict`` says: a
                renamed tensor must never leave random weights behind.
        """
        expected, got = trainable_names(self), set(state_dict)
        if got != expected:
            raise MismatchError(
                f"checkpoint: missing tensors {sorted(expected - got)[:3]}, unknown tensors "
                f"{sorted(got - expected)[:3]}: expected exactly the {len(expected)} trainable tensors of this "
                "drafter; use the settings it was trained with"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _keep_trainable(module: nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    keep = {prefix + name for name in trainable_names(module)}
    for key in [key for key in state if key.startswith(prefix) and key not in keep]:
        del state[key]


def signature_of(drafter: Any) -> dict[str, Any]:
    """Settings that change what the trained tensors mean."""
    ids = drafter.draft_vocab_ids.detach().cpu().tolist()
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
    config = getattr(drafter, "config", None)
    details = {key: getattr(config, key) for key in CONFIG_KEYS if hasattr(config, key)}
    return {"gamma": int(drafter.gamma), "draft_vocab_size": len(ids), "draft_vocab_sha256": digest} | details


def describe_drafter(drafter: Any) -> dict[str, Any] | None:
    """What the drafter is, as its own format has it; with the trained tensors that is all of it. None without one."""
    config = getattr(drafter, "config", None)
    return {"kind": type(config).__name__, "config": config.to_dict()} if hasattr(config, "to_dict") else None


def verify_signature(drafter: Any, recorded: dict[str, Any]) -> None:
    """Compare the drafter with what a checkpoint recorded.

    Raises:
        MismatchError: a setting differs, or the checkpoint records none.
    """
    for key, value in signature_of(drafter).items():
        if key in CONFIG_KEYS and key not in recorded:
            continue  # a checkpoint from before they were recorded
        if recorded.get(key) != value:
            raise MismatchError(
                f"checkpoint: {key}={recorded.get(key)!r}, but this drafter has {key}={value!r}: resume with the "
                "settings of the checkpoint, or start a new run"
            )
