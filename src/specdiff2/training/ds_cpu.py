"""``trainer.accelerator=ds_cpu``: the real DeepSpeed engine on processes of the CPU, which talk through gloo.

For trying a cluster configuration where there is no GPU: same engine, same partitions, same checkpoints, slowly.
Lightning's ``cpu`` accelerator would do, but for two things: DeepSpeed wants numbered devices, and must be told before
it is imported that the CPU is meant. One of its operators (all-reduce through shared memory) would be compiled for
minutes on first use and is switched off; gloo does its work. Knows no model and no strategy.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator

from specdiff2.types import ConfigError

NAME = "ds_cpu"


class DeepSpeedCPU(CPUAccelerator):
    """Lightning's CPU with one numbered device per process (torch takes ``cpu:1`` for the same memory)."""

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def name() -> str:
        return NAME


def prepare() -> None:
    """Tell DeepSpeed that the CPU is meant; before anything imports it.

    Raises:
        ConfigError: DeepSpeed already works on another accelerator in this process.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    earlier = logging.root.manager.disable
    logging.disable(logging.INFO)  # importing it tries a compiler, and says so
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    finally:
        logging.disable(earlier)

    found: Any = get_accelerator()
    if found.device_name() != "cpu":
        raise ConfigError(
            f"trainer.accelerator={NAME}: DeepSpeed works on {found.device_name()} in this process already; run this "
            "job in a process of its own (not in one sweep with GPU jobs)"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if NAME not in AcceleratorRegistry:
    AcceleratorRegistry.register(NAME, DeepSpeedCPU, description="DeepSpeed on CPU processes")
