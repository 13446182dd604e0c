"""The settings of a run as the plain numbers that a plan needs: which models, in which dtype, where, how much of what.

Reads a validated configuration and model configs; loads no weights and touches no device. What only the run can know
(how long prompts are) is assumed, and ``ASSUMED_PROMPT`` says what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdiff2.models.activation_memory import TrainingPass
from specdiff2.models.model_shapes import ModelShape, block_drafter_shape, eagle_shape, find_shape
from specdiff2.models.placement import AUTOMATIC
from specdiff2.runtime.auto_settings import is_masked_lm
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_strategy import (
    BUCKET,
    auto_dtype,
    num_devices,
    read_offload,
    read_precision,
    read_strategy,
)
from specdiff2.types import ConfigError

ASSUMED_PROMPT = 512  # tokens of a prompt where nothing bounds them
EAGLE = "eagle_drafter.EagleDrafter"  # in the _target_ of section model
TREE_SLOTS = 128  # of the verifier's cache beyond prompt and output (models.verifier_session)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class VerifierSettings:
    """The verifier: its sizes, how its weights are stored, and over how many devices they lie.

    ``split``: ``none`` (all on one device), ``layers`` (device_map: whole layers, one device works at a time) or
    ``tensors`` (tensor parallel: a part of every layer on each device, all work at once). ``first_share``: the part on
    the first device, where the drafter lies too; the others hold equal parts of the rest.
    """

    shape: ModelShape
    dtype: str
    quantization: str | None
    split: str
    num_shards: int
    first_share: float

    @property
    def weight_bytes(self) -> float:
        return self.shape.weight_bytes(self.dtype, self.quantization)

    @property
    def other_share(self) -> float:
        """Part of the verifier on each device but the first."""
        return (1.0 - self.first_share) / (self.num_shards - 1) if self.num_shards > 1 else 0.0

    def spread(self, split: str, num_shards: int, device_map: Any = None, room: float = 0.0) -> VerifierSettings:
        """The same verifier over ``num_shards`` devices: evenly, or as accelerate's ``balanced_low_0`` (as little as
        possible on the first device) and ``sequential`` (as much as possible) fill devices of ``room`` bytes."""
        first, part = 1.0 / num_shards, room / self.weight_bytes
        if num_shards > 1 and device_map == "balanced_low_0":
            first = max(0.0, 1.0 - (num_shards - 1) * part)
        elif device_map == "sequential":
            first = min(1.0, part)
        return replace(self, split=split, num_shards=num_shards, first_share=first)


@dataclass(frozen=True)
class DrafterSettings:
    """The drafter of section ``model``.

    Attributes:
        shape: its layers; a block drafter's has no embedding and no head of its own.
        num_trained: parameters that train.
        draft_vocab: rows of the head that are used, at most.
        kind: ``masked_lm``, ``block`` or ``eagle``; the last two borrow the verifier's embedding and head.
        attention: ``bidirectional``, ``causal_prefix``, or ``verifier_kv`` (reads the verifier's cache).
        num_slots: columns that a window adds to its prefix: masked ones, or the steps an EAGLE head unrolls.
        weights: dtype of the layers while training; frozen ones with ``lora``.
    """

    shape: ModelShape
    num_trained: int
    draft_vocab: int
    kind: str
    attention: str
    gamma: int
    num_slots: int
    denoising_steps: int
    weights: str
    lora: Mapping[str, Any] | None
    gradient_checkpointing: bool

    @property
    def has_own_cache(self) -> bool:
        return self.attention == "causal_prefix"

    @property
    def borrows(self) -> bool:
        """Embedding and head are the verifier's, which therefore stays loaded."""
        return self.kind != "masked_lm"


@dataclass(frozen=True)
class TrainingSettings:
    """One optimizer step on one rank.

    Attributes:
        strategy: ``one`` device, ``ddp``, ``zero1`` .. ``zero3`` or ``fsdp`` over ``num_ranks`` devices.
        compute: dtype of matrix products.
        length: longest rollout, prompt included.
        verifier_stays: whether the verifier's weights stay on the device.
        only_for_probe: it stays for the decoding probe alone.
        reads_law: the objective reads the verifier's probabilities.
        num_nodes: machines that the ranks are spread over evenly.
        offload_optimizer, offload_weights: optimizer states (with gradients), weights lie in the host's memory.
        reduce_bucket: numbers of gradients that DeepSpeed reduces at once.
    """

    strategy: str
    num_ranks: int
    compute: str
    mixed: bool
    batch_size: int
    windows_per_rollout: int
    length: int
    loss_chunk_windows: int
    accumulate: int
    max_steps: int
    verifier_stays: bool
    only_for_probe: bool
    reads_law: bool
    num_nodes: int = 1
    offload_optimizer: bool = False
    offload_weights: bool = False
    reduce_bucket: int = BUCKET

    @property
    def zero_stage(self) -> int:
        """What is divided by the ranks: 1 optimizer states, 2 gradients too, 3 weights too, as FSDP does; 0 nothing."""
        return 3 if self.strategy == "fsdp" else int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


def read_verifier(config: Config, hardware: HardwareSection) -> VerifierSettings:
    """Raises ConfigError or CorruptFileError as ``model_shapes.find_shape``."""
    node = config["verifier"]
    shape = find_shape(node["source"], revision=node.get("revision"), gguf_file=node.get("gguf_file"))
    stored = getattr(shape.config, "quantization_config", None)  # of a checkpoint that is quantised already
    whole = VerifierSettings(
        shape=shape,
        dtype=auto_dtype(node.get("dtype", "auto"), hardware),
        quantization=read_quantization(node.get("quantization") or stored),
        split="none",
        num_shards=1,
        first_share=1.0,
    )
    split, num_shards = read_placement(node, int(hardware.num_devices or 1))
    return whole.spread(split, num_shards, node.get("device_map"), usable_bytes(hardware))


def usable_bytes(hardware: HardwareSection) -> float:
    """Bytes of one device that a plan may use."""
    return ((hardware.memory_gib or 0.0) - hardware.reserve_gib) * 2**30


def read_placement(node: Config, num_devices: int) -> tuple[str, int]:
    """(how the verifier is split, over how many devices) from ``device_map`` and ``tp_plan`` (``models.placement``)."""
    device_map = node.get("device_map")
    if node.get("tp_plan"):
        return "tensors", num_devices
    if isinstance(device_map, Mapping):
        num_devices = len({str(place) for place in device_map.values()})
    elif device_map not in AUTOMATIC:  # null, or the name of one device
        return "none", 1
    return "layers", num_devices


def read_quantization(value: Any) -> str | None:
    """``int8`` or ``int4`` of transformers' quantisation settings (a mapping or their object); None for none.

    Raises:
        ConfigError: one whose bytes per weight are not known here.
    """
    if value is None:
        return None
    node = value if isinstance(value, Mapping) else vars(value)
    told = f"{node.get('weights', '')} {node.get('quant_type', '')}".lower()
    for bits in (8, 4):
        if node.get(f"load_in_{bits}bit") or node.get("bits") == bits or f"int{bits}" in told:
            return f"int{bits}"
    raise ConfigError(
        f"verifier.quantization={value!r}: preflight knows what 8 and 4 bits take (load_in_8bit, load_in_4bit, bits, "
        "weights=int8, Int8WeightOnlyConfig); plan with verifier.quantization=null"
    )


def read_drafter(config: Config, verifier: ModelShape, hardware: HardwareSection) -> DrafterSettings:
    """Raises ConfigError or CorruptFileError: no such model, or adapters on layers that it has not."""
    node = config["model"]
    limit = (config.get("data") or {}).get("draft_vocab_size")
    if is_masked_lm(node):
        return _masked_lm(node, limit, hardware)
    vocab = min(limit or verifier.vocab_size, verifier.vocab_size)
    is_eagle = EAGLE in str(node.get("_target_"))
    shape, num_trained = (
        eagle_shape(verifier, node["num_layers"]) if is_eagle else block_drafter_shape(verifier, node, vocab)
    )
    conditioned = node.get("conditioning", "none") != "none"
    return DrafterSettings(
        shape=shape, num_trained=num_trained, draft_vocab=vocab, kind="eagle" if is_eagle else "block",
        attention="verifier_kv" if conditioned else node.get("attention", "causal_prefix"),
        gamma=node["gamma"], num_slots=node["gamma"] - int((is_eagle or bool(node.get("shifted"))) and not conditioned),
        denoising_steps=node.get("denoising_steps", 1), weights="float32", lora=None,
        gradient_checkpointing=bool(node.get("gradient_checkpointing")),
    )  # fmt: skip


def _masked_lm(node: Config, limit: int | None, hardware: HardwareSection) -> DrafterSettings:
    shape = find_shape(node["source"], revision=node.get("revision"), family=node.get("family"))
    lora, dtype = node.get("lora"), node.get("dtype", "auto")
    published = shape.family.attention if shape.family else "bidirectional"  # as all families of the table are
    trained = shape.num_parameters if lora is None else shape.lora_parameters(lora["rank"], lora["targets"])
    return DrafterSettings(
        shape=shape, num_trained=trained, draft_vocab=min(limit or shape.vocab_size, shape.vocab_size),
        kind="masked_lm", attention=node.get("attention") or published, gamma=node["gamma"],
        num_slots=node["gamma"], denoising_steps=node.get("denoising_steps", 1),
        weights="float32" if lora is None and dtype == "auto" else auto_dtype(dtype, hardware), lora=lora,
        gradient_checkpointing=bool(node.get("gradient_checkpointing")),
    )  # fmt: skip


def read_training(config: Config, drafter: DrafterSettings, hardware: HardwareSection) -> TrainingSettings:
    """Raises ConfigError for a strategy or precision whose memory is not known here."""
    trainer, module = config["trainer"], config["data"]["module"]
    compute, mixed = read_precision(trainer.get("precision", "auto"), hardware)
    strategy, num_nodes = trainer.get("strategy", "auto"), int(trainer.get("num_nodes", 1))
    num_ranks = num_devices(trainer.get("devices", 1), hardware) * num_nodes
    offload_optimizer, offload_weights = read_offload(strategy)
    needs_law = bool(instantiate(config["objective"]).needs_verifier_probs)
    reads_verifier = drafter.borrows or needs_law or bool(config["data"]["online"])
    probe = (config["callbacks"] or {}).get("decoding_probe") is not None
    loaded = config.get("load_verifier", "auto")
    return TrainingSettings(
        strategy=read_strategy(strategy, num_ranks), num_ranks=num_ranks,
        compute=compute, mixed=mixed, batch_size=module["batch_size"],
        windows_per_rollout=module["windows_per_rollout"], length=rollout_length(config),
        loss_chunk_windows=config["loss_chunk_windows"], accumulate=trainer.get("accumulate_grad_batches", 1),
        max_steps=config["max_steps"],
        verifier_stays=reads_verifier or probe if loaded == "auto" else bool(loaded),
        only_for_probe=probe and not reads_verifier and loaded == "auto",
        reads_law=needs_law, num_nodes=num_nodes,
        offload_optimizer=offload_optimizer, offload_weights=offload_weights,
        reduce_bucket=strategy.get("reduce_bucket_size", BUCKET) if isinstance(strategy, Mapping) else BUCKET,
    )  # fmt: skip


def training_pass(drafter: DrafterSettings, training: TrainingSettings) -> TrainingPass:
    """How the drafter's layers run in training; DeepSpeed casts weights to the compute dtype itself."""
    weights = training.compute if training.zero_stage or not training.mixed else drafter.weights
    return TrainingPass(weights, training.compute, drafter.lora, drafter.gradient_checkpointing)


def rollout_length(config: Config) -> int:
    """Tokens of the longest rollout that trains, prompt included."""
    data = config["data"]
    return int(data["module"].get("max_length") or ASSUMED_PROMPT + data["rollouts"]["max_new_tokens"])
