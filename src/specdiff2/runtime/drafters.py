"""The drafter that ``train.py`` trains: a fresh one that fits the rollouts, or one to start from.

A conditioned drafter (or EAGLE head) also gets the memory of what the verifier said about each rollout, and a fresh one
its first input projections. Wiring only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.context_memory import ContextMemory
from specdiff2.data.retokenize import RetokenizedRollouts
from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.windows import draft_vocabulary, first_anchor
from specdiff2.models.block_drafter_config import BlockDrafterConfig, check_conditioning
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_start import fit_fc
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.pretrained import load_drafter, read_drafter_config
from specdiff2.models.projection_fit import fit_context_input
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.verifier_context import ContextSource
from specdiff2.runtime.auto_settings import is_masked_lm
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.named_drafters import base_source, check_published
from specdiff2.types import ConfigError, Rollout

log = logging.getLogger(__name__)
NUM_FIT = 128  # rollouts that the input of a drafter is regressed on


DrafterConfig = BlockDrafterConfig | EagleConfig | MaskedLMConfig


def read_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], DrafterConfig | None]:
    """(section ``model`` of what will be trained, the drafter to start from or None for a fresh one); loads no model.

    Raises:
        ConfigError: settings of ``model`` that do not go together, or its checkpoint is not there.
        CorruptFileError: the folder to start from is missing or damaged.
    """
    folder, model = config["start_from"], config["model"]
    if folder is None:
        layout = model.get("shifted", False), model.get("attention", "causal_prefix")
        check_conditioning(model.get("conditioning", "none"), *layout)
        check_published(model)
        return model, None
    start = read_drafter_config(folder)
    if not isinstance(start, config_class(model)):
        raise ConfigError(
            f"start_from={folder}: a {type(start).__name__.removesuffix('Config')}, but model={config['model_name']} "
            "is another kind of drafter; choose the model that it was trained as"
        )
    log.info("starting from drafter %s: gamma, layers, draft vocabulary and the rest of model are its own", folder)
    return {**model, **start.to_dict()}, start


def config_class(model: Mapping[str, Any]) -> type[DrafterConfig]:
    """What section ``model`` describes."""
    if is_masked_lm(model):
        return MaskedLMConfig
    return EagleConfig if f".{EagleDrafter.__name__}." in str(model.get("_target_")) else BlockDrafterConfig


def build_drafter(config: Mapping[str, Any], verifier: HFVerifier, store: RolloutStore, *, fit: bool) -> Any:
    """A fresh drafter that proposes what occurs in the rollouts, or the one to start from.

    ``fit``: regress the input of a fresh conditioned drafter (needless where a checkpoint overwrites it).

    Raises:
        MismatchError: the drafter to start from was made for another verifier.
    """
    rollouts = open_index(store.folder)
    masked_lm, size = is_masked_lm(config["model"]), config["data"]["draft_vocab_size"]
    if config["start_from"] is not None:
        # a masked-diffusion LM keeps the dtype of its frozen base
        dtype = None if masked_lm else torch.float32
        source = base_source(config["start_from"], config["model"])
        drafter: Any = load_drafter(config["start_from"], verifier, dtype=dtype, trainable=True, source=source).train()
        if masked_lm and config["model"]["gradient_checkpointing"]:
            drafter.model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        # a whole language model has a head for every token; what occurs in the rollouts does not bound it
        ids = None if masked_lm and size is None else draft_vocabulary(rollouts, size, verifier.eos_ids)
        drafter = instantiate(config["model"])(verifier, draft_vocab_ids=ids)
    num_trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    num_ids, num_all = len(drafter.draft_vocab_ids), drafter.vocab_size
    log.info("drafter: %.1f M trained weights, %d of %d tokens draftable", num_trained / 1e6, num_ids, num_all)
    if getattr(drafter, "context", None) is not None:
        drafter.context.memory = context_memory(drafter.context, Path(config["paths"]["cache"]))
        if fit and config["start_from"] is None:
            fit_input(drafter, rollouts)
    return drafter


def training_rollouts(drafter: Any, stores: Sequence[RolloutStore]) -> list[RolloutStore | Sequence[Rollout]]:
    """What the data module reads: the stores, or their rollouts in the tokens of a drafter with another tokenizer."""
    bridge = getattr(drafter, "bridge", None)
    return [store if bridge is None else RetokenizedRollouts(open_index(store.folder), bridge) for store in stores]


def fit_input(drafter: Any, rollouts: Sequence[Rollout]) -> None:
    """Regress the input of a conditioned drafter (or EAGLE head) on evenly spaced rollouts."""
    chosen = rollouts[:: -(-len(rollouts) // NUM_FIT)]
    rows = [(rollout.prompt_ids + rollout.completion_ids, first_anchor(rollout)) for rollout in chosen]
    fit = fit_fc if isinstance(drafter, EagleDrafter) else fit_context_input
    log.info("input regressed on %d rollouts: R^2 %.2f", len(rows), fit(drafter, rows))


def context_memory(source: ContextSource, cache: Path) -> ContextMemory:
    """Keeps what the verifier says about rollouts: one folder per verifier and choice of layers, shared by all runs."""
    shape, verifier = source.shape, source.verifier
    origin = {
        "verifier": verifier.fingerprint,
        "layer_indices": list(shape.layer_indices),
        "feature_layers": list(shape.feature_layers),
        "dtype": str(verifier.dtype),
    }
    digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:12]
    return ContextMemory(cache / "contexts" / digest, origin)
