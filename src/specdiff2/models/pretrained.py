"""Block drafters on disk: a folder with ``config.json`` and ``model.safetensors``.

The weights file holds the drafter's own trained tensors and nothing of the verifier; the config holds everything else
(draft vocabulary, window layout, what it was trained for), so training and decoding read the same file. Loading
never runs code from the folder and never fills a missing tensor with random numbers.

A save is complete or does not happen: a new folder is written beside the old one and renamed over it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.packed_linear import pack_linears
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SpecDiffError

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

FORMAT = "specdiff2-block-drafter"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1: before conditioning and the Markov head, whose keys then have their defaults
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"  # the model card of a shipped drafter
CARD_MARK = "<!-- Model card written by specdiff2: written again whenever the drafter is, own edits are lost. -->"


def save_drafter(
    drafter: BlockDrafter,
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``folder``; a drafter already there is replaced only once the new one is complete on disk.

    A model card beside it is kept: ``model_card.write_card`` writes the new one.

    Args:
        extra: facts about the training (steps, metrics, run folder, ...), strict JSON, kept under "training".
        dtype: of the stored tensors; None keeps the drafter's own (bfloat16 halves the file).

    Raises:
        ConfigError: ``folder`` holds something other than a drafter, or ``extra`` is not strict JSON.
        SpecDiffError: a weight is not finite, or writing failed (full disk); what was there before is untouched.
    """
    folder = Path(os.path.abspath(folder))
    _check_replaceable(folder)
    state = drafter.state_dict()
    tensors = {name: tensor.detach().to(device="cpu", dtype=dtype).contiguous() for name, tensor in state.items()}
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise SpecDiffError(
            f"drafter not saved to {folder}: {broken[0]} holds NaN or infinity (training diverged); lower the learning "
            "rate and resume from an earlier checkpoint"
        )
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "drafter": drafter.config.to_dict(),
        "training": dict(extra or {}),
    }
    _dump(record)  # fails here, before anything is written, if it cannot be stored
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        _write(temporary, tensors, record)
        if is_card(folder / CARD_FILE):
            shutil.copyfile(folder / CARD_FILE, temporary / CARD_FILE)
        _swap_in(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise SpecDiffError(
            f"drafter not saved to {folder}: {error}; what was there before is untouched; free some disk space or "
            "choose another folder, and save again"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already after a swap
    return folder


def load_drafter(folder: str | Path, verifier: HFVerifier, dtype: torch.dtype | None = None) -> BlockDrafter:
    """The drafter saved in ``folder``, around ``verifier``, in eval mode on the verifier's device.

    In bfloat16 on a CPU its layers are packed for decoding; with gradients on, packing does nothing.

    Args:
        dtype: of its weights; None takes the verifier's, which is what decoding wants.

    Raises:
        CorruptFileError: the folder or one of its files is missing, truncated or damaged.
        MismatchError: it was made for another verifier or tokenizer, or a tensor is missing, unknown or misshapen.
        ConfigError: a value in its config is out of range.
    """
    folder = Path(folder)
    record = _read_config(folder)
    config = _parse_config(record, folder)
    check_belongs(config, verifier, folder)
    tensors = _read_weights(record, folder)
    base_config = AutoConfig.for_model(**config.base_config)
    drafter = BlockDrafter(config, verifier, base_config, dtype=dtype or verifier.dtype)
    _check_tensors(tensors, drafter, folder)
    drafter.load_state_dict(tensors)
    pack_linears(drafter)
    return drafter.eval()


def read_training_info(folder: str | Path) -> dict[str, Any]:
    """The ``extra`` given to ``save_drafter``. Raises as ``load_drafter``."""
    return dict(_read_config(Path(folder)).get("training", {}))


def read_drafter_config(folder: str | Path) -> BlockDrafterConfig:
    """What the drafter in ``folder`` is, without its weights. Raises as ``load_drafter``."""
    return _parse_config(_read_config(Path(folder)), Path(folder))


# ---------------------------------------------------------------- reading
def _read_config(folder: Path) -> dict[str, Any]:
    for path in (folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        if not path.exists():
            kept = _backup_of(folder)
            found = (
                f"an interrupted save left {kept}: rename it to {folder.name}"
                if kept.exists()
                else ("expected a folder written by save_drafter; train one (python train.py) or correct the path")
            )
            raise CorruptFileError(f"drafter {folder}: {path} does not exist; {found}")
    try:
        record = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise _corrupt(folder, CONFIG_FILE, f"not valid JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _corrupt(folder, CONFIG_FILE, f'expected a config with "format": "{FORMAT}"')
    if record.get("format_version") not in READABLE_VERSIONS:
        raise MismatchError(
            f"drafter {folder}: format_version={record.get('format_version')!r}, expected {FORMAT_VERSION}; "
            "load it with the version of specdiff2 that saved it, or train it again"
        )
    return record


def _parse_config(record: dict[str, Any], folder: Path) -> BlockDrafterConfig:
    values = record.get("drafter")
    known = {field.name for field in dataclasses.fields(BlockDrafterConfig)}
    if isinstance(values, dict) and record.get("format_version") == 1:
        values = {"conditioning": "none", "feature_layers": [], "markov_rank": 0} | values  # as it was then
    if not isinstance(values, dict) or set(values) != known:
        difference = sorted(known ^ set(values if isinstance(values, dict) else ()))
        raise _corrupt(folder, CONFIG_FILE, f'missing or unknown keys under "drafter": {", ".join(difference)}')
    return BlockDrafterConfig(**values)


def check_belongs(config: BlockDrafterConfig, verifier: HFVerifier, folder: Path) -> None:
    """The drafter in ``folder`` was made for this verifier.

    Raises:
        MismatchError: it was made for another one, another tokenizer or another vocabulary.
    """
    checks = {
        "verifier": (
            f"{config.verifier_name} ({config.verifier_fingerprint})",
            f"{verifier.name} ({verifier.fingerprint})",
            config.verifier_fingerprint == verifier.fingerprint,
        ),
        "tokenizer": (
            config.tokenizer_fingerprint,
            tokenizer_fingerprint(verifier.tokenizer),
            config.tokenizer_fingerprint == tokenizer_fingerprint(verifier.tokenizer),
        ),
        "vocabulary size": (config.vocab_size, verifier.vocab_size, config.vocab_size == verifier.vocab_size),
    }
    for name, (saved, given, same) in checks.items():
        if not same:
            raise MismatchError(
                f"drafter {folder} was trained for {name} {saved}, got {name} {given}; decode with the verifier it "
                "was trained for, or train a drafter for this one"
            )


def _read_weights(record: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _corrupt(folder, WEIGHTS_FILE, f"not a complete safetensors file ({error})") from error
    weights = record.get("weights")
    expected = weights.get("sha256") if isinstance(weights, dict) else None
    if expected != _sha256(path):
        raise _corrupt(folder, WEIGHTS_FILE, "its SHA-256 is not the one in config.json")
    return tensors


def _check_tensors(tensors: dict[str, Tensor], drafter: BlockDrafter, folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        raise MismatchError(
            f"drafter {folder}: {WEIGHTS_FILE} does not fit its config: {'; '.join(problems[:4])} "
            f"({len(problems)} problems); save the drafter again from its checkpoint"
        )


def _corrupt(folder: Path, file: str, problem: str) -> CorruptFileError:
    return CorruptFileError(f"drafter {folder}: {file}: {problem}; copy the folder again or save the drafter again")


# ---------------------------------------------------------------- writing
def _dump(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training info of a drafter: {error}; expected strict JSON (no NaN, no tensors)") from error


def _check_replaceable(folder: Path) -> None:
    """Replacing removes the old folder, so it must hold nothing but a drafter."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"drafter folder {folder}: is a file; choose another path")
    others = [f.name for f in folder.iterdir() if f.name not in (CONFIG_FILE, WEIGHTS_FILE) and not is_card(f)]
    if others:
        raise ConfigError(f"drafter folder {folder}: saving would remove {others[0]}; choose another folder")


def is_card(path: Path) -> bool:
    """Whether ``path`` is a model card of ours, not somebody's own README.md."""
    return path.name == CARD_FILE and path.is_file() and CARD_MARK in path.read_text("utf-8", errors="replace")


def _write(folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    folder.chmod(0o755)  # mkdtemp makes private folders; a drafter is an ordinary one
    save_file(tensors, folder / WEIGHTS_FILE)
    weights = {"dtype": str(next(iter(tensors.values())).dtype), "sha256": _sha256(folder / WEIGHTS_FILE)}
    (folder / CONFIG_FILE).write_text(_dump({**record, "weights": weights}), encoding="utf-8")
    for file in folder.iterdir():
        _sync(file)


def _swap_in(temporary: Path, folder: Path) -> None:
    backup = _backup_of(folder)
    if not folder.exists():
        os.replace(temporary, folder)
        return
    shutil.rmtree(backup, ignore_errors=True)
    os.replace(folder, backup)  # a folder cannot be renamed over another one
    try:
        os.replace(temporary, folder)
    except OSError:
        os.replace(backup, folder)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def _backup_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Data on disk before the rename that makes it visible, where the file system can."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())
