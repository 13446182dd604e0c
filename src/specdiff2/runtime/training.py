"""``train.py`` after validation: rollouts, drafter, Lightning, export.

Wiring only. What can be refused without a model (objective, checkpoint to resume) is built or looked up first.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.launch import is_first_rank
from specdiff2.models.drafter_files import check_belongs
from specdiff2.models.shipped import drafter_folder, is_shipped
from specdiff2.models.verifier import HFVerifier
from specdiff2.objectives import ObjectiveSchedule
from specdiff2.runtime import trainer_settings
from specdiff2.runtime.auto_settings import is_masked_lm
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.drafters import build_drafter, read_model, training_rollouts
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.launched import other_ranks
from specdiff2.runtime.prompts import LoadedPrompts, check_disjoint, keep_apart, load_prompts
from specdiff2.runtime.publish import export_drafter, exported_names, report
from specdiff2.runtime.resume import (
    Checkpoint,
    check_resume,
    continue_curves,
    find_checkpoint,
    own_checkpoint,
    read_checkpoint,
    settings_digest,
)
from specdiff2.runtime.rollouts import check_sampling, ensure_rollouts, note_rollouts, teacher_sampling
from specdiff2.runtime.storage import storage_problem
from specdiff2.runtime.teacher import get_verifier
from specdiff2.training.callbacks.preemption import Preempted
from specdiff2.training.loggers import close, describe
from specdiff2.training.module import DistillationModule
from specdiff2.training.rank_watch import how_to_go_on
from specdiff2.types import ConfigError, Rollout, StorageError

log = logging.getLogger(__name__)


def train(config: Mapping[str, Any], folder: Path) -> None:
    """Train and export; checkpoints, metrics and drafters in ``folder``, published drafters in ``paths.drafters``.

    Raises:
        ConfigError: no checkpoint to resume, prompts or rollouts that cannot train, a bad objective.
        MismatchError: rollouts or the checkpoint belong to other settings.
        StorageError: the disk is full or refuses; what was written before stays.
        SystemExit: interrupted.
    """
    if is_shipped(config["start_from"]):
        shipped = drafter_folder(config["start_from"], config["verifier"].get("source"), config["model_name"])
        config = {**config, "start_from": shipped}
    trainer_settings.check_trainer(config["trainer"])
    trainer_settings.check_placement(config)
    model, start = read_model(config)
    prefix_loss_weight = resolve_prefix_loss(config["prefix_loss_weight"], model)
    schedule: ObjectiveSchedule = instantiate(config["objective"])
    log.info("objective: %s", " -> ".join(f"{s['name']} ({s['steps'] or 'to the end'})" for s in schedule.describe()))
    make_optimizer, make_scheduler = build_optimization(config)
    check_sampling(config["data"]["rollouts"])
    sampling = teacher_sampling(config["data"]["rollouts"]) if schedule.needs_verifier_probs else None
    checkpoint = prepare_resume(config, schedule, folder, model)
    prompts = {split: load_prompts(instantiate(config["data"][f"{split}_prompts"])) for split in ("train", "val")}
    prompts["train"] = keep_apart(prompts["train"], config["data"])
    check_disjoint(prompts["train"].prompts, prompts["val"].prompts)
    verifier, loaded = get_verifier(config, schedule)
    if start is not None:  # before anything is sampled from the wrong one
        check_belongs(start, verifier, Path(config["start_from"]))
    stores = build_rollouts(config["data"], verifier, prompts, Path(config["paths"]["rollouts"]))
    if is_first_rank():
        note_rollouts(folder, stores)
    drafter = build_drafter(config, verifier, stores[0], fit=checkpoint is None)
    online = bool(config["data"]["online"])
    check_tokens(drafter, schedule, online)
    rollouts = training_rollouts(drafter, stores)
    data = build_data(config["data"], verifier, drafter.gamma, schedule, rollouts, prompts["train"].prompts)
    teacher = verifier if online or schedule.needs_verifier_probs else None
    module = DistillationModule(
        drafter, teacher, schedule, make_optimizer, make_scheduler, verifier_sampling=sampling,
        refresh_rollouts=data.refresh if online else None,
        refresh_every_n_steps=config["data"]["refresh_every_n_steps"] if online else 0,
        prefix_loss_weight=prefix_loss_weight, loss_chunk_windows=config["loss_chunk_windows"],
        settings_digest=settings_digest(config),
    )  # fmt: skip
    callbacks = build_callbacks(config, verifier, prompts["val"].prompts, folder)
    trainer = build_trainer(config, callbacks, folder)
    describe(trainer.loggers, folder)
    if teacher is None and config["callbacks"].get("decoding_probe") is None and is_masked_lm(config["model"]):
        if loaded:
            verifier.release()  # nothing reads it any more, and it may be ten times the drafter's size
    else:
        verifier.move_to(trainer.strategy.root_device)  # a block drafter borrows its embedding
    with other_ranks(folder):
        fit(trainer, module, data, checkpoint, folder)
    if trainer.is_global_zero:
        report(config, folder, exported_names(callbacks))


def check_tokens(drafter: Any, schedule: ObjectiveSchedule, online: bool) -> None:
    """A drafter with another tokenizer trains on its own tokens of the verifier's text, where no verifier law is known.

    Raises:
        ConfigError: an objective reads verifier probabilities, or rollouts are sampled while training.
    """
    if getattr(drafter, "bridge", None) is None or not (online or schedule.needs_verifier_probs):
        return
    raise ConfigError(
        "the drafter's tokenizer is not the verifier's: its objective cannot read verifier probabilities, and rollouts "
        "must be stored ones; use objective=streak (or ce, dpace, ...) and data.online=false"
    )


def prepare_resume(
    config: Mapping[str, Any], schedule: ObjectiveSchedule, folder: Path, model: Mapping[str, Any]
) -> Checkpoint | None:
    """The checkpoint to go on with, checked against these settings before any model loads; None for a new run.

    Raises:
        ConfigError, CorruptFileError, MismatchError: there is none, it is damaged, or it is of other settings.
    """
    path = find_checkpoint(config["resume"], Path(config["paths"]["outputs"]))
    checkpoint = own_checkpoint(folder, settings_digest(config)) if path is None else read_checkpoint(path)
    if checkpoint is None:
        return None
    check_resume(checkpoint, model, schedule, config["optimizer"].get("lr"))
    log.info("resuming from %s at step %d", checkpoint.path, checkpoint.step)
    if is_first_rank():
        continue_curves(checkpoint, folder)
    return checkpoint


def fit(trainer: Any, module: Any, data: Any, checkpoint: Checkpoint | None, folder: Path) -> None:
    """Train, and say how to go on where that is cut short.

    Raises:
        SystemExit: interrupted (130); Lightning has turned Ctrl-C into an exit of its own.
        StorageError: the disk is full or refuses.
    """
    path = None if checkpoint is None else str(checkpoint.path)
    try:
        with clear_disk_errors(folder):
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    except Preempted:
        raise  # with the exit code that gives the job back to its queue
    except (KeyboardInterrupt, SystemExit) as error:
        if trainer.is_global_zero:
            print(f"\ninterrupted at step {trainer.global_step}; {how_to_go_on(folder)}", file=sys.stderr)
        raise SystemExit(130) from error
    finally:
        close(trainer.loggers, folder)


def build_optimization(config: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Optimizer and scheduler factories, tried on one number so that a bad value is found before any model loads.

    Raises:
        ConfigError: a value that torch or the scheduler refuses.
    """
    make_optimizer, make_scheduler = instantiate(config["optimizer"]), instantiate(config["scheduler"])
    try:
        optimizer = make_optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    except ValueError as error:  # "Invalid learning rate: -1"
        raise ConfigError(f"optimizer: {error}") from error
    make_scheduler(optimizer)
    return make_optimizer, make_scheduler


