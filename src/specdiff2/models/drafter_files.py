"""What every saved drafter shares: a folder with a ``config.json``, replaced as a whole or not at all, never half-read.

Knows folders, digests and which verifier a drafter belongs to, not what a drafter's tensors mean: that is
``models.pretrained`` (block drafters, EAGLE heads) and ``models.masked_lm_files`` (masked-diffusion LMs).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdiff2.models.fingerprint import is_served
from specdiff2.models.safe_folder import backup_of, replace_folder
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, SpecDiffError

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

log = logging.getLogger(__name__)
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"  # the model card of a shipped drafter
CARD_MARK = "<!-- Model card written by specdiff2: written again whenever the drafter is, own edits are lost. -->"
BLOCK_FORMAT = "specdiff2-block-drafter"
MASKED_LM_FORMAT = "specdiff2-masked-lm"
EAGLE_FORMAT = "specdiff2-eagle"
# Block drafters, 1: before conditioning and the Markov head, whose keys then have their defaults.
READABLE_VERSIONS = {BLOCK_FORMAT: (1, 2), MASKED_LM_FORMAT: (1,), EAGLE_FORMAT: (1,)}
_OWN_FILES = (CONFIG_FILE, "model*.safetensors", "model.safetensors.index.json", "adapter_*")  # of any format


# ---------------------------------------------------------------- writing
def store_drafter(
    folder: str | Path,
    format_name: str,
    config: Mapping[str, Any],
    extra: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor],
    write: Callable[[Path], None],
) -> Path:
    """Write ``folder``; a drafter already there is replaced only once the new one is complete on disk.

    A model card beside it is kept: ``model_card.write_card`` writes the new one.

    Args:
        config: of the drafter, kept under "drafter".
        extra: facts about the training, strict JSON, kept under "training".
        tensors: that are stored; checked, and their dtype recorded.
        write: puts them into a folder as ``*.safetensors``, with whatever else belongs to them.

    Raises:
        ConfigError: ``folder`` holds something other than a drafter, or ``extra`` is not strict JSON.
        SpecDiffError: a weight is not finite, or writing failed (full disk); what was there before is untouched.
    """
    folder = Path(os.path.abspath(folder))
    _check_replaceable(folder)
    _check_finite(folder, tensors)
    record = {
        "format": format_name,
        "format_version": READABLE_VERSIONS[format_name][-1],
        "drafter": dict(config),
        "training": dict(extra or {}),
    }
    _dump(record)  # fails here, before anything is written, if it cannot be stored

    def write_all(temporary: Path) -> None:
        write(temporary)
        dtype = str(next(iter(tensors.values())).dtype)
        weights = {"dtype": dtype, "sha256": weights_digest(temporary)}
        (temporary / CONFIG_FILE).write_text(_dump({**record, "weights": weights}), encoding="utf-8")
        if is_card(folder / CARD_FILE):
            shutil.copyfile(folder / CARD_FILE, temporary / CARD_FILE)

    return replace_folder(folder, write_all, "drafter")


def copy_drafter(source: str | Path, folder: str | Path) -> Path:
    """The drafter of ``source`` once more in ``folder``, byte for byte; loads no model. Raises as ``store_drafter``.

    Raises:
        CorruptFileError, MismatchError: ``source`` holds no readable drafter.
    """
    source, folder = Path(source), Path(os.path.abspath(folder))
    read_record(source)
    _check_replaceable(folder)
    return replace_folder(folder, lambda new: shutil.copytree(source, new, dirs_exist_ok=True), "drafter")


def weights_digest(folder: Path) -> str:
    """SHA-256 over the folder's safetensors files, one after the other in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def is_card(path: Path) -> bool:
    """Whether ``path`` is a model card of ours, not somebody's own README.md."""
    return path.name == CARD_FILE and path.is_file() and CARD_MARK in path.read_text("utf-8", errors="replace")


