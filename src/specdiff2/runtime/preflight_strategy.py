"""How a run trains, read from section ``trainer``: which strategy, on how many devices, in which precision.

Knows Lightning's names and the nodes of conf/trainer; builds no strategy, so it needs neither DeepSpeed nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.types import ConfigError

BUCKET = 200_000_000  # numbers that DeepSpeed reduces, or gathers, at once: Lightning's defaults


def num_devices(value: Any, hardware: HardwareSection) -> int:
    """Lightning's ``devices``: a number, a list of indices, or ``auto`` / -1 for all."""
    if isinstance(value, list | tuple):
        return len(value)
    if value in ("auto", -1, "-1"):
        return int(hardware.num_devices or 1)
    return int(value)


def read_strategy(value: Any, num_ranks: int) -> str:
    """``one``, ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``fsdp`` from Lightning's ``strategy``, a text or a node.

    Raises:
        ConfigError: another kind.
    """
    name = strategy_name(value)
    if "deepspeed" in name:
        named = next((int(digit) for digit in "123" if f"stage_{digit}" in name), 2)
        stage = value.get("stage", 2) if isinstance(value, Mapping) else named
        return f"zero{stage}" if stage else "ddp"
    if "fsdp" in name:
        return "fsdp"
    if name == "auto" or "ddp" in name or "single" in name:
        return "ddp" if num_ranks > 1 else "one"
    raise ConfigError(f"trainer.strategy={value!r}: preflight knows auto, ddp, fsdp and deepspeed_stage_1, 2 and 3")


def read_offload(value: Any) -> tuple[bool, bool]:
    """Whether (optimizer states, weights) lie in the host's memory."""
    if isinstance(value, Mapping):
        both = bool(value.get("cpu_offload"))  # FSDP's
        return both or bool(value.get("offload_optimizer")), both or bool(value.get("offload_parameters"))
    name = strategy_name(value)
    return "offload" in name, "offload" in name and "stage_2" not in name


def strategy_name(value: Any) -> str:
    """Lower case: the text itself, or the class that a node names, without its package."""
    target = value.get("_target_", "") if isinstance(value, Mapping) else value
    return str(target).rpartition(".")[2].lower()


def read_precision(value: Any, hardware: HardwareSection) -> tuple[str, bool]:
    """(dtype of products, whether weights are wider than that)."""
    if value == "auto":
        value = "bf16-mixed" if auto_dtype("auto", hardware) == "bfloat16" else "32-true"
    known = {
        "bf16-mixed": ("bfloat16", True), "16-mixed": ("float16", True), "bf16-true": ("bfloat16", False),
        "16-true": ("float16", False), "32-true": ("float32", False), "64-true": ("float64", False),
    }  # fmt: skip
    if str(value) not in known:
        raise ConfigError(f"trainer.precision={value!r}: preflight knows {', '.join(known)}")
    return known[str(value)]


def auto_dtype(name: str, hardware: HardwareSection) -> str:
    """``auto``: bfloat16 where the planned device multiplies it faster than float32, as ``models.dtypes`` decides."""
    if name != "auto":
        return name
    return "bfloat16" if (hardware.bf16_tflops or 0.0) > (hardware.fp32_tflops or 0.0) else "float32"
