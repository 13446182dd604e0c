"""Memory of one device in each phase of a run, item by item, in bytes.

``train.py`` samples rollouts with the verifier alone, then trains the drafter (with the verifier beside it where
something still reads it); ``eval.py`` decodes with both. Knows no configuration file and prints nothing.

Sources: model states as in ZeRO (arXiv 1910.02054, section 3: 2 + 2 + 12 bytes a parameter under 16-bit training,
partitioned in stages; ``training.strategies`` has partitioned gradients in float32). Lightning's own mixed precision
keeps float32 weights instead and casts them on the fly, and FSDP divides those. Buckets and live weights: defaults of
Lightning's DeepSpeedStrategy and of deepspeed's zero/config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdiff2.models.activation_memory import cast_weight_bytes, saved_bytes, saved_per_token
from specdiff2.models.model_shapes import ModelShape, dtype_bytes
from specdiff2.runtime.preflight_settings import (
    TREE_SLOTS,
    DrafterSettings,
    TrainingSettings,
    VerifierSettings,
    training_pass,
)
from specdiff2.runtime.preflight_strategy import BUCKET

FLOAT32 = 4.0
# float32 tensors of a loss chunk alive at once: logits, their log-softmax, its gradient; and where an objective reads
# the verifier's law: that law, the drafter's probabilities and their product
LOGIT_COPIES, LAW_COPIES = 3, 3
LIVE = 1_000_000_000  # numbers of gathered weights that ZeRO-3 keeps at once
BACKWARD_SHARE = 0.5  # gradients inside the layer that runs backward, in parts of what it kept (measured: 0.1 to 0.4)

HELD_OUT = "held-out evaluation"
HELD_OUT_ITEMS = frozenset(
    {"verifier weights", "drafter weights", "drafter head rows, at most", "gradients", "optimizer", "loss chunk"}
)  # of a training step


@dataclass
class Phase:
    """What lies on the first device and on each of the others in one phase, item by item, in bytes."""

    name: str
    num_devices: int
    first: dict[str, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)

    @property
    def items(self) -> dict[str, float]:
        """Of the fullest device."""
        return max((self.first, self.others), key=lambda items: sum(items.values()))

    @property
    def total(self) -> float:
        """Of the fullest device."""
        return sum(self.items.values())


def rollout_phase(verifier: VerifierSettings, batch: int, prompt: int, new: int) -> Phase:
    """Sampling ``batch`` rollouts at once: prompts of ``prompt`` tokens and ``new`` sampled ones."""
    first, others = _verifier_parts(verifier, batch * (prompt + new))
    extra = {
        # logits, tempered probabilities and their sums of the newest position, float32
        "sampling": 3 * batch * verifier.shape.vocab_size * FLOAT32,
        "prefill": pass_bytes(verifier.shape, verifier.dtype, batch * prompt),
    }
    return Phase("rollouts", verifier.num_shards, {**first, **extra}, {**others, **extra})


def decoding_phase(
    verifier: VerifierSettings, drafter: DrafterSettings, prompt: int, new: int, nodes: int, num_drafters: int = 1
) -> Phase:
    """Decoding one sequence; drafters lie whole on one device, with the first share of the verifier."""
    capacity = prompt + new + TREE_SLOTS
    first, others = _verifier_parts(verifier, capacity)
    own = {
        "drafter weights": num_drafters * drafter_weight_bytes(drafter, verifier.dtype),
        "drafter head rows, at most": drafter.draft_vocab * drafter.shape.hidden_size * dtype_bytes(verifier.dtype),
        "drafter KV cache": num_drafters * drafter.has_own_cache * drafter.shape.kv_bytes(verifier.dtype, capacity),
        "logits": 2 * FLOAT32 * (nodes * verifier.shape.vocab_size + drafter.gamma * drafter.draft_vocab),
        "passes": max(
            pass_bytes(verifier.shape, verifier.dtype, prompt),
            pass_bytes(drafter.shape, verifier.dtype, prompt + new),
        ),
    }
    # every rank of a tensor-parallel verifier runs the whole program, the drafter included
    others |= own if verifier.split == "tensors" else {}
    return Phase("decoding", verifier.num_shards, {**first, **own}, others)


def training_phase(verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings) -> Phase:
    """One training step; every rank holds the same. A verifier that stays lies on each rank, or, where it is spread,
    once on the node for each of its ranks: every process has its own."""
    copies = training.ranks_per_node if verifier.num_shards > 1 else 1
    fullest = copies * max(verifier.first_share, verifier.other_share)
    items = {"verifier weights": verifier.weight_bytes * fullest} if training.verifier_stays else {}
    items |= model_states(drafter, training)
    items |= step_memory(drafter, training)
    if width := context_width(drafter):
        items["verifier context"] = training.batch_size * training.length * width * dtype_bytes(verifier.dtype)
    return Phase("training", training.num_ranks, items, items)


def held_out_phase(verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings) -> Phase:
    """Held-out windows, probes and exports while training with partitioned weights: for a while each rank has all of
    them (``training.strategies.whole_weights``), those of FSDP in float32."""
    items = training_phase(verifier, drafter, training).items
    kept = {name: size for name, size in items.items() if name in HELD_OUT_ITEMS}
    frozen = num_frozen(drafter) * dtype_bytes(training.compute)
    kept["whole weights"] = frozen + drafter.num_trained * own_width(training)
    return Phase(HELD_OUT, training.num_ranks, kept, kept)


def context_width(drafter: DrafterSettings) -> int:
    """Numbers that the drafter reads of the verifier for each token of a rollout."""
    shape = drafter.shape
    if drafter.attention == "verifier_kv":
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim + 3 * shape.hidden_size
    return shape.hidden_size if drafter.kind == "eagle" else 0


def model_states(drafter: DrafterSettings, training: TrainingSettings) -> dict[str, float]:
    """Weights, gradients, optimizer states (AdamW) and buffers of one rank's device."""
    trained, frozen, stage = drafter.num_trained, num_frozen(drafter), training.zero_stage
    width = dtype_bytes(training.compute)
    head = {"drafter head rows, at most": drafter.draft_vocab * drafter.shape.hidden_size * width}
    if stage:
        weights, gradients, optimizer = sharded_states(drafter, training)
        return {
            "drafter weights": 0.0 if training.offload_weights else weights,
            **head,
            "gradients": 0.0 if training.offload_optimizer else gradients,
            "optimizer": 0.0 if training.offload_optimizer else optimizer,
            "gathered weights": gathered_numbers(drafter) * width if stage == 3 else 0.0,
            # two buckets to reduce in, as exchanges overlap, and one to gather new weights into
            "communication buffers": width
            * (2 * min(training.reduce_bucket, trained) + (stage < 3) * min(BUCKET, trained)),
        }
    own, how = own_width(training), training_pass(drafter, training)
    return {
        "drafter weights": frozen * dtype_bytes(how.weights) + trained * own,
        **head,
        "autocast copies": cast_weight_bytes(drafter.shape, how),
        "gradients": trained * own * (2 if training.strategy == "ddp" else 1),  # DDP's buckets are a second copy
        "optimizer": 2 * trained * own,
    }