def build_trainer(config: Mapping[str, Any], callbacks: list[Any], folder: Path) -> Any:
    """Lightning's Trainer with the configured loggers (several may run at once)."""
    if config["tf32"] and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    nodes = [node for node in config["logger"].values() if node is not None] if is_first_rank() else []
    return trainer_settings.build(
        config["trainer"], folder, callbacks=callbacks, logger=[instantiate(node) for node in nodes]
    )


def resolve_prefix_loss(weight: float | None, model: Mapping[str, Any]) -> float:
    """``None`` means 0.05 for drafters whose prefix rows predict the next token (shifted, causal), else 0.

    Raises:
        ConfigError: a prefix loss is asked of a drafter without such rows.
    """
    shifted, attention, conditioning = model.get("shifted"), model.get("attention"), model.get("conditioning", "none")
    possible = bool(shifted) and attention == "causal_prefix" and conditioning == "none" and not is_masked_lm(model)
    if weight is None:
        return 0.05 if possible else 0.0
    if weight > 0 and not possible:
        raise ConfigError(
            f"prefix_loss_weight={weight} with model.shifted={shifted}, model.attention={attention} and "
            f"model.conditioning={conditioning}: expected model.shifted=true, model.attention=causal_prefix and "
            "model.conditioning=none, as only such block drafters compute a prefix; set prefix_loss_weight=0 (or null)"
        )
    return weight


