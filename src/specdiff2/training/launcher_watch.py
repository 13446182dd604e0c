"""Ranks end with the process that started them, so that none goes on alone on a machine that looks free.

That process is rank 0 (Lightning starts the others itself), torchrun's agent, or Slurm's step daemon. A process that a
user has started does not depend on its shell.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from specdiff2.launch import local_rank, own_rank
from specdiff2.training.rank_probe import end_process

TICK_S = 1.0
GRACE_S = 8.0  # rank 0 gone: ``rank_watcher`` says more about it, and comes first
LAUNCHER, NAME = "SPECDIFF2_LAUNCHER_PID", "launcher-watch"  # set by a process that may start ranks, read by those


def end_with_launcher() -> None:
    """Watch the launcher from now on, in a thread; nothing in a process that is its own launcher.

    Call it as early as possible: a rank spends its first minute on loading models, when nothing else watches.
    """
    if any("_ddp_process_" in argument for argument in sys.argv):  # started by Lightning; rank 0 may be gone already
        launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    elif {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & os.environ.keys() or local_rank() > 0:
        launcher = os.getppid()
    else:
        os.environ[LAUNCHER] = str(os.getpid())
        return
    if not any(thread.name == NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(launcher,), daemon=True, name=NAME).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(TICK_S)
    time.sleep(GRACE_S)
    print(f"\nerror: rank {own_rank()} (pid {os.getpid()}): the process that started it (pid {launcher}) is gone, so "
          "it ends too; what was written stays: run the same command again to go on", file=sys.stderr)  # fmt: skip
    end_process()
