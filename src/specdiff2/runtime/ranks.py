"""Where each of several processes writes: those that split the prompts (``runtime.split``) into folders of their own.

The processes of one ``torchrun`` that share a verifier (``verifier.tp_plan``) do everything together: rank 0 writes and
speaks. All ranks run the same program on the same numbers, since each pass of the verifier needs all of them. Nothing
may differ between them that decides what is computed next: ranks other than 0 work on a private copy of the run folder
(a continued run skips the same generations everywhere), and settings that depend on measured time are refused.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdiff2.launch import is_first_rank
from specdiff2.runtime.grid import all_methods
from specdiff2.runtime.split import open_shard, share_of
from specdiff2.types import ConfigError


def run_folder_of_rank(config: dict[str, Any]) -> Path:
    """The folder this process writes to; ``paths.run`` stays what all processes of a split evaluation share.

    Raises:
        ConfigError: a configuration that ranks cannot run in step, or that cannot be split.
    """
    share = share_of(config)
    if share is not None:
        return open_shard(share, config)
    folder = Path(config["paths"]["run"])
    if config["verifier"].get("tp_plan") is None:
        return folder
    _check_in_step(config)
    if is_first_rank():
        return folder
    private = Path(tempfile.mkdtemp(prefix="specdiff2-rank-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    if folder.is_dir():
        shutil.copytree(folder, private, dirs_exist_ok=True)
    config["paths"]["run"] = str(private)
    # tables and log lines once; errors stay visible, and they may be this rank's own
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    logging.disable(logging.WARNING)
    return private


def _check_in_step(config: Mapping[str, Any]) -> None:
    if "trainer" in config:
        raise ConfigError(
            "verifier.tp_plan is for eval.py: in training the processes take different batches, and a verifier that is "
            "split over them needs the same; use verifier.device_map=auto, which needs one process per machine"
        )
    for name, settings in {"sampler": config["sampler"], **all_methods(config)}.items():
        if settings.get("num_nodes") == "auto":
            raise ConfigError(
                f"{name}.num_nodes=auto follows measured times, which differ between the processes of "
                "verifier.tp_plan; set a number, such as 32"
            )
