"""Section ``trainer``: what cannot work is refused before any model loads, what can becomes Lightning's Trainer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdiff2.models.placement import AUTOMATIC
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.config_schema import locate
from specdiff2.runtime.preflight_strategy import strategy_name
from specdiff2.training import ds_cpu
from specdiff2.training.checkpoint_io import WholeFiles
from specdiff2.training.slurm_environment import cluster_plugins
from specdiff2.training.strategies import REFUSALS
from specdiff2.types import ConfigError

INSTEAD_OF_LIGHTNINGS = {"deepspeed": "deepspeed_zero2 (or 1, 3)", "fsdp": "fsdp", "modelparallel": "fsdp"}


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Refuse combinations that fail later, or that would train something else; then try the whole section once.

    Raises:
        ConfigError: names the key and what to set instead.
    """
    strategy, accelerator = trainer.get("strategy", "auto"), trainer.get("accelerator", "auto")
    kind = strategy_name(strategy)
    if isinstance(strategy, str) or kind not in ("deepspeed", "fsdp"):  # ours are nodes
        for name, ours in INSTEAD_OF_LIGHTNINGS.items():
            if name in kind:
                raise ConfigError(f"trainer.strategy={strategy}: Lightning's own averages otherwise than over windows, "
                                  f"or writes checkpoints that fit no other strategy; use trainer={ours}")  # fmt: skip
    if kind == "deepspeed":
        _check_deepspeed(trainer, strategy)
    elif accelerator == ds_cpu.NAME:
        raise ConfigError(f"trainer.accelerator={ds_cpu.NAME} is for DeepSpeed on CPU processes: choose "
                          "trainer=deepspeed_zero2 (or 1, 3), or trainer.accelerator=cpu")  # fmt: skip
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"trainer.accelerator={accelerator}: torch sees no CUDA device here; use trainer=cpu, or "
                          "preflight=true to plan for another machine")  # fmt: skip
    build(trainer)


def _check_deepspeed(trainer: Mapping[str, Any], strategy: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("trainer=deepspeed_...: the package deepspeed is missing: pip install 'specdiff2[deepspeed]'")
    stage, offload = strategy.get("stage", 2), ("offload_optimizer", "offload_parameters")
    offloaded = [name for name in offload if strategy.get(name)]
    accelerator, precision = trainer.get("accelerator"), str(trainer.get("precision"))
    if stage not in (1, 2, 3):
        raise ConfigError(f"trainer.strategy.stage={stage!r}: expected 1, 2 or 3")
    if "offload_parameters" in offloaded and stage != 3:
        raise ConfigError(f"trainer.strategy.offload_parameters=true with stage={stage}: only stage 3 partitions "
                          "weights; use trainer=deepspeed_zero3_offload")  # fmt: skip
    if accelerator == "cpu":
        raise ConfigError(f"trainer=deepspeed_... on the CPU: set trainer.accelerator={ds_cpu.NAME} (the real engine "
                          "on CPU processes), or use trainer=ddp")  # fmt: skip
    if accelerator == ds_cpu.NAME and offloaded:
        raise ConfigError(f"trainer.strategy.{offloaded[0]}=true with trainer.accelerator={ds_cpu.NAME}: all of it is "
                          "in main memory anyway; use the same stage without offload")  # fmt: skip
    if precision not in ("32-true", "32", "bf16-mixed", "bf16-true"):
        raise ConfigError(f"trainer.precision={precision} with DeepSpeed: expected bf16-mixed or 32-true (the loss "
                          "scale that float16 needs is what divides by the windows)")  # fmt: skip
    if trainer.get("gradient_clip_algorithm") == "value":
        raise ConfigError("trainer.gradient_clip_algorithm=value: DeepSpeed clips by norm; set it to norm")


def check_placement(config: Mapping[str, Any]) -> None:
    """Raises ConfigError: several processes that would each spread the verifier over all GPUs of the machine."""
    device_map, trainer = config["verifier"].get("device_map"), config["trainer"]
    if isinstance(device_map, str) and device_map in AUTOMATIC and num_processes(trainer) > 1:
        raise ConfigError(
            f"verifier.device_map={device_map} spreads one verifier over all GPUs, and trainer.devices="
            f"{trainer['devices']} processes would each do so. Either sample the rollouts first (rollout.py) and train "
            "without it: load_verifier=false data.folder=... (objectives that read no verifier probabilities, drafters "
            "with weights of their own); or one process: trainer.devices=1; or a verifier that fits on each GPU: "
            "verifier.device_map=null"
        )


def num_processes(trainer: Mapping[str, Any]) -> int:
    """Of one machine."""
    devices = trainer.get("devices", 1)
    return len(devices) if isinstance(devices, list | tuple) else int(devices)


def build(trainer: Mapping[str, Any], folder: Path | None = None, **parts: Any) -> Any:
    """Lightning's Trainer; ``parts``: its callbacks and loggers.

    Raises:
        ConfigError: a combination that Lightning refuses.
    """
    if trainer.get("accelerator") == ds_cpu.NAME:
        ds_cpu.prepare()
    settings = {key: instantiate(value) if _is_node(value) else value for key, value in trainer.items()}
    make = locate(settings.pop("_target_"), "trainer")
    settings |= {"logger": False, "plugins": [WholeFiles(), *cluster_plugins()]} | parts
    try:
        return make(**settings, default_root_dir=None if folder is None else str(folder))
    except REFUSALS as error:
        raise ConfigError(f"trainer: {error}") from error


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
