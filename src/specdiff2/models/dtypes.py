"""Which number format to run in, from what the hardware can do. Reports it; never changes a model."""

from __future__ import annotations

from pathlib import Path

import torch

from specdiff2.types import ConfigError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


def pick_dtype(name: str | torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """``auto``: bfloat16 where the device multiplies it natively (AMX or AVX-512-BF16 CPUs, CUDA), else float32.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        device = torch.device(device)
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
        flags = _cpu_field("flags", _CPUINFO).split() if device.type == "cpu" else []
        return torch.bfloat16 if any(flag in flags for flag in _BF16_FLAGS) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(name: str | torch.device) -> torch.device:
    """``auto``: the GPU if torch sees one, else the CPU.

    Raises:
        ConfigError: not a device of torch, or a GPU that torch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={str(name)!r}: expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={str(name)!r}: torch sees {torch.cuda.device_count()} CUDA devices; use device=auto or cpu, or "
            "install a torch build with CUDA"
        )
    return device


def describe_cpu() -> dict[str, str | bool | int]:
    """Facts that decide CPU speed: ``model``, ``amx_bf16``, ``avx512_bf16`` and torch's ``threads``.

    On systems without /proc/cpuinfo the model is "unknown" and the flags are False.
    """
    flags = _cpu_field("flags", _CPUINFO).split()
    return {
        "model": _cpu_field("model name", _CPUINFO) or "unknown",
        **{flag: flag in flags for flag in _BF16_FLAGS},
        "threads": torch.get_num_threads(),
    }


_CPUINFO = Path("/proc/cpuinfo")


def _cpu_field(field: str, path: Path) -> str:
    """Value of the first ``field : value`` line; "" where the file or the field is missing."""
    if not path.is_file():
        return ""
    for line in path.read_text(encoding="utf-8").split("\n"):
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return ""
