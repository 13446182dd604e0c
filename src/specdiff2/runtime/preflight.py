"""``preflight=true``: what a run needs, from configurations alone, before anything is downloaded, loaded or sampled.

Builds one plan (a plain dictionary, ``preflight.json``) of memory per device, bounds and estimates of speed, expected
speed-up by the mean streak, hours, and warnings, and prints it. ``preflight=4.5`` plans for that mean streak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdiff2.runtime.build import instantiate
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.grid import all_methods
from specdiff2.runtime.machine_probe import complete
from specdiff2.runtime.preflight_advice import (
    PhaseOf,
    Room,
    Smaller,
    does_not_fit,
    placement_warnings,
    round_warnings,
    size_remedies,
    training_remedies,
    verifier_remedies,
)
from specdiff2.runtime.preflight_cluster import cluster_section
from specdiff2.runtime.preflight_memory import HELD_OUT, decoding_phase, held_out_phase, rollout_phase, training_phase
from specdiff2.runtime.preflight_sections import (
    alone_section,
    assumptions,
    decoding_sections,
    drafter_section,
    hours_section,
    phase_section,
    verifier_section,
)
from specdiff2.runtime.preflight_settings import (
    ASSUMED_PROMPT,
    DrafterSettings,
    TrainingSettings,
    VerifierSettings,
    read_drafter,
    read_training,
    read_verifier,
    rollout_length,
)
from specdiff2.runtime.preflight_speed import Method
from specdiff2.runtime.preflight_strategy import num_devices
from specdiff2.runtime.preflight_table import render
from specdiff2.runtime.provenance import write_json
from specdiff2.types import ConfigError

PLAN_FILE = "preflight.json"
POSITIVE = (
    "memory_gib", "bandwidth_gb_s", "bf16_tflops", "fp32_tflops", "bandwidth_share", "flops_share",
    "interconnect_gb_s", "network_gb_s", "communication_share",
)  # fmt: skip
Config = Mapping[str, Any]


def preflight(config: Config, script: str) -> None:
    """Print the plan of ``script`` (train or eval) and write it into the run folder.

    Raises:
        ConfigError, CorruptFileError: a model whose configuration is not at hand, or a setting that cannot be planned.
    """
    plan = make_plan(config, script)
    path = Path(config["paths"]["run"]) / PLAN_FILE
    write_json(path, plan)
    print(f"{render(plan)}\n\nplan: {path}")


def make_plan(config: Config, script: str) -> dict[str, Any]:
    """The plan as plain values; raises as ``preflight``."""
    hardware = read_hardware(config["hardware"], (config.get("trainer") or {}).get("devices", 1))
    verifier = read_verifier(config, hardware)
    drafter = read_drafter(config, verifier.shape, hardware)
    training = read_training(config, drafter, hardware) if script == "train" else None
    room = Room.of(hardware, training.num_nodes if training else 1)
    prompt, new = planned_lengths(config, script)
    methods = [Method("one draft", drafter.gamma, drafter.gamma + 1)]
    if script == "eval":
        methods = list(read_methods(config, drafter.gamma))
    phases = list(planned_phases(config, drafter, training, (prompt, new), methods))
    decoding = list(decoding_sections(config, hardware, verifier, drafter, methods, prompt + new // 2))
    warnings = list(placement_warnings(verifier, drafter, training, hardware))
    for phase_of, smaller in phases:
        warnings += phase_warnings(phase_of, smaller, verifier, drafter, training, room)
    for method, (_, cost) in zip(methods, decoding, strict=True):
        warnings += round_warnings(method.name, method.gamma, cost)
    context = verifier.shape.config.max_position_embeddings
    if prompt + new > context:
        warnings.append(f"{prompt} + {new} tokens are beyond the verifier's context of {context}")
    return {
        "format": 1,
        "script": script,
        "hardware": dataclasses.asdict(hardware),
        "verifier": verifier_section(verifier),
        "drafter": drafter_section(drafter, training),
        "assumptions": assumptions(prompt, new),
        "phases": [phase_section(phase_of(verifier), room) for phase_of, _ in phases],
        "verifier_alone": alone_section(config, hardware, verifier, prompt + new // 2),
        "decoding": [section for section, _ in decoding],
        "cluster": cluster_section(hardware, verifier, drafter, training) if training else None,
        "hours": hours_section(config, hardware, verifier, drafter, training, (prompt, new)) if training else {},
        "warnings": warnings,
    }


def read_hardware(section: Config, asked_devices: Any = 1) -> HardwareSection:
    """Section ``hardware``, completed on this machine where it leaves something open; another machine that is named
    without ``num_devices`` has as many as are asked for (``trainer.devices``).

    Raises:
        ConfigError: a peak or share that is not positive, or less memory than is kept free.
    """
    asked = HardwareSection(**section)
    if asked.name is not None and asked.num_devices is None:
        asked.num_devices = num_devices(asked_devices, asked)
    hardware = complete(asked)
    for name in POSITIVE:
        if not getattr(hardware, name) > 0.0:
            raise ConfigError(f"hardware.{name}={getattr(hardware, name)!r}: expected a number above 0")
    if hardware.memory_gib is not None and hardware.reserve_gib >= hardware.memory_gib:
        raise ConfigError(f"hardware.reserve_gib={hardware.reserve_gib}: expected less than hardware.memory_gib")
    return hardware


def planned_lengths(config: Config, script: str) -> tuple[int, int]:
    """(prompt tokens, new tokens) of the longest sequence that is planned for."""
    if script == "eval":
        return ASSUMED_PROMPT, config["max_new_tokens"]
    new = config["data"]["rollouts"]["max_new_tokens"]
    return max(rollout_length(config) - new, 1), new


def read_methods(config: Config, gamma: int) -> Iterator[Method]:
    """The speculative methods of an evaluation; transformers' own are not planned for."""
    for name, node in all_methods(config).items():
        settings = instantiate(node)
        if isinstance(settings, SamplerSettings):
            drafted, growth = settings.gamma or gamma, settings.growth()
            nodes = 1 + (settings.num_drafts * drafted if growth is None else growth.budget)
            yield Method(name, drafted, nodes, max(len(settings.entries()), 1), len(settings.drafter_names()))


