"""From a composed configuration to checked values and objects: the only module that calls Hydra.

``compose -> check -> begin -> instantiate``; entry points and ``runtime.training`` / ``runtime.evaluation`` use
these steps and never see a Hydra object.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdiff2.models.dtypes import pick_dtype
from specdiff2.runtime.config_schema import unknown_key, validate
from specdiff2.runtime.logging import quiet_libraries
from specdiff2.runtime.provenance import write_run_json
from specdiff2.runtime.seeding import seed_everything, set_threads
from specdiff2.runtime.sweep_callback import fingerprint, finish_sweep, is_done
from specdiff2.types import ConfigError, SpecDiffError

log = logging.getLogger(__name__)


def check(cfg: DictConfig, schema: type) -> dict[str, Any]:
    """The resolved, validated configuration as a plain dictionary. Loads no model.

    Raises:
        ConfigError: a required value is missing, an interpolation fails, or ``config_schema.validate`` refuses.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"missing value for {', '.join(missing)}: set it, e.g. `{missing[0]}=...`")
    try:
        config = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).split(chr(10))[0]}") from error
    assert isinstance(config, dict)
    _resolve_precision(config)
    validate(config, schema)
    return config  # type: ignore[return-value]


def begin(config: dict[str, Any]) -> Path:
    """Seed, set threads and write ``run.json`` before any work; returns the run folder."""
    seed_everything(config["seed"])
    threads = set_threads(config["threads"])
    folder = Path(config["paths"]["run"])
    record = write_run_json(folder, config, threads=threads)
    log.info("%s; %s threads, %s", record["machine"], threads, record["dtype"])
    return folder


def is_finished(cfg: DictConfig) -> bool:
    """Whether these settings have already run to the end in their run folder (a sweep that is run again)."""
    folder = Path(cfg.paths.run)
    if is_done(folder, fingerprint(cfg)):
        log.info("%s: done already, nothing to do", folder)
        return True
    return False


def instantiate(node: Any, **arguments: Any) -> Any:
    """Build what a checked node describes; nested nodes first. Errors of the constructors come through as they are."""
    try:
        return hydra_instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, SpecDiffError):
                raise cause from None
            cause = cause.__cause__
        raise


def load_config(config_dir: Path, name: str, overrides: list[str], run: Path | None = None) -> DictConfig:
    """Compose outside an entry point (tests, notebooks): like ``python NAME.py OVERRIDES``, run folder ``run``."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir.resolve()), version_base="1.3", job_name=name):
        cfg = compose(name, overrides, return_hydra_config=True)
    run_folder = str(run if run is not None else cfg.hydra.run.dir)
    OmegaConf.set_readonly(cfg.hydra, False)
    cfg.hydra.runtime.output_dir = run_folder
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.paths.run = run_folder
    del cfg["hydra"]
    return cfg


def run_entry_point(main: Callable[[], Any], config_dir: Path) -> None:
    """Run a ``@hydra.main`` function: one clear message and exit code 1 for errors a user can act on.

    Anything else is a bug here and keeps its traceback.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra would swallow the exception and exit on its own
    quiet_libraries()
    try:
        main()
    except (SpecDiffError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_report(error, config_dir))
    except KeyboardInterrupt:
        finish_sweep()
        print("\ninterrupted; what was written stays. Rerun with the same run_id to go on.", file=sys.stderr)
        sys.exit(130)
    finally:
        finish_sweep()


def _report(error: Exception, config_dir: Path) -> int:
    """Print one message; returns the exit code."""
    if isinstance(error, InstantiationException):
        raise error
    if not isinstance(error, SpecDiffError):
        error = _clear_composition_error(error, config_dir)
    print(f"error: {error}", file=sys.stderr)
    return 1


def _clear_composition_error(error: Exception, config_dir: Path) -> Exception:
    """Hydra's and OmegaConf's own refusals (``gama=3``, a missing option) in our words."""
    text = str(error)
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if found is None or not isinstance(error, ConfigCompositionException | OmegaConfBaseException):
        return ConfigError(text.split("\nConfig search path:")[0].strip())
    full = re.search(r"full_key: (\S+)", str(error.__cause__ or text))
    key = full.group(1) if full else found.group(1)
    return unknown_key(found.group(1) if "." in found.group(1) else key, _known_keys(config_dir))


def _known_keys(config_dir: Path) -> list[str]:
    """Every dotted key of the two entry points' default configurations, for suggestions."""
    keys: list[str] = []
    for path in sorted(config_dir.glob("*.yaml")):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
            keys += _flatten(OmegaConf.to_container(compose(path.stem), resolve=False), "")
    return sorted(set(keys))


def _flatten(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    start = f"{prefix}." if prefix else ""
    children = [key for name, child in node.items() for key in _flatten(child, f"{start}{name}")]
    return ([prefix] if prefix else []) + children


def _resolve_precision(config: dict[str, Any]) -> None:
    """``trainer.precision: auto`` -> bf16-mixed where the machine multiplies bf16 natively, else 32-true."""
    trainer = config.get("trainer")
    if isinstance(trainer, dict) and trainer.get("precision") == "auto":
        device = "cuda" if trainer.get("accelerator") in ("gpu", "cuda") else "cpu"
        trainer["precision"] = "bf16-mixed" if pick_dtype("auto", device) is torch.bfloat16 else "32-true"