def own_width(training: TrainingSettings) -> float:
    """Bytes of a trained weight that a rank keeps, and of its gradient: float32 in mixed precision, but for DeepSpeed,
    which keeps low-precision weights and leaves the float32 ones to its optimizer."""
    deepspeed = training.strategy.startswith("zero")
    return FLOAT32 if training.mixed and not deepspeed else dtype_bytes(training.compute)


def gathered_numbers(drafter: DrafterSettings) -> int:
    """Weights that lie whole on each device at once: embedding and head all the time, of the layers those in use."""
    outside = drafter.shape.num_embedding + drafter.shape.num_head
    return outside + min(LIVE, num_frozen(drafter) + drafter.num_trained - outside)


def num_frozen(drafter: DrafterSettings) -> int:
    """Weights beside the adapters; none where all train."""
    return drafter.shape.num_parameters if drafter.lora is not None else 0


def sharded_states(drafter: DrafterSettings, training: TrainingSettings) -> tuple[float, float, float]:
    """(weights, gradients, optimizer states) that one rank keeps under ZeRO or FSDP, wherever they lie."""
    trained, frozen, ranks, stage = drafter.num_trained, num_frozen(drafter), training.num_ranks, training.zero_stage
    width, parts = dtype_bytes(training.compute), ranks if stage == 3 else 1
    if training.strategy == "fsdp":  # trained weights stay in float32 and are cast where they are gathered
        own = own_width(training)
        return (frozen * width + trained * own) / ranks, trained * own / ranks, 2 * trained * own / ranks
    # from stage 2 on they are accumulated in float32 (training.strategies.DeepSpeed)
    gradients = trained * FLOAT32 / ranks if stage >= 2 else trained * width
    return (frozen + trained) * width / parts, gradients, 3 * trained * FLOAT32 / ranks  # float32 copy, two moments


