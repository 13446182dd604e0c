"""Start a Weights & Biases run, online as far as the host can be reached; knows nothing of what is logged in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from specdiff2.types import ConfigError

log = logging.getLogger(__name__)


def start_run(
    folder: Path | str, project: str, mode: str = "online", *, fall_back: bool = True, init_timeout_s: float = 20.0,
    **options: Any,
) -> Any:  # fmt: skip
    """A run whose files lie in ``folder/wandb``; an offline one is uploaded later by ``wandb sync``.

    Args:
        mode: ``online``, ``offline`` or ``disabled``. The environment variable WANDB_MODE may take away the network,
            never add it.
        fall_back: without a key or a reachable host, record offline with a warning.
        options: further arguments of ``wandb.init``.

    Raises:
        ConfigError: no key or no reachable host, and ``fall_back`` is false.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    options |= {"project": project, "dir": str(folder)}
    wanted = os.environ.get("WANDB_MODE", "online")  # a user's own choice for all programs
    if mode == "online" and wanted in ("disabled", "offline", "dryrun"):
        mode = "offline" if wanted == "dryrun" else wanted
    if mode == "online":
        try:
            if has_key():
                return _init(mode, init_timeout=init_timeout_s, **options)
            problem = "W&B has no API key on this machine (`wandb login` stores one)"
        except (wandb.errors.Error, OSError, ValueError) as error:  # UsageError, CommError; ValueError: malformed key
            problem = f"W&B cannot be reached ({str(error).split(chr(10))[0]})"
            wandb.teardown()
        if not fall_back:
            raise ConfigError(
                f"{problem}: nothing was uploaded, the local files are as they were; try again, or record with "
                "--offline and upload later with `wandb sync`"
            )
        log.warning("%s: recording offline in %s/wandb (see `wandb sync`)", problem, folder)
        mode = "offline"
    return _init(mode, **options)


def _init(mode: str, *, init_timeout: float | None = None, **options: Any) -> Any:
    settings = {"reinit": "create_new"} | ({"init_timeout": init_timeout} if init_timeout else {})
    return wandb.init(mode=mode, settings=wandb.Settings(**settings, **options.pop("settings", {})), **options)


def run_config(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of a W&B run: the resolved one, and the rest of ``run.json`` under ``provenance``."""
    rest = {key: value for key, value in provenance.items() if key != "config"}
    return {**provenance.get("config", {}), "provenance": rest}


def has_key() -> bool:
    """Whether W&B finds an API key, without asking for one and without the network."""
    return bool(wandb.login(prompt=False, verify=False))
