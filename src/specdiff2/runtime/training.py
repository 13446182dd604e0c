"""``train.py`` after validation: rollouts, drafter, Lightning, export.

Wiring only. What can be refused without a model (objective, checkpoint to resume) is built or looked up first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.rollouts import RolloutStore
from specdiff2.data.windows import draft_vocabulary
from specdiff2.models.pretrained import load_drafter, read_training_info, save_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.objectives import ObjectiveSchedule
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.rollouts import ensure_rollouts
from specdiff2.training.loggers import close
from specdiff2.training.module import DistillationModule
from specdiff2.types import ConfigError, SpecDiffError

log = logging.getLogger(__name__)


def train(config: Mapping[str, Any], folder: Path) -> None:
    """Train and export; checkpoints, metrics and drafters in ``folder``, published drafters in ``paths.drafters``.

    Raises:
        ConfigError: no checkpoint to resume, prompts or rollouts that cannot train, a bad objective.
        MismatchError: rollouts or the checkpoint belong to other settings.
        SpecDiffError: the disk is full; what was written before stays.
    """
    check_prefix_loss(config["prefix_loss_weight"], config["model"])
    checkpoint = find_checkpoint(config["resume"], Path(config["paths"]["outputs"]))
    schedule: ObjectiveSchedule = instantiate(config["objective"])
    log.info("objective: %s", " -> ".join(f"{s['name']} ({s['steps'] or 'to the end'})" for s in schedule.describe()))
    make_optimizer, make_scheduler = build_optimization(config)
    verifier: HFVerifier = instantiate(config["verifier"])
    train_store, val_store = build_rollouts(config["data"], verifier, Path(config["paths"]["rollouts"]))
    drafter = build_drafter(config, verifier, train_store)
    data = build_data(config["data"], verifier, drafter.gamma, schedule, (train_store, val_store))
    online = bool(config["data"]["online"])
    module = DistillationModule(
        drafter,
        verifier if online or schedule.needs_verifier_probs else None,
        schedule,
        make_optimizer,
        make_scheduler,
        refresh_rollouts=data.refresh if online else None,
        refresh_every_n_steps=config["data"]["refresh_every_n_steps"] if online else 0,
        prefix_loss_weight=config["prefix_loss_weight"],
    )
    trainer = build_trainer(config, verifier, folder)
    try:
        with clear_disk_errors(folder):
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    finally:
        close(trainer.loggers)
    if trainer.is_global_zero:
        report(config, folder, verifier)


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


def build_trainer(config: Mapping[str, Any], verifier: HFVerifier, folder: Path) -> Any:
    """Lightning's Trainer with the configured callbacks and loggers (several loggers may run at once)."""
    return instantiate(
        config["trainer"],
        callbacks=build_callbacks(config, verifier, folder),
        logger=[instantiate(node) for node in config["logger"].values() if node is not None],
        default_root_dir=str(folder),
    )


def check_prefix_loss(weight: float, model: Mapping[str, Any]) -> None:
    """Raises ConfigError: a prefix loss is asked of a drafter whose prefix rows do not predict the next token."""
    shifted, attention = model.get("shifted"), model.get("attention")
    if weight > 0 and not (shifted and attention == "causal_prefix"):
        raise ConfigError(
            f"prefix_loss_weight={weight} with model.shifted={shifted} and model.attention={attention}: expected "
            "model.shifted=true and model.attention=causal_prefix; set prefix_loss_weight=0"
        )


