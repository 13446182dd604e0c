"""What training over several devices and nodes costs: bytes exchanged in a step, seconds, host memory, GPU-hours.

Volumes are those of ZeRO (arXiv 1910.02054, section 7): a ring of N devices moves (N - 1) / N of a tensor through each
device to gather or to reduce-scatter it, and twice that to all-reduce it. Within a node a device sends at
``hardware.interconnect_gb_s``; across nodes a ring leaves each node through one network adapter and there is one ring
per adapter, so ``devices of a node * hardware.network_gb_s`` bounds it too. Exchanges that hide behind arithmetic cost
nothing, others all of their time: both bounds are told. It knows no configuration file and prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdiff2.models.model_shapes import dtype_bytes
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_advice import GIB, Room
from specdiff2.runtime.preflight_memory import held_out_phase, host_bytes, num_frozen, own_width, training_phase
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, VerifierSettings
from specdiff2.runtime.preflight_speed import speed_of, step_seconds

NODES = (1, 2, 4, 8)
# "at most 75 GPU-hours" of alignment (arXiv 2511.00606, quoted in issue 6), taken for the 60,000 steps planned here.
# How many windows one of its steps holds could not be looked up: stored copies have only the beginning of the text.
PAPER_GPU_HOURS, PAPER_STEPS = 75.0, 60_000


@dataclass(frozen=True)
class Step:
    """One optimizer step: seconds of arithmetic and of exchanges."""

    compute_s: float
    exchange_s: float

    @property
    def bounds_s(self) -> tuple[float, float]:
        """With all exchanges hidden behind the arithmetic, and with none."""
        return max(self.compute_s, self.exchange_s), self.compute_s + self.exchange_s


def exchanged_bytes(drafter: DrafterSettings, training: TrainingSettings) -> dict[str, float]:
    """Bytes that each device sends in one optimizer step, by kind; empty on one device.

    Gradients are exchanged once a step under DDP and ZeRO-1, after every micro-batch where they are partitioned. ZeRO-3
    and FSDP gather all weights, frozen ones too, for the forward and again for the backward pass. Gradients are of
    float32 weights under DDP and summed in float32 under FSDP, of DeepSpeed's bfloat16 copies otherwise.
    """
    ranks, stage, times = training.num_ranks, training.zero_stage, training.accumulate
    width = dtype_bytes(training.compute)
    moved = (ranks - 1) / ranks
    gradients = moved * drafter.num_trained * own_width(training)
    if ranks == 1:
        return {}
    if not stage:
        return {"all-reduce of gradients": 2 * gradients}
    if stage < 3:
        reduced = gradients * (times if stage == 2 else 1)
        return {"reduce-scatter of gradients": reduced, "all-gather of new weights": gradients}
    weights = moved * (drafter.num_trained + num_frozen(drafter)) * width
    return {"all-gather of weights": 2 * times * weights, "reduce-scatter of gradients": times * gradients}


def exchange_seconds(num_bytes: float, hardware: HardwareSection, training: TrainingSettings) -> float:
    """Seconds of exchanges of ``num_bytes`` through each device."""
    speed = hardware.interconnect_gb_s
    if training.num_nodes > 1:
        speed = min(speed, training.ranks_per_node * hardware.network_gb_s)
    return num_bytes / (speed * 1e9 * hardware.communication_share)


def step_of(drafter: DrafterSettings, training: TrainingSettings, hardware: HardwareSection) -> Step:
    """Seconds of one step at the shares of the peaks that are reached in practice."""
    compute = step_seconds(drafter, training, speed_of(hardware, training.compute, peak=False))
    moved = sum(exchanged_bytes(drafter, training).values())
    return Step(compute, exchange_seconds(moved, hardware, training))


def cluster_section(
    hardware: HardwareSection, verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings
) -> dict[str, Any] | None:
    """The step of the configured nodes in detail, the same step on 1, 2, 4 and 8 nodes, and the paper's number; None
    where one device trains."""
    if training.num_ranks == 1:
        return None
    moved = exchanged_bytes(drafter, training)
    rows = [
        node_row(hardware, verifier, drafter, replace(training, num_nodes=n, num_ranks=n * training.ranks_per_node))
        for n in sorted({*NODES, training.num_nodes})
    ]
    here = next(row for row in rows if row["num_nodes"] == training.num_nodes)
    return {
        "strategy": training.strategy,
        "num_nodes": training.num_nodes,
        "ranks_per_node": training.ranks_per_node,
        "exchanges": {
            name: {"gb": size / 1e9, "seconds": exchange_seconds(size, hardware, training)}
            for name, size in moved.items()
        },
        "verifier": _verifier_told(verifier, training),
        "max_steps": training.max_steps,
        "rollout_tokens": training.length,
        "nodes": rows,
        "paper": paper_section(here),
    }


def node_row(
    hardware: HardwareSection, verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings
) -> dict[str, Any]:
    """Memory, seconds and hours of ``max_steps`` on so many nodes; every device keeps its own micro-batch."""
    phases, step = [training_phase(verifier, drafter, training)], step_of(drafter, training, hardware)
    if training.zero_stage == 3:
        phases.append(held_out_phase(verifier, drafter, training))
    fullest = max(phase.total for phase in phases)
    hours = [training.max_steps * seconds / 3600 for seconds in step.bounds_s]
    windows = training.batch_size * training.windows_per_rollout * training.accumulate * training.num_ranks
    return {
        "num_nodes": training.num_nodes,
        "num_gpus": training.num_ranks,
        "gib_each": fullest / GIB,
        "fits": fullest <= Room.of(hardware).bytes_each,
        "host_gib_per_node": host_bytes(drafter, training) / GIB,
        "exchanged_gb": sum(exchanged_bytes(drafter, training).values()) / 1e9,
        "compute_s": step.compute_s,
        "exchange_s": step.exchange_s,
        "step_s": list(step.bounds_s),
        "windows_per_step": windows,
        "hours": hours,
        "gpu_hours": [training.num_ranks * value for value in hours],
    }


def paper_section(row: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's GPU-seconds a step beside ours, and how many of our windows a step of that cost would hold."""
    allowed = PAPER_GPU_HOURS * 3600 / PAPER_STEPS
    ours = [row["num_gpus"] * seconds for seconds in row["step_s"]]
    return {
        "gpu_hours": PAPER_GPU_HOURS,
        "steps": PAPER_STEPS,
        "gpu_seconds_per_step": allowed,
        "our_gpu_seconds_per_step": ours,
        "our_gpu_hours": [PAPER_STEPS * seconds / 3600 for seconds in ours],
        "windows_at_that_cost": [row["windows_per_step"] * allowed / seconds for seconds in reversed(ours)],
    }


def _verifier_told(verifier: VerifierSettings, training: TrainingSettings) -> str:
    if not training.verifier_stays:
        return "not on the devices while training"
    whole = verifier.num_shards == 1
    return "whole on every device" if whole else f"spread over {verifier.num_shards} devices by every rank"
