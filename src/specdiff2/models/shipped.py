"""Drafters that come with the package, found by name and by the verifier they were trained for.

``assets/drafters/NAME/`` is a folder written by ``pretrained.save_drafter`` with its card (``models.model_card``).
Wherever a drafter's folder is expected, ``shipped`` means the one for the verifier and model at hand and
``shipped:NAME`` that one. A verifier is known for sure by its fingerprint, once it is loaded; before that only what
certainly does not fit is refused. Knows no configuration file. (A folder of your own of that name: ``./shipped``.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.drafter_files import CONFIG_FILE
from specdiff2.models.pretrained import read_drafter_config
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier

SHIPPED = "shipped"
DRAFTERS_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "drafters"
# a model whose config.json differs here cannot be the verifier that the drafter's layers come from
_SHAPE_KEYS = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def is_shipped(drafter: object) -> bool:
    """Whether ``drafter`` names a shipped one instead of a folder: ``shipped`` or ``shipped:NAME``."""
    return isinstance(drafter, str) and (drafter == SHIPPED or drafter.startswith(f"{SHIPPED}:"))


def shipped_drafters() -> dict[str, BlockDrafterConfig]:
    """What is shipped, by name. Nothing but configs is read.

    Raises:
        CorruptFileError, MismatchError, ConfigError: a shipped folder is damaged.
    """
    folders = sorted(path.parent for path in DRAFTERS_FOLDER.glob(f"[!.]*/{CONFIG_FILE}"))
    return {folder.name: read_drafter_config(folder) for folder in folders}


def shipped_candidates(
    drafter: str, verifier: HFVerifier | str | Path | None, model_name: str | None = None
) -> dict[str, BlockDrafterConfig]:
    """The shipped drafters that ``drafter`` can mean; at least one.

    Args:
        drafter: ``shipped`` or ``shipped:NAME``.
        verifier: a loaded one, or its source before it loads (None: unknown, so every verifier is possible).
        model_name: ``shipped`` alone then means the drafter of that name; None: any drafter of the verifier.

    Raises:
        ConfigError: there is none, for this verifier or under this name.
    """
    name = drafter.removeprefix(SHIPPED).removeprefix(":") or model_name
    known = shipped_drafters()
    found = {key: config for key, config in known.items() if name in (None, key) and _may_fit(config, verifier)}
    if found:
        return found
    told = "; ".join(f"{key} (verifier {config.verifier_name})" for key, config in known.items())
    wanted = "" if name is None else f" named {name}"
    asked = (
        "" if verifier is None else f" for verifier {verifier if isinstance(verifier, str | Path) else verifier.name}"
    )
    raise ConfigError(
        f"drafter={drafter!r}: no drafter{wanted} is shipped{asked}; shipped: {told or 'none'}. Train one for your "
        f"verifier with `python train.py` and your verifier=... and model=... settings (about 15 minutes on 2 cores "
        f"for a small one), then use drafter=outputs/drafters/{name or 'NAME'}/best"
    )


def drafter_folder(drafter: str | Path, verifier: HFVerifier | str | None, model_name: str | None = None) -> str:
    """``drafter`` itself, or the folder of the shipped one that it means; arguments as ``shipped_candidates``.

    Raises:
        ConfigError: none is shipped for this verifier or under this name, or several are and none was named.
    """
    if not is_shipped(drafter):
        return str(drafter)
    found = list(shipped_candidates(str(drafter), verifier, model_name))
    if len(found) > 1:
        choices = ", ".join(f"{SHIPPED}:{name}" for name in found)
        raise ConfigError(f"drafter={drafter!r}: {len(found)} shipped drafters fit; choose one of {choices}")
    return str(DRAFTERS_FOLDER / found[0])


def _may_fit(config: BlockDrafterConfig, verifier: HFVerifier | str | Path | None) -> bool:
    """For a loaded verifier: whether it is the drafter's. For a source: False only where it certainly is not."""
    if verifier is None:
        return True
    if not isinstance(verifier, str | Path):
        return config.verifier_fingerprint == verifier.fingerprint
    path = Path(verifier).expanduser()
    if str(verifier) == config.verifier_name or path.is_file():  # a GGUF file tells nothing before it is converted
        return True
    return path.is_dir() and _same_shape(config, _read_model_config(path))


def _same_shape(config: BlockDrafterConfig, model: dict[str, Any]) -> bool:
    return all(model.get(key) in (None, config.base_config.get(key)) for key in _SHAPE_KEYS)


def _read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; empty where it cannot be read, which loading will explain."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
