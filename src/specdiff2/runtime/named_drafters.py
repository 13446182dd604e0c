"""From the name of a drafter in a configuration to the drafter: the one place that knows what such a name can be.

``untrained`` (section ``model`` before any training: layers copied from the verifier, or a masked-diffusion language
model as its authors published it), ``shipped`` or ``shipped:NAME`` (``models.shipped``), or what Python knows as well
(``decoding.drafter_names``): a folder written by ``train.py``, a smaller causal language model, a published EAGLE head,
``prompt_lookup``. What ships of a masked-diffusion language model is its published checkpoint. Knows no samplers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdiff2.decoding.drafter_names import is_own_folder, load_drafter_for
from specdiff2.decoding.prompt_lookup import read_prompt_lookup
from specdiff2.decoding.speculative import is_unlimited
from specdiff2.models.ar_drafter import ARDrafter
from specdiff2.models.causal_export import check_assistant_source, is_autoregressive, is_causal_source
from specdiff2.models.eagle_files import check_eagle_source, is_eagle_source
from specdiff2.models.family_loading import read_family_config
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.pretrained import load_drafter, read_drafter_config, read_training_info
from specdiff2.models.shipped import SHIPPED, drafter_folder
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Drafter
from specdiff2.runtime.auto_settings import is_masked_lm
from specdiff2.runtime.build import instantiate
from specdiff2.types import ConfigError

UNTRAINED = "untrained"


def check_named_drafter(name: str, gamma: int | None, config: Mapping[str, Any], num_drafts: int = 1) -> None:
    """Refuse, before any model loads, a missing drafter with the command that makes or fetches one, and a window longer
    than it was trained for.

    Args:
        gamma: positions that will be drafted; None: the drafter's own.
        num_drafts: of this drafter in a round.

    Raises:
        ConfigError: there is no such folder or model, none is shipped for the configured verifier and model, or
            ``gamma`` or ``num_drafts`` is above the drafter's.
        CorruptFileError: its config is damaged.
    """
    lookup = read_prompt_lookup(name)
    if lookup is not None:
        if gamma is not None and gamma > lookup[0]:
            raise ConfigError(
                f"gamma={gamma} with drafter {name!r}, which copies at most {lookup[0]} tokens; raise that"
            )
        _check_one_draft(num_drafts, name, "prompt_lookup")
        return
    if _is_untrained(name, config):
        check_published(config["model"], gamma)
        return
    folder = drafter_folder(name, config["verifier"].get("source"), config["model_name"])
    if is_eagle_source(folder):
        check_eagle_source(folder)
        return
    if is_causal_source(folder):
        check_assistant_source(folder, config["paths"]["cache"], "drafter")
        _check_one_draft(num_drafts, name, "sps")
        return
    if not Path(folder).is_dir():
        parts = Path(folder).parts
        model = f" model={parts[-2]}" if parts[-3:-2] == ("drafters",) else ""  # where training publishes
        raise ConfigError(
            f"drafter={folder!r}: no such folder; train one with `python train.py{model}` (15 minutes on 2 cores) "
            f"or `make demo`, name another folder, or use drafter={SHIPPED} (trained already, for SmolLM2) or "
            f"drafter={UNTRAINED} (the verifier's layers as copied)"
        )
    found = read_drafter_config(folder)  # refuses a damaged config before the verifier loads
    if gamma is not None and gamma > found.gamma and not is_unlimited(found):
        raise ConfigError(
            f"gamma={gamma}: expected at most {found.gamma}, the positions drafter {folder} was trained to draft; use "
            f"a smaller sampler.gamma or train with model.gamma={gamma}"
        )


def _check_one_draft(num_drafts: int, name: str, sampler: str) -> None:
    if num_drafts > 1:
        raise ConfigError(
            f"K={num_drafts} with drafter {name!r}, which makes one draft a round: expected K=1; use sampler={sampler}"
        )


def check_published(model: Mapping[str, Any], gamma: int | None = None) -> None:
    """Refuse, before any model loads, a masked-diffusion language model that is not there, and a window beyond
    ``model.gamma``; nothing to check for other models.

    Raises:
        ConfigError: no such checkpoint (names the command that fetches it), not one of a known family, or a window
            that is too long.
    """
    if not is_masked_lm(model):
        return
    if gamma is not None and gamma > model["gamma"]:
        raise ConfigError(f"gamma={gamma}: expected at most model.gamma={model['gamma']}; raise model.gamma")
    read_family_config(model["source"], revision=model["revision"], family=model["family"])


def resolve_named_drafter(name: str, verifier: HFVerifier, config: Mapping[str, Any]) -> str:
    """``shipped`` replaced by the folder of the drafter that was trained for this very verifier; others as they are.

    Raises:
        ConfigError: there is none.
    """
    return UNTRAINED if _is_untrained(name, config) else drafter_folder(name, verifier, config["model_name"])


def load_named_drafter(name: str, verifier: HFVerifier, config: Mapping[str, Any]) -> Drafter:
    """The drafter of that name around ``verifier``, ready to decode.

    Raises:
        ConfigError: none is shipped for this verifier.
        MismatchError: it was trained for another verifier or tokenizer.
        CorruptFileError: its folder is damaged.
    """
    if _is_untrained(name, config):
        return untrained_drafter(config, verifier)
    folder = resolve_named_drafter(name, verifier, config)
    source = base_source(folder, config["model"]) if is_own_folder(folder) else None
    if source is not None:
        return load_drafter(folder, verifier, source=source)
    return load_drafter_for(verifier, folder, config["paths"]["cache"])


def training_run(name: str) -> str | None:
    """The run that the drafter of a resolved name was trained in; None for what no training of ours has written."""
    return read_training_info(name).get("run") if is_own_folder(name) else None


def base_source(folder: str | Path, model: Mapping[str, Any]) -> str | None:
    """Where the base of a trained masked-diffusion language model lies: ``model.source`` where it is not a folder that
    is still where it was; None for the place it was trained from (and for block drafters, which have no base).
    """
    config = read_drafter_config(folder)
    if not isinstance(config, MaskedLMConfig) or not is_masked_lm(model) or Path(config.base_name).is_dir():
        return None
    return None if model["source"] == config.base_name else str(model["source"])


def untrained_drafter(config: Mapping[str, Any], verifier: HFVerifier) -> Drafter:
    """Section ``model`` before any training, in the number format a trained drafter is loaded in."""
    make = instantiate(config["model"])
    if is_masked_lm(config["model"]):
        return make(verifier, trainable=False)  # type: ignore[no-any-return]
    drafter: Any = make(verifier).to(verifier.dtype).eval()
    if is_autoregressive(drafter.config):
        return ARDrafter.from_block(drafter, verifier, UNTRAINED)
    pack_linears(drafter)
    return drafter  # type: ignore[no-any-return]


def _is_untrained(name: str, config: Mapping[str, Any]) -> bool:
    return name == UNTRAINED or (name == SHIPPED and is_masked_lm(config["model"]))
