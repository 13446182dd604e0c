"""Seconds of passes and rounds, bounds on tokens a second, expected speed-ups, and hours of a run.

Bounds use the device's peaks and nothing else: no program on it can be faster. Estimates use the shares of the peaks
that are reached in practice and the time Python needs, and are labelled so. Arithmetic: ``evaluation.cost_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdiff2.evaluation.cost_model import Pass, RoundCost, Speed, pass_seconds
from specdiff2.models.model_shapes import dtype_bytes
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_memory import packed_size
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, VerifierSettings


@dataclass(frozen=True)
class Method:
    """What one way of decoding asks of a round: drafted positions, nodes that are scored (root included), drafts made
    apart (``num_passes``), and by how many models; each of several is planned as large as that of section ``model``."""

    name: str
    gamma: int
    num_nodes: int
    num_passes: int = 1
    num_drafters: int = 1


def speed_of(hardware: HardwareSection, dtype: str, *, peak: bool, compiled: bool = False) -> Speed:
    """The device at its peaks, or as it is reached in practice; ``compiled`` passes are not launched layer by layer."""
    tflops = hardware.fp32_tflops if dtype in ("float32", "float64") else hardware.bf16_tflops
    assert tflops is not None and hardware.bandwidth_gb_s is not None  # machine_probe.complete has filled them in
    flops, bandwidth = tflops * 1e12, hardware.bandwidth_gb_s * 1e9
    if peak:
        return Speed(bandwidth, flops)
    overhead = 0.0 if compiled else hardware.layer_overhead_ms / 1e3
    return Speed(
        bandwidth * hardware.bandwidth_share, flops * hardware.flops_share, overhead, hardware.all_reduce_ms / 1e3
    )


def verifier_pass(verifier: VerifierSettings, num_tokens: int, context: int, batch: int = 1) -> Pass:
    """One pass over ``num_tokens`` new tokens of each of ``batch`` sequences behind ``context`` cached ones.

    Layers spread over devices (device_map) work one after the other, so only a tensor-parallel pass counts its shards.
    """
    shape = verifier.shape
    read = shape.read_bytes(verifier.dtype, verifier.quantization) + batch * shape.kv_bytes(verifier.dtype, context)
    flops = batch * num_tokens * shape.token_flops(context)
    shards = verifier.num_shards if verifier.split == "tensors" else 1
    return Pass(read, flops, shape.num_layers, shards)


def draft_pass(drafter: DrafterSettings, verifier: VerifierSettings, gamma: int, context: int, streak: float) -> Pass:
    """One denoising pass over a window of ``gamma`` behind ``context`` tokens, on one device, in the verifier's dtype.

    A bidirectional drafter computes the whole context again; one with a cache only the ``streak + 1`` new tokens.
    """
    shape, dtype = drafter.shape, verifier.dtype
    new = {"bidirectional": float(context), "causal_prefix": streak + 1.0, "verifier_kv": 0.0}[drafter.attention]
    head = drafter.draft_vocab * shape.hidden_size
    per_token = shape.layer_flops(context)
    cached = 0.0 if drafter.attention == "bidirectional" else shape.kv_bytes(dtype, context)
    return Pass(
        read_bytes=shape.layer_bytes(dtype) + head * dtype_bytes(dtype) + cached,
        flops=(new + gamma) * per_token + 2.0 * gamma * head,
        num_layers=shape.num_layers,
    )


def round_cost(
    verifier: VerifierSettings, drafter: DrafterSettings, method: Method, context: int, streak: float,
    speed: Speed, other_s: float,
) -> RoundCost:  # fmt: skip
    """Seconds of one round of ``method`` with ``streak`` accepted tokens."""
    steps, positions = min(drafter.denoising_steps, method.gamma), method.gamma
    if drafter.kind == "eagle":  # a pass for every level of its tree
        steps, positions = method.gamma, -(-(method.num_nodes - 1) // method.gamma)
    draft = draft_pass(drafter, verifier, positions, context, streak)
    return RoundCost(
        baseline_s=pass_seconds(verifier_pass(verifier, 1, context), speed),
        draft_s=method.num_passes * steps * pass_seconds(draft, speed),
        verify_s=pass_seconds(verifier_pass(verifier, method.num_nodes, context), speed),
        other_s=other_s,
    )


def count_prompts(node: Any) -> int | None:
    """Prompts of a section of sources by their ``num_prompts`` or ``limit``; None where one says neither."""
    if not isinstance(node, Mapping):
        return None
    for key in ("num_prompts", "limit"):
        if isinstance(node.get(key), int):
            return int(node[key])
    parts = node.get("sources")
    if isinstance(parts, Mapping):
        counts = [count_prompts(part) for part in parts.values()]
        return None if None in counts else sum(c for c in counts if c is not None)
    return None


def rollout_seconds(
    verifier: VerifierSettings, num_rollouts: int, batch: int, prompt: int, new: int, speed: Speed
) -> float:
    """Sampling ``num_rollouts`` of the full length, ``batch`` at a time; shorter ones end earlier."""
    num_batches = -(-num_rollouts // batch)
    prefill = pass_seconds(verifier_pass(verifier, prompt, prompt, batch), speed)
    step = pass_seconds(verifier_pass(verifier, 1, prompt + new // 2, batch), speed)
    return num_batches * (prefill + new * step)


def step_seconds(drafter: DrafterSettings, training: TrainingSettings, speed: Speed) -> float:
    """Computing one optimizer step: forward, backward for inputs, backward for what trains, and recomputation."""
    rows, columns, keys = packed_size(drafter, training)
    shape = drafter.shape
    forward = shape.layer_flops(keys)
    trained = forward if drafter.lora is None else 2.0 * drafter.num_trained
    passes = (3.0 if drafter.gradient_checkpointing else 2.0) * forward + trained
    head = 3 * 2.0 * drafter.draft_vocab * shape.hidden_size
    windows = training.batch_size * training.windows_per_rollout
    flops = rows * columns * passes + windows * drafter.gamma * head
    launches = 4 * shape.num_layers * speed.layer_overhead_s
    return training.accumulate * max(flops / speed.flops, launches)
