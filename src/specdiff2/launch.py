"""Which of several processes this one is, from what launchers put into the environment; known before any process group.

torchrun, submitit   RANK, WORLD_SIZE, LOCAL_RANK (pytorch.org/docs/stable/elastic/run.html)
srun                 SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID (slurm.schedmd.com/srun.html); a batch script
                     has SLURM_PROCID and SLURM_NTASKS too, for its one process
Lightning            LOCAL_RANK and NODE_RANK, for processes it starts when training begins
"""

from __future__ import annotations

import os

_COUNTED = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


def launched() -> tuple[int, int] | None:
    """(rank, number of processes), where torchrun, submitit or srun has started several together."""
    for rank, count in _COUNTED:
        if rank in os.environ and int(os.environ.get(count, 1)) > 1:
            return int(os.environ[rank]), int(os.environ[count])
    return None


def own_rank() -> int:
    """Rank of this process; 0 for one that is alone. On further nodes of Lightning's own only that it is not 0 is
    certain."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    found = launched()
    return found[0] if found else local_rank() or int(os.environ.get("NODE_RANK", 0))


def is_first_rank() -> bool:
    """Whether this process writes and speaks for all of them."""
    return own_rank() == 0


def local_rank() -> int:
    """Number of this process among those that were started on this machine; 0 for one that is alone."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