def host_bytes(drafter: DrafterSettings, training: TrainingSettings) -> float:
    """What offloading puts into the main memory of one node: optimizer states with float32 gradients (16 bytes for a
    trained weight: ZeRO-Offload, arXiv 2101.06840, with deepspeed's float32 partitions), and weights."""
    if not training.zero_stage:
        return 0.0
    weights, _, optimizer = sharded_states(drafter, training)
    gradients = drafter.num_trained * FLOAT32 / training.num_ranks
    each = training.offload_optimizer * (optimizer + gradients) + training.offload_weights * weights
    return training.ranks_per_node * each


def step_memory(drafter: DrafterSettings, training: TrainingSettings) -> dict[str, float]:
    """Activations, attention masks and logits of one micro-batch."""
    rows, columns, keys = packed_size(drafter, training)
    how = training_pass(drafter, training)
    chunk = min(training.loss_chunk_windows, training.batch_size * training.windows_per_rollout)
    num_read = training.batch_size * training.windows_per_rollout * drafter.gamma
    backward = BACKWARD_SHARE * sum(saved_per_token(drafter.shape, how)) * rows * columns
    copies = LOGIT_COPIES + (LAW_COPIES if training.reads_law else 0)
    queries = 1 if drafter.attention == "bidirectional" else columns
    return {
        "activations": saved_bytes(drafter.shape, how, rows * columns, num_read) + backward,
        "attention masks": rows * queries * keys * (1 + dtype_bytes(training.compute)),
        "loss chunk": copies * FLOAT32 * chunk * drafter.gamma * drafter.draft_vocab,
    }


def packed_size(drafter: DrafterSettings, training: TrainingSettings) -> tuple[int, int, int]:
    """(rows, columns, keys) of a packed training batch in the worst case (``functional.window_masks``)."""
    batch, windows, length = training.batch_size, training.windows_per_rollout, training.length
    if drafter.attention == "bidirectional":  # a row for every window: its prefix again each time
        return batch * windows, length + drafter.num_slots, length + drafter.num_slots
    if drafter.attention == "verifier_kv":  # windows alone; the prefix is only keys
        return batch, windows * drafter.gamma, length + windows * drafter.gamma
    columns = length + windows * drafter.num_slots
    return batch, columns, columns


def drafter_weight_bytes(drafter: DrafterSettings, dtype: str) -> float:
    """Weights as decoding holds them: adapters merged, a block drafter's embedding and head borrowed."""
    return drafter.shape.num_parameters * dtype_bytes(dtype)


def _verifier_parts(verifier: VerifierSettings, num_tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """Weights and a cache of ``num_tokens`` tokens on the first device, and on each of the others."""
    whole = {
        "verifier weights": verifier.weight_bytes,
        "verifier KV cache": verifier.shape.kv_bytes(verifier.dtype, num_tokens),
    }
    first, others = (
        {name: size * share for name, size in whole.items()} for share in (verifier.first_share, verifier.other_share)
    )
    return first, others


def pass_bytes(shape: ModelShape, dtype: str, num_tokens: int) -> float:
    """The widest moment of a pass without gradients: a feed-forward block and the residual stream around it."""
    return num_tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size) * dtype_bytes(dtype)
