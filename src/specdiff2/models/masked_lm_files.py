"""Masked-diffusion LMs on disk: what was trained (an adapter in peft's files, or all weights), and what it belongs to.

    config.json                  format, the drafter's configuration, training facts, digest of the weights
    adapter_config.json          for peft: ``PeftModel.from_pretrained(base, folder)`` computes the same logits
    adapter_model.safetensors    float32 A and B of every adapted layer
    model*.safetensors           instead of the two above where all weights are trained; an index beside several

The base is never copied into a folder with an adapter. It is loaded again from where it lay, and must be the same to
the bit (``models.fingerprint``). The merge is done on the CPU in float32, before anything moves to a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from specdiff2.models.drafter_files import (
    MASKED_LM_FORMAT,
    check_belongs,
    check_tensors,
    corrupt,
    read_record,
    read_tensors,
    refuse_differences,
    require_files,
    store_drafter,
)
from specdiff2.models.dtypes import DTYPES
from specdiff2.models.families import FamilyModel
from specdiff2.models.family_loading import fetch_folder, load_family_model, read_config, read_family_config
from specdiff2.models.lora import adapter_state, add_lora, load_adapter_state, lora_config, merge_lora
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.pretrained import read_drafter_config
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9  # of a file of a fully trained model


def save_masked_lm(
    drafter: MaskedLMDrafter,
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``folder``; arguments and errors of ``pretrained.save_drafter``.

    Raises:
        ConfigError: the adapter is merged already, so it cannot be told from the base any more.
    """
    config, model = drafter.config, drafter.model
    state = dict(model.named_parameters()) if config.lora is None else adapter_state(model)
    return store_masked_lm(config, state, folder, extra, dtype=dtype)


def store_masked_lm(
    config: MaskedLMConfig,
    state: Mapping[str, Tensor],
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """``save_masked_lm`` of tensors alone: all weights by name, or an adapter's as ``lora.adapter_state`` has them."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}

    def write(new: Path) -> None:
        if config.lora is None:
            save_torch_state_dict(tensors, new, max_shard_size=MAX_SHARD_BYTES, metadata={"format": "pt"})
            return
        save_file(tensors, new / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (new / ADAPTER_CONFIG).write_text(json.dumps(peft_description(config), indent=1) + "\n", encoding="utf-8")

    return store_drafter(folder, MASKED_LM_FORMAT, config.to_dict(), extra, tensors, write)


def load_masked_lm(
    folder: str | Path,
    verifier: HFVerifier,
    dtype: torch.dtype | None = None,
    *,
    trainable: bool = False,
    source: str | Path | None = None,
) -> MaskedLMDrafter:
    """The drafter saved in ``folder`` on the verifier's device, in eval mode: merged, or ``trainable``.

    Args:
        dtype: of its weights; None takes the verifier's (float32 to go on training all weights). A trainable adapter is
            float32 whatever the base is.
        trainable: the adapter stays apart from its frozen base, to go on training; merged and frozen otherwise.
        source: where the base lies now (folder or hub id); None: the name and revision it was trained from.

    Raises:
        CorruptFileError: a file is missing, truncated or damaged.
        MismatchError: the base, a tokenizer or a tensor is not the one that the drafter was trained with.
        ConfigError: the base cannot be found.
    """
    folder = Path(folder)
    config = read_masked_lm_config(folder)
    check_belongs(config, verifier, folder)
    tensors = read_trained_tensors(folder, config)
    target = dtype or (torch.float32 if trainable and config.lora is None else verifier.dtype)
    base = _load_base(folder, config, source, target, merge=not trainable)
    with torch.random.fork_rng(devices=[]):  # random adapters, all overwritten: leave the caller's generator alone
        drafter = MaskedLMDrafter(config, base, verifier, trainable=trainable)
        _fill(drafter.model, config, tensors, merge=not trainable)
    if trainable:
        return drafter.to(verifier.device).eval()
    drafter.to(target).to(verifier.device)
    pack_linears(drafter)
    return drafter.eval()


def load_merged_model(folder: str | Path, dtype: torch.dtype, *, source: str | Path | None = None) -> FamilyModel:
    """The trained weights inside the base's model, on the CPU in ``dtype``, with no verifier; for exports.

    Raises:
        CorruptFileError, MismatchError, ConfigError: as ``load_masked_lm``.
    """
    folder = Path(folder)
    config = read_masked_lm_config(folder)
    tensors = read_trained_tensors(folder, config)
    base = _load_base(folder, config, source, dtype, merge=True)
    with torch.random.fork_rng(devices=[]):
        _fill(base.model, config, tensors, merge=True)
    base.model.to(dtype)
    return base


def peft_description(config: MaskedLMConfig) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter of ours."""
    assert config.lora is not None
    described = lora_config(**config.lora, base_name=config.base_name)
    described.revision, described.inference_mode = config.base_revision, True
    values = described.to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(values.items())}