def find_checkpoint(resume: bool | str, outputs: Path) -> str | None:
    """The checkpoint file that ``resume`` means: ``True`` the newest ``last.ckpt``, else a run folder or a file.

    Raises:
        ConfigError: there is none.
    """
    if resume is False:
        return None
    if resume is True:
        found = sorted(outputs.glob("**/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ConfigError(f"resume=true: no checkpoints/last.ckpt below {outputs}; start with resume=false")
        return str(found[-1])
    path = Path(resume)
    candidates = [path, path / "last.ckpt", path / "checkpoints" / "last.ckpt"]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise ConfigError(
        f"resume={resume!r}: no such checkpoint; expected a .ckpt file or a run folder with checkpoints/last.ckpt"
    )


def build_rollouts(data: Mapping[str, Any], verifier: HFVerifier, root: Path) -> tuple[RolloutStore, RolloutStore]:
    """Complete training and held-out stores."""
    generate = instantiate(data["rollouts"])
    named = data["folder"] is not None
    base = Path(data["folder"]) if named else root / data["name"]
    sources = {"train": instantiate(data["train_prompts"]), "val": instantiate(data["val_prompts"])}
    stores = {s: ensure_rollouts(verifier, source, generate, base / s, named=named) for s, source in sources.items()}
    return stores["train"], stores["val"]


def build_drafter(config: Mapping[str, Any], verifier: HFVerifier, store: RolloutStore) -> Any:
    """A fresh drafter that proposes what occurs in the rollouts."""
    ids = draft_vocabulary(store.load(), config["data"]["draft_vocab_size"], verifier.eos_ids)
    drafter = instantiate(config["model"])(verifier, draft_vocab_ids=ids)
    num_trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    log.info(
        "drafter: %.1f M trained weights, %d of %d tokens draftable", num_trained / 1e6, len(ids), verifier.vocab_size
    )
    return drafter


def build_data(
    data: Mapping[str, Any],
    verifier: HFVerifier,
    gamma: int,
    schedule: ObjectiveSchedule,
    stores: tuple[RolloutStore, RolloutStore],
) -> Any:
    """The data module; windows reveal tokens only where an objective of the schedule wants that."""
    online = None
    if data["online"]:
        prompts = instantiate(data["train_prompts"]).load()
        online = instantiate(data["online_rollouts"])(verifier, ChatEncoder(verifier.tokenizer), prompts)
    masking = "random" if schedule.needs_random_masks else "full"
    return instantiate(data["module"])(*stores, gamma=gamma, masking=masking, online=online)


def build_callbacks(config: Mapping[str, Any], verifier: HFVerifier, folder: Path) -> list[Any]:
    """Callbacks in the order of the configuration; those that need models get them here."""
    extra: dict[str, Callable[[Any], Any]] = {
        "decoding_probe": lambda make: make(
            probe_prompts(config, verifier), make_decoder=partial(probe_decoder, verifier)
        ),
        "drafter_export": lambda make: make(save_drafter=partial(export_drafter, folder)),
    }
    callbacks = []
    for name, node in config["callbacks"].items():
        if node is not None:
            built = instantiate(node)
            callbacks.append(extra[name](built) if name in extra else built)
    return callbacks


def export_drafter(run: Path, drafter: Any, folder: Path, facts: Mapping[str, Any]) -> None:
    """Save with the run it comes from, so that reports find the training curves."""
    save_drafter(drafter, folder, {"run": str(run), **facts})


def probe_decoder(verifier: HFVerifier, drafter: Any) -> Any:
    """One draft per round, checked by the verifier's own tokens: shows the drafter alone, whatever eval.py uses."""
    return SamplerSettings(name="probe", rule="greedy", drafter="").make(verifier, drafter)


def probe_prompts(config: Mapping[str, Any], verifier: HFVerifier) -> list[list[int]]:
    """Token ids of the first held-out prompts."""
    encoder = ChatEncoder(verifier.tokenizer)
    prompts = instantiate(config["data"]["val_prompts"]).load()[: config["num_probe_prompts"]]
    return [encoder.encode(prompt) for prompt in prompts]


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """A full or unwritable disk becomes one clear error; torch hides it in a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
        if not full and "PytorchStreamWriter" not in str(error):
            raise
        raise SpecDiffError(
            f"writing to {folder} failed: {error}; free some disk space and go on with resume={folder}"
        ) from error


def report(config: Mapping[str, Any], folder: Path, verifier: HFVerifier) -> None:
    """Publish the exported drafters and say what to do next."""
    exported = sorted(path for path in (folder / "drafter").glob("*") if (path / "config.json").is_file())
    if not exported:
        print("no drafter was exported (the run ended before its first evaluation)")
        return
    shown = folder / "drafter"
    if config["publish"]:
        shown = Path(config["paths"]["drafters"]) / config["model_name"]
        for path in exported:
            drafter = load_drafter(path, verifier, dtype=torch.float32)  # as trained, not the verifier's dtype
            save_drafter(drafter, shown / path.name, extra=read_training_info(path))
    print(f"drafters: {', '.join(str(shown / path.name) for path in exported)}")
    print(f"measure:  python eval.py drafter={shown / 'best'}")
