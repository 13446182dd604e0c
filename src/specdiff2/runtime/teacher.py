"""The verifier of ``train.py``: loaded where something needs its weights (``load_verifier``), else only what names it.

    drafter                     objective                                  weights needed while training
    block drafter, EAGLE head   any                                        yes: made of its layers, borrows its head
    whole masked-diffusion LM   reads verifier probabilities               yes: it scores every rollout again
                                (streak_expected, tv, lk, distillspec)
    whole masked-diffusion LM   any other (streak, ce, dpace, mdm, ...)    no: the sampled tokens are all it reads

and in any case where rollouts are missing, for online rollouts and for the decoding probe. So a verifier that fits on
no GPU of the trainer, or that only a server holds, still trains a masked-diffusion drafter: ``rollout.py`` first, then
``load_verifier=false data.folder=... callbacks.decoding_probe=null``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdiff2.data.rollouts import MANIFEST_FILE, RolloutStore, read_manifest
from specdiff2.models.verifier import HFVerifier
from specdiff2.objectives import ObjectiveSchedule
from specdiff2.runtime.auto_settings import is_masked_lm
from specdiff2.runtime.build import instantiate
from specdiff2.types import ConfigError, SamplingParams

log = logging.getLogger(__name__)
IGNORED = ("_target_", "source", "temperature", "top_k", "top_p")


def get_verifier(config: Mapping[str, Any], schedule: ObjectiveSchedule) -> tuple[HFVerifier, bool]:
    """(the verifier, whether its weights are here).

    Raises:
        ConfigError: ``load_verifier=false`` where weights are needed or the rollouts are not all there.
    """
    wanted, reasons = config["load_verifier"], reasons_to_load(config, schedule)
    if wanted is True or (wanted == "auto" and reasons):
        return instantiate(config["verifier"]), True
    if reasons:
        raise ConfigError(
            "load_verifier=false, but the verifier is needed: " + "; ".join(reasons) + ". Change that, or set "
            "load_verifier=auto"
        )
    node = config["verifier"]
    log.info("verifier %s: not loaded, nothing reads its weights", node["source"])
    sampling = SamplingParams(node["temperature"], node["top_k"], node["top_p"])
    options = {key: value for key, value in node.items() if key not in IGNORED}
    origin = read_manifest(Path(config["data"]["folder"]) / "train")["verifier"]
    return HFVerifier.without_weights(node["source"], origin, sampling=sampling, **options), False


def reasons_to_load(config: Mapping[str, Any], schedule: ObjectiveSchedule) -> list[str]:
    """Why the verifier's weights must be here, in words; empty where they need not. Loads nothing."""
    data, reasons = config["data"], []
    readers = [stage.objective.name for stage in schedule.stages if stage.objective.needs_verifier_probs]
    if readers:
        reasons.append(f"objective {', '.join(readers)} reads its probabilities (sampled ones do not: streak, ce, ...)")
    if not is_masked_lm(config["model"]):
        reasons.append(f"model={config['model_name']} is made of its layers and borrows its embedding and head (whole "
                       "masked-diffusion models such as model=diffucoder do not)")  # fmt: skip
    if data["online"]:
        reasons.append("data.online=true samples while training")
    if config["callbacks"].get("decoding_probe") is not None:
        reasons.append("callbacks.decoding_probe decodes with it (null leaves the probe out)")
    if data["folder"] is None:
        reasons.append("data.folder=null: rollouts are sampled here (name a folder that rollout.py has filled)")
    else:
        reasons += [problem for split in ("train", "val") if (problem := _incomplete(Path(data["folder"]) / split))]
    return reasons


def _incomplete(folder: Path) -> str | None:
    if not (folder / MANIFEST_FILE).is_file():
        return f"{folder} holds no rollouts (rollout.py fills it)"
    if not RolloutStore.open(folder).is_complete():
        return f"{folder}: not all rollouts are there yet (run the same rollout.py again)"
    return None