def build_rollouts(
    data: Mapping[str, Any], verifier: HFVerifier, prompts: Mapping[str, LoadedPrompts], root: Path
) -> tuple[RolloutStore, RolloutStore]:
    """Complete training and held-out stores."""
    generate = instantiate(data["rollouts"])
    named = data["folder"] is not None
    base = Path(data["folder"]) if named else root / data["name"]
    stores = {s: ensure_rollouts(verifier, loaded, generate, base / s, named=named) for s, loaded in prompts.items()}
    return stores["train"], stores["val"]


def build_data(
    data: Mapping[str, Any],
    verifier: HFVerifier,
    gamma: int,
    schedule: ObjectiveSchedule,
    rollouts: Sequence[RolloutStore | Sequence[Rollout]],
    prompts: Sequence[Prompt],
) -> Any:
    """The data module; windows reveal tokens only where an objective of the schedule wants that."""
    online = None
    if data["online"]:
        online = instantiate(data["online_rollouts"])(verifier, ChatEncoder.of(verifier), prompts)
    masking = "random" if schedule.needs_random_masks else "full"
    return instantiate(data["module"])(*rollouts, gamma=gamma, masking=masking, online=online)


def build_callbacks(
    config: Mapping[str, Any], verifier: HFVerifier, held_out: Sequence[Prompt], folder: Path
) -> list[Any]:
    """Callbacks in the order of the configuration; those that need models get them here."""
    extra: dict[str, Callable[[Any], Any]] = {
        "decoding_probe": lambda make: make(
            probe_prompts(held_out[: config["num_probe_prompts"]], verifier),
            make_decoder=partial(probe_decoder, verifier),
        ),
        "drafter_export": lambda make: make(save_drafter=partial(export_drafter, folder)),
    }
    callbacks = []
    for name, node in config["callbacks"].items():
        if node is not None:
            built = instantiate(node)
            callbacks.append(extra[name](built) if name in extra else built)
    return callbacks


def probe_decoder(verifier: HFVerifier, drafter: Any) -> Any:
    """One draft per round, checked by the verifier's own tokens: shows the drafter alone, whatever eval.py uses."""
    return SamplerSettings(name="probe", rule="greedy", drafter="").make(verifier, drafter)


def probe_prompts(prompts: Sequence[Prompt], verifier: HFVerifier) -> list[list[int]]:
    """Their token ids."""
    encoder = ChatEncoder.of(verifier)
    return [encoder.encode(prompt) for prompt in prompts]


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """A full or unwritable disk becomes one clear error; torch hides it in a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        raise StorageError(
            f"training stopped, {problem}; what was written to {folder} stays; free some disk space, then "
            f"{how_to_go_on(folder)}"
        ) from error
