"""A trained masked-diffusion LM for other programs: merged for transformers, its adapter for peft, or in the layout of
its family's authors, whose own tools then read it.

All three are written completely or not at all, into a folder that was not there or is empty.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdiff2.models.families import FamilyModel, get_family
from specdiff2.models.family_export import write_family_layout
from specdiff2.models.family_weights import family_tensor_name
from specdiff2.models.lora import PREFIX
from specdiff2.models.masked_lm_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    load_merged_model,
    peft_description,
    read_masked_lm_config,
    read_trained_tensors,
)
from specdiff2.models.safe_folder import replace_folder, require_empty
from specdiff2.types import ConfigError

LAYOUTS = ("merged", "adapter", "family")


def export_masked_lm(
    folder: str | Path,
    out: str | Path,
    layout: str,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write ``out`` from the drafter in ``folder``; its absolute path.

    Args:
        layout: ``merged``: a folder of the plain Qwen2, Llama or Qwen3 class, which ``AutoModelForCausalLM`` loads (its
            attention stays causal there unless a mask says otherwise); ``adapter``: peft's two files;
            ``family``: the authors' tensor names, config and remote code files.
        source: where the base lies now; None: where it lay when it was trained. The adapter alone needs no base.
        dtype: of merged weights; the adapter stays as it was saved.

    Raises:
        ConfigError: an unknown layout, ``out`` is not empty, or the adapter of a fully trained model is asked for.
        CorruptFileError, MismatchError: the folder is damaged, or the base is not the one it was trained on.
        SpecDiffError: writing failed; nothing is left behind.
    """
    folder, out = Path(folder), Path(os.path.abspath(out))
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    require_empty(out)
    if layout == "adapter":
        return replace_folder(out, partial(_write_adapter, folder), "export")
    base = load_merged_model(folder, dtype, source=source)
    if layout == "family":
        return write_family_layout(base.model, base, out)
    return replace_folder(out, partial(_write_merged, base), "export")


def _write_merged(base: FamilyModel, out: Path) -> None:
    base.model.save_pretrained(out)
    base.tokenizer.save_pretrained(out)


def _write_adapter(folder: Path, out: Path) -> None:
    """peft's two files, for the very model that ``base_model_name_or_path`` names: in the authors' own layer names."""
    config = read_masked_lm_config(folder)
    if config.lora is None:
        raise ConfigError(f"drafter {folder}: all its weights were trained, it has no adapter; use merged or family")
    family = get_family(config.family)
    described = peft_description(config)
    tensors, modules = {}, set()
    for name, tensor in read_trained_tensors(folder, config).items():
        module, part = name.removeprefix(PREFIX).rsplit(".lora_", 1)
        own = family_tensor_name(f"{module}.weight", family).removesuffix(".weight")
        tensors[f"{PREFIX}{own}.lora_{part}"] = tensor
        modules.add(own)
    if family.name == "llada":  # its head and its down projections have the same last name: list whole paths
        described["target_modules"] = sorted(modules)
    save_file(tensors, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (out / ADAPTER_CONFIG).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
