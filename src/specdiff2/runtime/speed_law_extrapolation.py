"""Speed-ups of pairs that do not run here, from published bandwidth, arithmetic and model sizes. EXTRAPOLATED.

Nothing here was measured on the hardware it speaks of: each row says so in its ``label``. It is preflight's roofline
(``runtime.preflight_speed``, ``evaluation.cost_model``) with the mean streak left open, so two questions can be asked:
what a streak would gain, and which streak a stated gain would need. No model is loaded.

Stated gains: *SpecDiff-2*, arXiv 2511.00606: 4.2x on average and up to 5.5x over the verifier alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from specdiff2.evaluation.cost_model import RoundCost
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight import read_hardware
from specdiff2.runtime.preflight_advice import GIB, Room
from specdiff2.runtime.preflight_memory import decoding_phase
from specdiff2.runtime.preflight_settings import DrafterSettings, VerifierSettings, read_drafter, read_verifier
from specdiff2.runtime.preflight_speed import Method, round_cost, speed_of
from specdiff2.runtime.speed_law_settings import SpeedLawSection
from specdiff2.types import ConfigError

LABEL = "extrapolated"
STATED_GAINS = {"paper, mean": 4.2, "paper, best": 5.5}  # arXiv 2511.00606
STREAKS = tuple(range(2, 13))
DTYPE = "bfloat16"
Row = dict[str, Any]


def extrapolate(section: SpeedLawSection) -> Row:
    """Rows for every hardware, number of devices, attention of the drafter and number of drafts.

    Raises:
        ConfigError: an unknown model or attention, or hardware without peaks.
    """
    known = ("bidirectional", "causal_prefix")
    for attention in section.attention:
        if attention not in known:
            raise ConfigError(f"speed_law.attention holds {attention!r}: expected some of {', '.join(known)}")
    hardware = {name: read_hardware(node) for name, node in section.hardware.items()}
    return {
        "label": LABEL,
        "stated_gains": STATED_GAINS,
        "assumptions": _assumptions(section, hardware),
        "hardware": {name: asdict(one) for name, one in hardware.items()},
        "rows": [row for name, one in hardware.items() for row in _rows(section, name, one)],
    }


def streak_for(gain: float, cost_at: Any, gamma: int) -> float | None:
    """The mean streak at which ``cost_at(streak)`` gives a speed-up of ``gain``; None where no full window does."""

    def enough(streak: float) -> bool:
        return bool(cost_at(streak).speedup(streak + 1.0) >= gain)

    low, high = 0.0, float(gamma)
    if not enough(high):
        return None
    for _ in range(50):  # the speed-up rises with the streak: halve
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _rows(section: SpeedLawSection, name: str, hardware: HardwareSection) -> Iterator[Row]:
    whole, published = _models(section, hardware)
    choices = itertools.product(section.num_devices, section.attention, section.num_drafts)
    for num_devices, attention, num_drafts in choices:
        verifier = whole.spread("tensors", num_devices)
        drafter = replace(published, attention=attention)
        method = Method(f"K={num_drafts}", section.gamma, 1 + num_drafts * section.gamma)
        yield {
            "label": LABEL, "hardware": name, "device": hardware.name, "num_devices": num_devices,
            "attention": attention, "num_drafts": num_drafts, "gamma": section.gamma, "num_nodes": method.num_nodes,
            **_memory(section, verifier, drafter, method, replace(hardware, num_devices=num_devices)),
            **_gains(section, verifier, drafter, method, hardware),
        }  # fmt: skip


def _models(section: SpeedLawSection, hardware: HardwareSection) -> tuple[VerifierSettings, DrafterSettings]:
    """The verifier whole, the drafter as published."""
    verifier = read_verifier({"verifier": {"source": section.verifier, "dtype": DTYPE}}, hardware)
    node = {
        "_target_": "specdiff2.models.masked_lm_loading.masked_lm_drafter", "source": section.drafter,
        "gamma": section.gamma, "dtype": DTYPE,
    }  # fmt: skip
    return verifier, read_drafter({"model": node}, verifier.shape, hardware)


def _memory(
    section: SpeedLawSection, verifier: VerifierSettings, drafter: DrafterSettings, method: Method,
    hardware: HardwareSection,
) -> Row:  # fmt: skip
    """What the fullest device holds. Speeds are told all the same: they say what a smaller number format would reach
    at best."""
    phase = decoding_phase(verifier, drafter, section.context, 0, method.num_nodes)
    return {"memory_gib": phase.total / GIB, "fits": Room.of(hardware).fits(phase)}


def _gains(
    section: SpeedLawSection, verifier: VerifierSettings, drafter: DrafterSettings, method: Method,
    hardware: HardwareSection,
) -> Row:  # fmt: skip
    speed = speed_of(hardware, DTYPE, peak=False, compiled=True)

    def cost_at(streak: float) -> RoundCost:
        other_s = hardware.round_overhead_ms / 1e3
        return round_cost(verifier, drafter, method, section.context, streak, speed, other_s)

    cost = cost_at(float(STREAKS[0]))
    streaks = [streak for streak in STREAKS if streak <= section.gamma]
    return {
        "step_ms": 1e3 * cost.baseline_s,
        "draft_ms": 1e3 * cost.draft_s,
        "verify_ms": 1e3 * cost.verify_s,
        "other_ms": 1e3 * cost.other_s,
        "speedups": [{"streak": s, "speedup": cost_at(float(s)).speedup(s + 1.0), "label": LABEL} for s in streaks],
        "streak_needed": {name: streak_for(gain, cost_at, section.gamma) for name, gain in STATED_GAINS.items()},
    }


def _assumptions(section: SpeedLawSection, hardware: Mapping[str, HardwareSection]) -> list[str]:
    shares = [
        f"{one.name}: {one.bandwidth_gb_s:g} GB/s and {one.bf16_tflops:g} TFLOPS published, of which "
        f"{one.bandwidth_share:g} and {one.flops_share:g} are reached; {one.round_overhead_ms:g} ms of a round outside "
        "both models"
        for one in hardware.values()
    ]
    return [
        f"{section.verifier} in {DTYPE}, every layer split over the devices; {section.drafter} whole on each",
        f"{section.context} tokens in the cache, windows of {section.gamma}, one denoising pass, one sequence",
        "K drafts share no token: 1 + K gamma nodes, the dearest tree",
        "passes are launched as compiled graphs: no time in Python",
        "the mean streak is free: no drafter was trained or measured on these models here",
        *shares,
    ]
