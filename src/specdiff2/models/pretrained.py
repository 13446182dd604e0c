"""Drafters on disk: ``save_drafter`` and ``load_drafter`` for block drafters and EAGLE heads, and for masked-diffusion
LMs through ``models.masked_lm_files``; the "format" in ``config.json`` tells which one a folder holds.

Their weights file holds their own trained tensors and nothing of the verifier; the config holds everything else (draft
vocabulary, window layout, what it was trained for), so training and decoding read the same file. Loading never runs
code from the folder and never fills a missing tensor with random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.drafter_files import (
    BLOCK_FORMAT,
    EAGLE_FORMAT,
    MASKED_LM_FORMAT,
    WEIGHTS_FILE,
    check_belongs,
    check_keys,
    check_tensors,
    read_record,
    read_tensors,
    require_files,
    store_drafter,
)
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.packed_linear import pack_linears
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
    from specdiff2.models.verifier import HFVerifier


def save_drafter(
    drafter: BlockDrafter | EagleDrafter | MaskedLMDrafter,
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``folder``; a drafter already there is replaced only once the new one is complete on disk.

    A model card beside it is kept: ``model_card.write_card`` writes the new one.

    Args:
        extra: facts about the training (steps, metrics, run folder, ...), strict JSON, kept under "training".
        dtype: of the stored tensors; None keeps the drafter's own (bfloat16 halves the file).

    Raises:
        ConfigError: ``folder`` holds something other than a drafter, or ``extra`` is not strict JSON.
        SpecDiffError: a weight is not finite, or writing failed (full disk); what was there before is untouched.
    """
    if isinstance(drafter.config, MaskedLMConfig):
        from specdiff2.models.masked_lm_files import save_masked_lm  # here, because peft takes seconds to import

        return save_masked_lm(drafter, folder, extra, dtype=dtype)
    state = drafter.state_dict()
    tensors = {name: tensor.detach().to(device="cpu", dtype=dtype).contiguous() for name, tensor in state.items()}
    config, name = drafter.config.to_dict(), EAGLE_FORMAT if isinstance(drafter, EagleDrafter) else BLOCK_FORMAT
    return store_drafter(folder, name, config, extra, tensors, lambda new: save_file(tensors, new / WEIGHTS_FILE))


def load_drafter(
    folder: str | Path,
    verifier: HFVerifier,
    dtype: torch.dtype | None = None,
    *,
    trainable: bool = False,
    source: str | Path | None = None,
) -> BlockDrafter | EagleDrafter | MaskedLMDrafter:
    """The drafter saved in ``folder``, around ``verifier``, in eval mode on the verifier's device.

    In bfloat16 on a CPU its layers are packed for decoding; with gradients on, packing does nothing.

    Args:
        dtype: of its weights; None takes the verifier's, which is what decoding wants.
        trainable: a masked-diffusion LM keeps its adapters apart, to go on training; a block drafter always can.
        source: where the base of a masked-diffusion LM lies now; None: where it lay when it was trained.

    Raises:
        CorruptFileError: the folder or one of its files is missing, truncated or damaged.
        MismatchError: it was made for another verifier or tokenizer, or a tensor is missing, unknown or misshapen.
        ConfigError: a value in its config is out of range, or a block drafter was given a ``source``.
    """
    folder = Path(folder)
    record = read_record(folder)
    if record["format"] == MASKED_LM_FORMAT:
        from specdiff2.models.masked_lm_files import load_masked_lm

        return load_masked_lm(folder, verifier, dtype, trainable=trainable, source=source)
    if source is not None:
        raise ConfigError(f"source={str(source)!r}: drafter {folder} is no language model, it has no base")
    config = read_drafter_config(folder)
    check_belongs(config, verifier, folder)
    tensors = read_tensors(record, folder, WEIGHTS_FILE)
    base_config = AutoConfig.for_model(**config.base_config)
    make: Any = EagleDrafter if isinstance(config, EagleConfig) else BlockDrafter
    drafter: BlockDrafter | EagleDrafter = make(config, verifier, base_config, dtype=dtype or verifier.dtype)
    check_tensors(drafter.state_dict(), tensors, f"drafter {folder}: {WEIGHTS_FILE}")
    drafter.load_state_dict(tensors)
    pack_linears(drafter)
    return drafter.eval()


def read_training_info(folder: str | Path) -> dict[str, Any]:
    """The ``extra`` given to ``save_drafter``. Raises as ``load_drafter``."""
    return dict(read_record(folder).get("training", {}))


def read_drafter_config(folder: str | Path) -> BlockDrafterConfig | EagleConfig | MaskedLMConfig:
    """What the drafter in ``folder`` is, without its weights. Raises as ``load_drafter``."""
    folder = Path(folder)
    record = read_record(folder)
    if record["format"] == MASKED_LM_FORMAT:
        return MaskedLMConfig(**check_keys(record.get("drafter"), _names(MaskedLMConfig), folder))
    require_files(folder, WEIGHTS_FILE)
    values = record.get("drafter")
    if record["format"] == EAGLE_FORMAT:
        return EagleConfig(**check_keys(values, _names(EagleConfig), folder))
    if isinstance(values, dict) and record.get("format_version") == 1:
        values = {"conditioning": "none", "feature_layers": [], "markov_rank": 0} | values  # as it was then
    return BlockDrafterConfig(**check_keys(values, _names(BlockDrafterConfig), folder))


def _names(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}
