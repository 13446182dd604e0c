"""The processes of one training: what they agree on, and what Lightning starts the others with.

Under torchrun, Slurm or submitit all of them are there from the beginning. Without one of these Lightning starts the
others itself, when training begins: it runs the command line of this process again. In a sweep that would be the whole
sweep, and the run folder would be named after another second, so both are set here before it looks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import open_dict, read_write

LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def agreed_stamp(own: str) -> str:
    """The value that the first process of a ``torchrun`` has proposed; one's own outside of it.

    In the store that torchrun's agent keeps for its workers (pytorch.org/docs/stable/elastic/run.html).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=5))
    key = "specdiff2/run_stamp/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store.compare_set(key, "", own).decode()


@contextlib.contextmanager
def other_ranks(folder: Path) -> Iterator[None]:
    """Inside, processes that Lightning starts do this very job, in this very run folder.

    What its launcher leaves behind is undone at the end: the next job of a sweep, in this same process, would take the
    environment for that of another launcher, and wait for processes that nobody starts.
    """
    before, arguments = {name: os.environ.get(name) for name in LEFT_BEHIND}, list(sys.argv)
    if HydraConfig.initialized():
        hydra = HydraConfig.instance().cfg.hydra  # type: ignore[union-attr]
        with read_write(hydra), open_dict(hydra):
            hydra.run.dir = str(folder)
        if hydra.mode == RunMode.MULTIRUN:
            sys.argv[1:] = list(hydra.overrides.task)
    try:
        yield
    finally:
        sys.argv[:] = arguments
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
