"""Validation of a composed configuration before any model loads.

Constructor signatures are the schema: a mapping with ``_target_`` is checked against
``inspect.signature`` of what it names, the top level and the plain sections against the dataclasses
below. Knows nothing of Hydra: it gets a plain, resolved dictionary.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdiff2.evaluation.budgeted_settings import BudgetSection
from specdiff2.runtime.speed_law_settings import SpeedLawSection
from specdiff2.types import ConfigError

Node = Mapping[str, Any]
HYDRA_KEYS = frozenset({"_target_", "_partial_", "_convert_", "_recursive_", "_args_"})

# smallest allowed value by the last part of a key, wherever it stands
MINIMUM: dict[str, float] = {
    "gamma": 1, "K": 1, "num_drafts": 1, "max_steps": 1, "num_prompts": 1, "batch_size": 1, "max_new_tokens": 1,
    "num_layers": 1, "denoising_steps": 1, "windows_per_rollout": 1, "samples_per_prompt": 1, "num_warmup": 0,
    "seed": 0, "threads": 1, "prefix_loss_weight": 0.0, "temperature": 0.0, "top_k": 0, "lr": 0.0,
    "weight_decay": 0.0, "warmup_steps": 0, "steps": 1, "hang_timeout_s": 1, "concurrency": 1, "max_retries": 0,
    "timeout_s": 0.1, "warmup_share": 0.0, "every_n_steps": 1, "accumulate_grad_batches": 1, "limit": 1,
    "draft_vocab_size": 1, "num_probe_prompts": 1, "loss_chunk_windows": 1, "markov_rank": 0, "preflight": 0.0,
    "num_devices": 1, "num_nodes": 1, "memory_gib": 0.0, "reserve_gib": 0.0, "layer_overhead_ms": 0.0,
    "all_reduce_ms": 0.0, "round_overhead_ms": 0.0,
}  # fmt: skip


@dataclass
class Paths:
    """Section ``paths``: where everything is read and written."""

    root: str
    run: str
    outputs: str
    cache: str
    rollouts: str
    drafters: str


@dataclass
class DataSection:
    """Section ``data``: prompts, rollouts sampled from them, and the windows cut out of those."""

    name: str
    folder: str | None
    train_prompts: Node
    val_prompts: Node
    never: Node | Sequence[str] | None
    drop_overlap: bool
    rollouts: Node
    module: Node
    draft_vocab_size: int | None
    online: bool
    refresh_every_n_steps: int
    online_rollouts: Node


@dataclass
class RuntimeSection:
    """Section ``runtime``: how the models run, apart from what they compute."""

    compile: bool


@dataclass
class HardwareSection:
    """Section ``hardware``: the devices that ``preflight`` plans for. Null: as this machine has it.

    ``num_devices`` of one node, ``memory_gib`` of one device, ``reserve_gib`` of it kept free; peaks of bandwidth and
    arithmetic, and the shares of them that are reached; times that no peak tells. What one device sends a second within
    a node and between nodes, and the share of it that collectives reach.
    """

    name: str | None
    num_devices: int | None
    memory_gib: float | None
    reserve_gib: float
    bandwidth_gb_s: float | None
    bf16_tflops: float | None
    fp32_tflops: float | None
    bandwidth_share: float
    flops_share: float
    layer_overhead_ms: float
    all_reduce_ms: float
    round_overhead_ms: float
    interconnect_gb_s: float
    network_gb_s: float
    communication_share: float


@dataclass
class TrainConfig:
    """Top level of ``conf/train.yaml``."""

    verifier: Node
    model: Node
    data: DataSection
    objective: Node
    optimizer: Node
    scheduler: Node
    callbacks: Node
    trainer: Node
    logger: Node
    paths: Paths
    hardware: HardwareSection
    preflight: bool | float
    model_name: str
    run_id: str
    max_steps: int
    start_from: str | None
    prefix_loss_weight: float | None
    loss_chunk_windows: int
    num_probe_prompts: int
    load_verifier: bool | Literal["auto"]
    tf32: bool
    publish: bool
    seed: int
    threads: int | None
    resume: bool | str


@dataclass
class RolloutConfig:
    """Top level of ``conf/rollout.yaml``."""

    verifier: Node
    data: DataSection
    engine: Node
    paths: Paths
    seed: int
    threads: int | None
    progress: bool
    run_id: str


@dataclass
class EvalConfig:
    """Top level of ``conf/eval.yaml``."""

    task: Literal["decode", "budgeted", "speed_law"]
    verifier: Node
    model: Node
    sampler: Node
    methods: Node | None
    grid: Node | None
    benchmark: Node
    budget: BudgetSection
    speed_law: SpeedLawSection
    wandb: Node | None
    paths: Paths
    hardware: HardwareSection
    preflight: bool | float
    model_name: str
    drafter: str
    prompt: str | None
    baseline: bool
    drop_overlap: bool
    max_new_tokens: int
    stop: Sequence[str]
    stop_ids: Sequence[int]
    num_warmup: int
    batch_sizes: Sequence[int] | None
    shard: str | None
    shard_wait_s: float
    seed: int
    threads: int | None
    runtime: RuntimeSection
    color: Literal["auto", "always", "never"]
    run_id: str


SECTIONS = (Paths, DataSection, RuntimeSection, HardwareSection, BudgetSection, SpeedLawSection)


def validate(config: Node, schema: type) -> None:
    """Check a whole resolved configuration against ``schema`` (one of the dataclasses above).

    Raises:
        ConfigError: an unknown key, a missing one, a wrong type or a value out of range; the message
            has the key, the value, what was expected and, for a likely slip, the nearest key.
    """
    _check_call(schema, config, "", required=True)


def locate(target: str, key: str) -> Callable[..., Any]:
    """The callable a ``_target_`` names: ``package.module.Class`` or ``package.module.Class.method``.

    Raises:
        ConfigError: nothing of that name can be imported.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise
        for part in parts[cut:]:
            found = getattr(found, part, None)
        if callable(found):
            return found
        break
    raise ConfigError(f"{key}={target!r}: nothing of that name can be imported; check the spelling")


