"""What will go wrong, and which settings change it: warnings in words, each with its numbers.

Remedies are tried on the same arithmetic that found the problem; only those that help are named, with what they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specdiff2.evaluation.cost_model import RoundCost
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_memory import Phase, training_phase
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, VerifierSettings, usable_bytes

GIB = float(2**30)
MAX_SHARDS = 64
QUANTIZATION = {bits: f"{{quant_method: bitsandbytes, load_in_{bits[3:]}bit: true}}" for bits in ("int8", "int4")}
PhaseOf = Callable[[VerifierSettings], Phase]
Smaller = Sequence[tuple[str, PhaseOf]]  # (setting, the phase with it), mildest first
Change = Callable[[DrafterSettings, TrainingSettings], tuple[DrafterSettings, TrainingSettings]]


@dataclass(frozen=True)
class Room:
    """Devices and the bytes of each that a plan may use."""

    num_devices: int
    bytes_each: float

    @classmethod
    def of(cls, hardware: HardwareSection, num_nodes: int = 1) -> Room:
        assert hardware.num_devices is not None  # machine_probe.complete has filled it in
        return cls(hardware.num_devices * num_nodes, usable_bytes(hardware))

    def fits(self, phase: Phase) -> bool:
        return phase.total <= self.bytes_each and phase.num_devices <= self.num_devices


def does_not_fit(phase: Phase, room: Room) -> str:
    """The bare fact."""
    largest = sorted(phase.items.items(), key=lambda item: -item[1])[:3]
    told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    if phase.num_devices > room.num_devices:
        return f"{phase.name}: needs {phase.num_devices} devices, here are {room.num_devices} (hardware.num_devices)"
    return f"{phase.name}: {phase.total / GIB:.1f} GiB on a device with {room.bytes_each / GIB:.1f} GiB free ({told})"


def size_remedies(verifier: VerifierSettings, smaller: Smaller, room: Room) -> Iterator[str]:
    """The mildest of the smaller settings that makes the phase fit."""
    for text, phase_of in smaller:
        phase = phase_of(verifier)
        if room.fits(phase):
            yield f"{text}: {phase.total / GIB:.1f} GiB on the fullest"
            return


def verifier_remedies(verifier: VerifierSettings, phase_of: PhaseOf, room: Room, num_ranks: int = 1) -> Iterator[str]:
    """Sharding over more devices, which several training ranks cannot share, and fewer bits, as far as they help."""
    heads = verifier.shape.num_kv_heads
    any_number, dividing = range(2, MAX_SHARDS + 1), [n for n in range(2, heads + 1) if heads % n == 0]
    choices: list[tuple[str, str, Sequence[int]]] = [
        ("verifier.device_map=auto", "layers", any_number),
        ("verifier.device_map=balanced_low_0", "layers", any_number),
        ("verifier.device_map=null verifier.tp_plan=auto (torchrun)", "tensors", dividing),
    ]
    fewest = MAX_SHARDS + 1
    for text, split, counts in choices if num_ranks == 1 else []:
        for count in counts:
            phase = phase_of(verifier.spread(split, count, text.rpartition("=")[2], room.bytes_each))
            if phase.total <= room.bytes_each:
                have = "" if count <= room.num_devices else f", here {room.num_devices}"
                if count < fewest or split == "tensors":  # another map is worth a word only where fewer devices do
                    yield f"{text} on {count} devices or more{have}: {phase.total / GIB:.1f} GiB on the fullest"
                fewest = min(fewest, count)
                break
    for bits, setting in QUANTIZATION.items():
        phase = phase_of(replace(verifier, quantization=bits))
        if verifier.quantization is None and phase.total <= room.bytes_each:
            yield f"'verifier.quantization={setting}': {phase.total / GIB:.1f} GiB on the fullest"


def training_remedies(
    verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings, room: Room
) -> Iterator[str]:
    """Settings that make a training step fit, each alone; where none does, one after the other until it fits."""
    changes = list(_training_changes(verifier, drafter, training, room))
    alone = [(text, training_phase(verifier, *change(drafter, training))) for text, change in changes]
    fitting = [f"{text}: {phase.total / GIB:.1f} GiB" for text, phase in alone if room.fits(phase)]
    if fitting or not changes:
        yield from fitting
        return
    texts: list[str] = []
    for text, change in changes:
        drafter, training = change(drafter, training)
        texts.append(text)
        phase = training_phase(verifier, drafter, training)
        if room.fits(phase):
            break
    verdict = "fits" if room.fits(phase) else "still does not fit"
    yield f"{' with '.join(texts)}: {phase.total / GIB:.1f} GiB, {verdict}"


def _training_changes(
    verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings, room: Room
) -> Iterator[tuple[str, Change]]:
    """What may be changed, mildest first."""
    if training.only_for_probe:
        spread = training.num_ranks > 1 and verifier.num_shards > 1
        yield (
            f"callbacks.decoding_probe=null{' load_verifier=false' if spread else ''} (nothing else reads the verifier "
            "while training)",
            lambda d, t: (d, replace(t, verifier_stays=False)),
        )
    if not drafter.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", lambda d, t: (replace(d, gradient_checkpointing=True), t)
    if training.batch_size > 1:
        steps = training.accumulate * training.batch_size
        yield (
            f"data.module.batch_size=1 trainer.accumulate_grad_batches={steps}",
            lambda d, t: (d, replace(t, batch_size=1, accumulate=steps)),
        )
    if training.windows_per_rollout > 1:
        windows = fewest_windows(verifier, drafter, training, room)
        yield (
            f"data.module.windows_per_rollout={windows}",
            lambda d, t: (d, replace(t, windows_per_rollout=windows)),
        )
    if room.num_devices > 1 and training.zero_stage < 3:
        yield (
            f"trainer=deepspeed_zero3 trainer.devices={room.num_devices // training.num_nodes}",
            lambda d, t: (d, replace(t, strategy="zero3", num_ranks=room.num_devices)),
        )


def fewest_windows(verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings, room: Room) -> int:
    """The largest half, quarter, ... of the windows per rollout that fits; 1 where none does."""
    windows = training.windows_per_rollout // 2
    while windows > 1 and not room.fits(
        training_phase(verifier, drafter, replace(training, windows_per_rollout=windows))
    ):
        windows //= 2
    return max(windows, 1)


def round_warnings(name: str, gamma: int, cost: RoundCost) -> Iterator[str]:
    """A way of decoding that cannot pay, whatever is accepted."""
    if cost.break_even_streak > gamma:
        yield (
            f"{name}: a round takes {cost.round_s * 1e3:.1f} ms, a pass of the verifier alone "
            f"{cost.baseline_s * 1e3:.1f} ms: slower than no drafter even if all {gamma} drafted tokens are accepted; "
            "use a smaller drafter or a larger verifier"
        )


def placement_warnings(
    verifier: VerifierSettings, drafter: DrafterSettings, training: TrainingSettings | None, hardware: HardwareSection
) -> Iterator[str]:
    """Devices that stand idle or are asked for too often, and drafters that cannot share a spread verifier."""
    devices = hardware.num_devices or 1
    if drafter.borrows and (verifier.split != "none" or verifier.quantization):
        yield (
            f"{'an EAGLE head' if drafter.kind == 'eagle' else 'a block drafter'} borrows from the verifier and is "
            "refused beside a spread, split or quantised one: use a "
            "drafter with weights of its own (model=diffucoder, dream, llada, ...) or a verifier on one device"
        )
    used = max(verifier.num_shards, training.num_ranks if training else 1)
    if used < devices:
        yield f"{devices - used} of {devices} devices hold nothing: see verifier.device_map, tp_plan, trainer.devices"
    if verifier.split == "layers" and verifier.num_shards > 1:
        yield (
            f"verifier.device_map spreads layers: {verifier.num_shards} devices decode no faster than one; "
            "verifier.tp_plan=auto under torchrun reads all shards at once"
        )
    if verifier.split == "tensors" and verifier.shape.num_kv_heads % verifier.num_shards:
        yield (
            f"verifier.tp_plan: {verifier.shape.num_kv_heads} key/value heads do not divide by {verifier.num_shards} "
            "devices; use a number that divides them"
        )
    if training is not None and training.num_ranks > 1 and verifier.num_shards > 1 and training.verifier_stays:
        yield (
            f"{training.num_ranks} training ranks and a verifier spread over {verifier.num_shards} devices: every rank "
            "would load all of it; sample the rollouts first (rollout.py), then train with data.folder=... "
            "load_verifier=false callbacks.decoding_probe=null"
        )