# ---------------------------------------------------------------- reading
def read_record(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a drafter of any format, whose "format" says how to go on.

    Raises:
        CorruptFileError: it is missing, damaged or not a drafter's.
        MismatchError: written by another version of this package.
    """
    folder = Path(folder)
    require_files(folder, "", CONFIG_FILE)
    try:
        record = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise corrupt(folder, CONFIG_FILE, f"not valid JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") not in READABLE_VERSIONS:
        formats = ", ".join(f'"{name}"' for name in READABLE_VERSIONS)
        raise corrupt(folder, CONFIG_FILE, f'expected a config with "format": one of {formats}')
    versions = READABLE_VERSIONS[record["format"]]
    if record.get("format_version") not in versions:
        raise MismatchError(
            f"drafter {folder}: format_version={record.get('format_version')!r}, expected {versions[-1]}; "
            "load it with the version of specdiff2 that saved it, or train it again"
        )
    return record


def require_files(folder: Path, *names: str) -> None:
    """Raises CorruptFileError naming the first of ``names`` that is not in ``folder`` ("": the folder itself)."""
    for path in (folder / name for name in names):
        if not path.exists():
            kept = backup_of(folder)
            found = (
                f"an interrupted save left {kept}: rename it to {folder.name}"
                if kept.exists()
                else "expected a folder written by save_drafter; train one (python train.py) or correct the path"
            )
            raise CorruptFileError(f"drafter {folder}: {path} does not exist; {found}")


def check_keys(values: Any, known: set[str], folder: Path) -> dict[str, Any]:
    """The section "drafter" of a record, which must have exactly the ``known`` keys.

    Raises:
        CorruptFileError: naming those missing and those unknown.
    """
    found = set(values) if isinstance(values, dict) else set()
    if found != known:
        difference = ", ".join(sorted(known ^ found))
        raise corrupt(folder, CONFIG_FILE, f'missing or unknown keys under "drafter": {difference}')
    return values


def read_tensors(record: Mapping[str, Any], folder: Path, *names: str) -> dict[str, Tensor]:
    """All tensors of the files ``names``.

    Raises:
        CorruptFileError: a file is missing, truncated, or not the one that config.json was written with.
    """
    require_files(folder, *names)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise corrupt(folder, name, f"not a complete safetensors file ({error})") from error
    weights = record.get("weights")
    if not isinstance(weights, dict) or weights.get("sha256") != weights_digest(folder):
        raise corrupt(folder, ", ".join(names), "its SHA-256 is not the one in config.json")
    return tensors


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """``found`` has the names and shapes of ``expected``, nothing missing and nothing more.

    Raises:
        MismatchError: naming the first of those that do not fit.
    """
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if problems:
        raise MismatchError(
            f"{where} does not fit its config: {'; '.join(problems[:4])} ({len(problems)} problems); "
            "save the drafter again from its checkpoint"
        )


def check_belongs(config: Any, verifier: HFVerifier, folder: Path) -> None:
    """The drafter in ``folder`` was made for this verifier: its tokenizer, and for a block drafter its very weights.

    A masked-diffusion LM has nothing of the verifier in it, and one may serve several of the same tokenizer (as in the
    paper): losslessness does not depend on which one it was trained for. Another one is only told. So is one whose
    rollouts a server sampled (``served:NAME``): nobody here has seen its weights.

    Raises:
        MismatchError: it was made for another verifier, tokenizer or vocabulary.
    """
    trained_for = f"{config.verifier_name} ({config.verifier_fingerprint})"
    given = f"{verifier.name} ({verifier.fingerprint})"
    same, is_bound = config.verifier_fingerprint == verifier.fingerprint, hasattr(config, "layer_indices")
    tokenizer = tokenizer_fingerprint(verifier.tokenizer)
    # a drafter with another tokenizer counts its own tokens; the verifier's then follow from the fingerprint alone
    same_size = config.vocab_size == verifier.vocab_size or getattr(config, "other_tokenizer", False)
    refuse_differences(
        folder,
        {
            "verifier": (trained_for, given, same or not is_bound),
            "tokenizer": (config.tokenizer_fingerprint, tokenizer, config.tokenizer_fingerprint == tokenizer),
            "vocabulary size": (config.vocab_size, verifier.vocab_size, same_size),
        },
        "decode with the verifier it was trained for, or train a drafter for this one",
    )
    if same:
        return
    if is_served(config.verifier_fingerprint) or is_served(verifier.fingerprint):
        log.warning("drafter %s was trained for verifier %s and now serves %s: the tokenizers agree, the weights could "
                    "not be compared", folder, trained_for, given)  # fmt: skip
    else:
        log.info("drafter %s was trained for verifier %s and now serves %s", folder, trained_for, given)


def refuse_differences(folder: Path, checks: Mapping[str, tuple[Any, Any, bool]], remedy: str) -> None:
    """Raises MismatchError for the first of ``checks`` (name -> saved, given, whether they agree) that fails."""
    for name, (saved, given, same) in checks.items():
        if not same:
            raise MismatchError(f"drafter {folder} was trained for {name} {saved}, got {name} {given}; {remedy}")


def corrupt(folder: Path, file: str, problem: str) -> CorruptFileError:
    return CorruptFileError(f"drafter {folder}: {file}: {problem}; copy the folder again or save the drafter again")


# ---------------------------------------------------------------- inside
def _dump(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training info of a drafter: {error}; expected strict JSON (no NaN, no tensors)") from error


def _check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise SpecDiffError(
            f"drafter not saved to {folder}: {broken[0]} holds NaN or infinity (training diverged); lower the learning "
            "rate and resume from an earlier checkpoint"
        )


def _check_replaceable(folder: Path) -> None:
    """Replacing removes the old folder, so it must hold nothing but a drafter."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"drafter folder {folder}: is a file; choose another path")
    others = [
        file.name
        for file in folder.iterdir()
        if not any(fnmatch(file.name, own) for own in _OWN_FILES) and not is_card(file)
    ]
    if others:
        raise ConfigError(f"drafter folder {folder}: saving would remove {others[0]}; choose another folder")
