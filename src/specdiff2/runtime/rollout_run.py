"""``rollout.py`` after validation: fill the training and the held-out store that ``train.py`` reads.

Start it any number of times, by hand, with ``torchrun`` or with ``srun``: each process is one writer of the same
stores. Wiring only.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.served import ServedEngine
from specdiff2.launch import is_first_rank
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.config_schema import HYDRA_KEYS
from specdiff2.runtime.prompts import LoadedPrompts, check_disjoint, keep_apart, load_prompts
from specdiff2.runtime.rollouts import check_sampling, digest_of, ensure_rollouts, store_fingerprint
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
SPLITS = ("train", "val")


def sample_rollouts(config: Mapping[str, Any]) -> tuple[RolloutStore, ...]:
    """Both stores, complete; prints the command that trains on them.

    Raises:
        ConfigError, MismatchError: settings, prompts or a server that do not go together.
        StorageError: the disk is full or refuses; what was written before stays.
    """
    data = config["data"]
    check_sampling(data["rollouts"])
    engine = instantiate(config["engine"])
    prompts = {split: load_prompts(instantiate(data[f"{split}_prompts"])) for split in SPLITS}
    prompts["train"] = keep_apart(prompts["train"], data)
    check_disjoint(prompts["train"].prompts, prompts["val"].prompts)
    verifier = load_verifier(config["verifier"], engine)
    generate = instantiate(data["rollouts"], engine=engine, progress=config["progress"] and is_first_rank())
    base, named = store_base(config, engine, verifier, prompts, generate)
    stores = tuple(ensure_rollouts(verifier, prompts[s], generate, base / s, named=named) for s in SPLITS)
    if is_first_rank():
        print(f"train on them: {train_command(sys.argv[1:], base if named else None)}")
    return stores


def check_writer(config: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: ``verifier.tp_plan``, whose processes compute together while writers here work apart.
    """
    if config["verifier"].get("tp_plan") is not None:
        raise ConfigError(
            "verifier.tp_plan is for eval.py: the processes of rollout.py sample different batches; use "
            "verifier.device_map=auto, or serve the verifier and set engine=openai"
        )


def load_verifier(node: Mapping[str, Any], engine: Any) -> HFVerifier:
    """The verifier that samples, on this process's own GPU where there are several; or what a server's ids need.

    Raises:
        ConfigError: a part of it is missing.
    """
    if isinstance(engine, ServedEngine):
        options = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
        return HFVerifier.without_weights(options.pop("source"), engine.origin, **options)
    return instantiate(node)


def store_base(
    config: Mapping[str, Any], engine: Any, verifier: HFVerifier, prompts: Mapping[str, LoadedPrompts], generate: Any
) -> tuple[Path, bool]:
    """(Folder that the stores are in, whether their names are just ``train`` and ``val``).

    Of a verifier: as ``train.py`` names them. Of a server: a folder of their own, to be named in ``train.py``, which
    does not know the origin.
    """
    data, root = config["data"], Path(config["paths"]["rollouts"]) / config["data"]["name"]
    if data["folder"] is not None:
        return Path(data["folder"]), True
    if not isinstance(engine, ServedEngine):
        return root, False
    origins = [store_fingerprint(verifier, prompts[split], generate) for split in SPLITS]
    return root / f"served-{digest_of(origins)}", True


def train_command(overrides: Sequence[str], folder: Path | None) -> str:
    """``train.py`` with the verifier, the data and the paths of these overrides."""
    shared = [one for one in overrides if one.lstrip("+").split("=")[0].split(".")[0] in ("verifier", "data", "paths")]
    shared = [one for one in shared if not one.startswith("data.folder=")]
    return shlex.join(["python", "train.py", *shared, *([] if folder is None else [f"data.folder={folder}"])])