def _check_call(call: Callable[..., Any], node: Node, key: str, *, required: bool) -> None:
    """Check the keys of ``node`` as keyword arguments of ``call``, then each value."""
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}={node!r}: expected a section with keys; choose one with `{key}=<name of a file>`")
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:  # a builtin without one: nothing to check against
        return
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n != "self"]
    for name, value in node.items():
        if name in HYDRA_KEYS:
            continue
        full = f"{key}.{name}" if key else str(name)
        if name in names:
            _check_value(_annotation(call, parameters[name]), value, full)
        elif not open_ended:
            raise unknown_key(full, [f"{key}.{n}" if key else n for n in names])
    if required:
        for name in names:
            if name not in node and parameters[name].default is inspect.Parameter.empty:
                raise ConfigError(f"{key + '.' if key else ''}{name}: missing; set it on the command line or in conf/")


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that nothing reads, with the nearest one that something does."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:  # the right name without its section: gama -> sampler.gamma
        leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        near = [leaves[leaf] for leaf in difflib.get_close_matches(key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)]
    section = key.rpartition(".")[0]
    siblings = sorted(name for name in known if name.rpartition(".")[0] == section)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(siblings)}"
    return ConfigError(f"unknown setting {key!r}; {hint}")


def _annotation(call: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The evaluated annotation of one parameter; ``Any`` where it cannot be evaluated (typing-only imports)."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    owner = call.__func__ if inspect.ismethod(call) else call
    if inspect.isclass(owner) and "__init__" in vars(owner):
        owner = owner.__init__
    module = inspect.getmodule(owner)
    try:
        return eval(annotation, dict(vars(module)) if module else {})  # our own source, not input
    except NameError:
        return Any


def _check_value(expected: Any, value: Any, key: str) -> None:
    """Check one value: nested targets and sections by their signature, plain values by type and range."""
    if isinstance(value, Mapping) and "_target_" in value:
        target = locate(str(value["_target_"]), f"{key}._target_")
        _check_call(target, value, key, required=False)
        return
    if isinstance(value, Mapping) and inspect.isclass(expected) and expected in SECTIONS:
        _check_call(expected, value, key, required=True)
        return
    if not _matches(expected, value):
        raise ConfigError(f"{key}={value!r}: expected {describe(expected)}, got {type(value).__name__}")
    _check_range(value, key)
    for child_key, child in value.items() if isinstance(value, Mapping) else []:
        _check_value(Any, child, f"{key}.{child_key}")
    for index, child in enumerate(value) if isinstance(value, list | tuple) else []:
        _check_value(Any, child, f"{key}[{index}]")


def _check_range(value: Any, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r}: expected a finite number")
    leaf = key.rsplit(".", 1)[-1]
    if leaf in MINIMUM and value < MINIMUM[leaf]:
        raise ConfigError(f"{key}={value!r}: expected a number >= {MINIMUM[leaf]:g}")


def _matches(expected: Any, value: Any) -> bool:
    """Whether ``value`` can be passed for the annotation; an annotation of another kind accepts anything."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected in (Any, inspect.Parameter.empty) or isinstance(expected, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(argument, value) for argument in arguments)
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in arguments)
    if expected is None or expected is type(None):
        return value is None
    if expected is bool:
        return isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected is str or expected is Path:
        return isinstance(value, str)
    container = origin or expected
    if inspect.isclass(container) and issubclass(container, Mapping):
        return isinstance(value, Mapping)
    if inspect.isclass(container) and issubclass(container, Sequence | set | frozenset):
        return isinstance(value, list | tuple) and all(_matches(a, v) for a in arguments[:1] for v in value)
    return True


def describe(expected: Any) -> str:
    """An annotation in words a user knows."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a path",
        type(None): "null",
    }
    if expected in words:
        return words[expected]
    container = origin or expected
    if inspect.isclass(container) and issubclass(container, Mapping):
        return "a section with keys"
    return "a list" + (f" ({describe(arguments[0])} each)" if arguments else "")
