"""Lightning's view of a Slurm job: it reads the ranks there and never requeues the job.

Requeueing is submitit's business alone (``training.callbacks.preemption``): two mechanisms would submit one job twice.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment


def cluster_plugins() -> list[Any]:
    """For ``Trainer(plugins=...)``: the Slurm environment without its requeue; nothing outside a Slurm job step."""
    in_step = "SLURM_STEP_ID" in os.environ and SLURMEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if in_step else []