def planned_phases(
    config: Config,
    drafter: DrafterSettings,
    training: TrainingSettings | None,
    lengths: tuple[int, int],
    methods: Sequence[Method],
) -> Iterator[tuple[PhaseOf, Smaller]]:
    """The phases of the run, each as a function of how the verifier is stored and placed, with smaller settings."""
    if training is None:
        nodes = max((method.num_nodes for method in methods), default=1)
        drafters = max((method.num_drafters for method in methods), default=1)
        yield lambda verifier: decoding_phase(verifier, drafter, *lengths, nodes, drafters), ()
        return
    batch = config["data"]["rollouts"]["batch_size"]
    smaller = [
        (f"data.rollouts.batch_size={size}", partial(rollout_phase, batch=size, prompt=lengths[0], new=lengths[1]))
        for size in (batch >> shift for shift in range(1, batch.bit_length()))
    ]
    if config.get("load_verifier", "auto") is not False:  # else rollouts are only read
        yield lambda verifier: rollout_phase(verifier, batch, *lengths), smaller
    yield lambda verifier: training_phase(verifier, drafter, training), ()
    if training.zero_stage == 3:
        yield lambda verifier: held_out_phase(verifier, drafter, training), ()


def phase_warnings(
    phase_of: PhaseOf,
    smaller: Smaller,
    verifier: VerifierSettings,
    drafter: DrafterSettings,
    training: TrainingSettings | None,
    room: Room,
) -> Iterator[str]:
    """One warning, with what would make the phase fit; none where it fits."""
    phase = phase_of(verifier)
    if room.fits(phase):
        return
    if phase.name == HELD_OUT:
        yield f"{does_not_fit(phase, room)}: does not fit; to evaluate and to save, each device must hold all weights"
        return
    trains = training if phase.name == "training" else None
    spread = verifier_remedies(verifier, phase_of, room, trains.num_ranks if trains else 1)
    remedies = [*size_remedies(verifier, smaller, room), *spread]
    if trains is not None:
        remedies = [*training_remedies(verifier, drafter, trains, room), *remedies]
    yield "; ".join([f"{does_not_fit(phase, room)}: does not fit", *(f"try {text}" for text in remedies)])