def read_masked_lm_config(folder: Path) -> MaskedLMConfig:
    """Raises ConfigError where ``folder`` holds a block drafter; else as ``pretrained.read_drafter_config``."""
    config = read_drafter_config(folder)
    if not isinstance(config, MaskedLMConfig):
        raise ConfigError(f"drafter {folder}: a block drafter; expected a masked-diffusion LM ({MASKED_LM_FORMAT})")
    return config


def read_trained_tensors(folder: Path, config: MaskedLMConfig) -> dict[str, Tensor]:
    """The adapter's tensors under peft's names, or all of the model's.

    Raises:
        CorruptFileError: a file is missing, damaged, or does not say what config.json says.
    """
    record = read_record(folder)
    if config.lora is None:
        shards = sorted(path.name for path in folder.glob("model*.safetensors")) or ["model.safetensors"]
        return read_tensors(record, folder, *shards)
    require_files(folder, ADAPTER_CONFIG)
    try:
        described = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise corrupt(folder, ADAPTER_CONFIG, f"not valid JSON ({error})") from error
    expected = peft_description(config)
    for key in ("r", "lora_alpha", "target_modules"):
        if not isinstance(described, dict) or described.get(key) != expected[key]:
            raise corrupt(folder, ADAPTER_CONFIG, f"{key} is not {expected[key]!r}, as config.json says")
    return read_tensors(record, folder, ADAPTER_WEIGHTS)


# ---------------------------------------------------------------- inside
def _load_base(
    folder: Path, config: MaskedLMConfig, source: str | Path | None, dtype: torch.dtype, *, merge: bool
) -> FamilyModel:
    """The base on the CPU, checked, in ``dtype``; to ``merge``, no narrower than its files: rounded only afterwards."""
    name, revision = (config.base_name, config.base_revision) if source is None else (str(source), None)
    try:
        where, commit = fetch_folder(name, revision)
        family = _own_family(where, config.family)
        _refuse_base(folder, {"base family": (config.family, family, config.family == family)})
        if merge:
            dtype = torch.promote_types(dtype, _stored_dtype(where))
        base = load_family_model(where, family=config.family, dtype=dtype)
    except ConfigError as error:
        raise ConfigError(
            f"drafter {folder}: its base cannot be loaded: {error}; if it lies elsewhere, say where (source=FOLDER)"
        ) from error
    base.name, base.revision = name, commit
    digest, tokenizer = base.fingerprint, tokenizer_fingerprint(base.tokenizer)
    trained_on, trained_tokenizer = config.base_fingerprint, config.drafter_tokenizer_fingerprint
    _refuse_base(
        folder,
        {
            "base": (f"{config.base_name} ({trained_on})", f"{name} ({digest})", trained_on == digest),
            "mask id": (config.mask_token_id, base.mask_token_id, config.mask_token_id == base.mask_token_id),
            "base tokenizer": (trained_tokenizer, tokenizer, trained_tokenizer == tokenizer),
        },
    )
    return base


def _refuse_base(folder: Path, checks: Mapping[str, tuple[Any, Any, bool]]) -> None:
    remedy = "its weights mean something only on the very base that they were trained on: name that one"
    refuse_differences(folder, checks, remedy)


def _stored_dtype(where: Path) -> torch.dtype:
    """What config.json says of the weight files; float32 where it does not tell."""
    told = read_config(where / "config.json")
    return DTYPES.get(str(told.get("dtype") or told.get("torch_dtype")), torch.float32)


def _own_family(where: Path, known: str) -> str:
    """What the checkpoint in ``where`` calls itself; ``known`` where it does not tell (a renamed DiffuLLaMA)."""
    try:
        return read_family_config(where)[1].name
    except ConfigError:
        return known


def _fill(model: nn.Module, config: MaskedLMConfig, tensors: Mapping[str, Tensor], *, merge: bool) -> None:
    """The trained tensors into ``model``: over its own weights, or into its adapter, which is merged if so wanted."""
    if config.lora is None:
        own = dict(model.named_parameters())
        check_tensors(own, tensors, "the trained model")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        return
    if merge:
        add_lora(model, **config.lora)
    load_adapter_state(model, tensors)
    if merge:
        merge_lora(model)
        model.requires_grad_(False)
