"""What ``auto`` in a configuration means on this machine and for this model. Loads no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdiff2.models.dtypes import pick_dtype
from specdiff2.models.masked_lm_loading import masked_lm_drafter

BLOCK_LR = 1e-3  # a few layers of the verifier
ADAPTER_LR = 2e-4  # an adapter of a large language model
FULL_LR = 2e-5  # all of its weights
PACKED_WINDOWS = 32  # of a rollout, behind one prefix
REPEATED_WINDOWS = 4  # of a rollout, each with the prefix again, through a whole language model


def resolve_auto(config: dict[str, Any]) -> None:
    """Replace ``auto``: ``trainer.accelerator`` by the GPU if there is one (where ``verifier.device: auto`` is too),
    ``trainer.devices`` by the number of GPUs of this machine (one process without), ``trainer.precision`` by bf16-mixed
    where that device multiplies bf16 natively, else 32-true, ``optimizer.lr`` and ``data.module.windows_per_rollout``
    by what suits the drafter.
    """
    model, trainer, optimizer, data = (config.get(key) or {} for key in ("model", "trainer", "optimizer", "data"))
    if optimizer.get("lr") == "auto":
        optimizer["lr"] = default_learning_rate(model)
    if data.get("module", {}).get("windows_per_rollout") == "auto":
        repeated = is_masked_lm(model) and model.get("attention") != "causal_prefix"
        data["module"]["windows_per_rollout"] = REPEATED_WINDOWS if repeated else PACKED_WINDOWS
    if trainer.get("accelerator") == "auto":
        trainer["accelerator"] = "gpu" if torch.cuda.is_available() else "cpu"
    if trainer.get("devices") == "auto":
        trainer["devices"] = max(1, torch.cuda.device_count()) if trainer.get("accelerator") in ("gpu", "cuda") else 1
    if trainer.get("precision") == "auto":
        device = "cuda" if trainer.get("accelerator") in ("gpu", "cuda") else "cpu"
        planned = config.get("preflight") and (config.get("hardware") or {}).get("bf16_tflops")  # another machine's
        trainer["precision"] = "bf16-mixed" if planned or pick_dtype("auto", device) is torch.bfloat16 else "32-true"


def is_masked_lm(model: Mapping[str, Any]) -> bool:
    """Whether section ``model`` describes a whole masked-diffusion language model."""
    return str(model.get("_target_", "")).rpartition(".")[2] == masked_lm_drafter.__name__


def default_learning_rate(model: Mapping[str, Any]) -> float:
    """Peak learning rate of AdamW for the drafter that section ``model`` describes."""
    if not is_masked_lm(model):
        return BLOCK_LR
    return FULL_LR if model.get("lora") is None else ADAPTER_LR
