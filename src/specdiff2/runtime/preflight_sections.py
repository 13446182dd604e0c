"""Sections of a preflight plan as plain values: models, phases, decoding, hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdiff2.evaluation.cost_model import RoundCost, pass_seconds, standard_streaks
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_advice import GIB, Room
from specdiff2.runtime.preflight_cluster import step_of
from specdiff2.runtime.preflight_memory import Phase
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, VerifierSettings
from specdiff2.runtime.preflight_speed import (
    Method,
    count_prompts,
    rollout_seconds,
    round_cost,
    speed_of,
    verifier_pass,
)

Config = Mapping[str, Any]
_SPREAD = {
    "none": "on one device",
    "layers": "layers spread over {} devices (device_map)",
    "tensors": "every layer split over {} devices (tp_plan)",
}


def verifier_section(verifier: VerifierSettings) -> dict[str, Any]:
    """Sizes of the verifier and how it is stored."""
    bits = f", {verifier.quantization} weights" if verifier.quantization else ""
    return {
        "source": verifier.shape.name,
        "shape_from": verifier.shape.origin,
        "parameters": verifier.shape.num_parameters,
        "dtype": verifier.dtype,
        "quantization": verifier.quantization,
        "split": verifier.split,
        "num_devices": verifier.num_shards,
        "weights_gib": verifier.weight_bytes / GIB,
        "kv_mib_per_token": verifier.shape.kv_bytes(verifier.dtype, 1) / 2**20,
        "told": _SPREAD[verifier.split].format(verifier.num_shards) + bits,
    }


def drafter_section(drafter: DrafterSettings, training: TrainingSettings | None) -> dict[str, Any]:
    """Sizes of the drafter and what of it trains."""
    way = "all weights train" if drafter.lora is None else f"adapters of rank {drafter.lora['rank']} train"
    ranks = f", strategy {training.strategy} on {training.num_ranks} rank(s)" if training else ""
    return {
        "source": drafter.shape.name,
        "shape_from": drafter.shape.origin,
        "parameters": drafter.shape.num_parameters,
        "trained_parameters": drafter.num_trained,
        "kind": drafter.kind,
        "attention": drafter.attention,
        "gamma": drafter.gamma,
        "dtype": drafter.weights,
        "weights_gib": drafter.shape.weight_bytes(drafter.weights) / GIB,
        "kv_mib_per_token": drafter.shape.kv_bytes(drafter.weights, 1) / 2**20 if drafter.has_own_cache else 0.0,
        "strategy": None if training is None else training.strategy,
        "told": f"{drafter.attention} attention, gamma {drafter.gamma}, {way}{ranks}",
    }


def phase_section(phase: Phase, room: Room) -> dict[str, Any]:
    """Memory of one phase in GiB: the fullest device item by item, the first and the others in one number each."""
    return {
        "name": phase.name,
        "num_devices": phase.num_devices,
        "items_gib": {name: size / GIB for name, size in phase.items.items()},
        "total_gib": phase.total / GIB,
        "first_gib": sum(phase.first.values()) / GIB,
        "others_gib": sum(phase.others.values()) / GIB if phase.num_devices > 1 else None,
        "available_gib": room.bytes_each / GIB,
        "fits": room.fits(phase),
    }


def decoding_sections(
    config: Config,
    hardware: HardwareSection,
    verifier: VerifierSettings,
    drafter: DrafterSettings,
    methods: Sequence[Method],
    context: int,
) -> Iterator[tuple[dict[str, Any], RoundCost]]:
    """For each method its stages, then expected speed-up and tokens a second by mean streak; and its last cost."""
    peak, real = _speeds(config, hardware, verifier.dtype)
    for method in methods:
        asked = config["preflight"]
        streaks = standard_streaks(method.gamma) if isinstance(asked, bool) else [min(float(asked), method.gamma)]
        rows = []
        for streak in streaks:
            cost = round_cost(verifier, drafter, method, context, streak, real, hardware.round_overhead_ms / 1e3)
            bound = round_cost(verifier, drafter, method, context, streak, peak, 0.0)
            rows.append({
                "streak": streak,
                "tau": streak + 1.0,
                "speedup": cost.speedup(streak + 1.0),
                "tokens_per_s_estimate": (streak + 1.0) / cost.round_s,
                "tokens_per_s_bound": (streak + 1.0) / bound.round_s,
            })  # fmt: skip
        yield (
            {
                "name": method.name,
                "gamma": method.gamma,
                "num_nodes": method.num_nodes,
                "draft_ms": cost.draft_s * 1e3,
                "verify_ms": cost.verify_s * 1e3,
                "other_ms": cost.other_s * 1e3,
                "break_even_streak": cost.break_even_streak,
                "rows": rows,
            },
            cost,
        )


def alone_section(
    config: Config, hardware: HardwareSection, verifier: VerifierSettings, context: int
) -> dict[str, float]:
    """Tokens a second of the verifier alone: estimate and bound."""
    forward = verifier_pass(verifier, 1, context)
    peak, real = _speeds(config, hardware, verifier.dtype)
    return {
        "tokens_per_s_estimate": 1.0 / pass_seconds(forward, real),
        "tokens_per_s_bound": 1.0 / pass_seconds(forward, peak),
    }


def hours_section(
    config: Config,
    hardware: HardwareSection,
    verifier: VerifierSettings,
    drafter: DrafterSettings,
    training: TrainingSettings,
    lengths: tuple[int, int],
) -> dict[str, float | None]:
    """Estimated hours of sampling rollouts (where the configuration tells the number of prompts; none where they are
    only read) and of training, exchanges not hidden."""
    step = step_of(drafter, training, hardware)
    trained = {f"training {training.max_steps} steps": training.max_steps * step.bounds_s[1] / 3600}
    if config.get("load_verifier", "auto") is False:
        return dict(trained)
    data = config["data"]
    rollouts = data["rollouts"]
    counts = [count_prompts(data[f"{split}_prompts"]) for split in ("train", "val")]
    hours: dict[str, float | None] = {"sampling all rollouts": None}
    if None not in counts:
        num = sum(count for count in counts if count is not None) * rollouts["samples_per_prompt"]
        speed = speed_of(hardware, verifier.dtype, peak=False)
        seconds = rollout_seconds(verifier, num, rollouts["batch_size"], *lengths, speed)
        hours = {f"sampling {num} rollouts": seconds / 3600}
    return {**hours, **trained}


def assumptions(prompt: int, new: int) -> list[str]:
    """What the plan takes for granted."""
    return [
        f"prompts of up to {prompt} tokens and {new} new ones",
        "bounds at the device's peaks, estimates at hardware.bandwidth_share and flops_share of them",
        "weights spread evenly over devices",
        "exchanges over rings at hardware.communication_share of interconnect_gb_s and network_gb_s",
        "updates of offloaded optimizer states on the CPU not counted",
    ]


def _speeds(config: Config, hardware: HardwareSection, dtype: str) -> list[Any]:
    compiled = bool((config.get("runtime") or {}).get("compile"))
    return [speed_of(hardware, dtype, peak=peak, compiled=compiled) for peak in (True, False)]
