"""Memory, bandwidth and arithmetic of the machine this runs on: what ``hardware=this_machine`` leaves open.

A second of copies and matrix products, the best of a few laps, on the GPU if torch sees one, else on the CPU. The
numbers are what torch reaches here with everything else that is running; nothing of the models is timed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import torch

from specdiff2.models.dtypes import describe_cpu, pick_device, pick_dtype
from specdiff2.runtime.config_schema import HardwareSection

NUM_LAPS = 4
COPIED_BYTES = 256 * 2**20  # well beyond the caches of a CPU
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied


def complete(hardware: HardwareSection) -> HardwareSection:
    """``hardware`` with everything that is null read off or measured here."""
    device = pick_device("auto")
    found = dataclasses.replace(hardware)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if found.name is None:
        found.name = properties.name if properties else f"{describe_cpu()['model']}, {os.cpu_count()} cores"
    if found.num_devices is None:
        found.num_devices = torch.cuda.device_count() if properties else 1
    if found.memory_gib is None:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found.memory_gib = (properties.total_memory if properties else pages) / 2**30
    if found.bandwidth_gb_s is None:
        found.bandwidth_gb_s = _copy_bandwidth(device) / 1e9
    if found.bf16_tflops is None:
        found.bf16_tflops = _matmul_flops(pick_dtype("auto", device), device) / 1e12
    if found.fp32_tflops is None:
        found.fp32_tflops = _matmul_flops(torch.float32, device) / 1e12
    return found


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second read and written by the best copy of a large tensor."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _best_seconds(lambda: target.copy_(source), device)


def _matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    side = SIDE[device.type]
    left = torch.ones((side, side), dtype=dtype, device=device)
    return 2.0 * side**3 / _best_seconds(lambda: left @ left, device)


def _best_seconds(action: Callable[[], object], device: torch.device) -> float:
    laps = []
    for _ in range(NUM_LAPS):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        laps.append(time.perf_counter() - start)
    return min(laps)
