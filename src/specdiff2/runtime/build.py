"""From a composed configuration to checked values and objects: the only module that calls Hydra.

``compose -> check -> begin -> instantiate``; entry points and ``runtime.training`` / ``runtime.evaluation`` use
these steps and never see a Hydra object.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdiff2.launch import is_first_rank, own_rank
from specdiff2.runtime import slurm
from specdiff2.runtime.auto_settings import resolve_auto
from specdiff2.runtime.command import clear_composition_error, quote_prompt
from specdiff2.runtime.config_schema import validate
from specdiff2.runtime.logging import quiet_libraries
from specdiff2.runtime.provenance import write_run_json
from specdiff2.runtime.ranks import run_folder_of_rank
from specdiff2.runtime.seeding import seed_everything, set_threads
from specdiff2.runtime.storage import storage_problem
from specdiff2.runtime.sweep_callback import fingerprint, finish_sweep, is_done
from specdiff2.training.launcher_watch import end_with_launcher
from specdiff2.types import ConfigError, SpecDiffError

log = logging.getLogger(__name__)
_typed: list[str] = []  # the command line as it was before `quote_prompt`
_run_ids: list[str] = []  # of the run in progress; at most one


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
    resolve_auto(config)
    validate(config, schema)
    return config  # type: ignore[return-value]


def begin(config: dict[str, Any]) -> Path:
    """Seed, set threads and write ``run.json`` before any work; returns the run folder.

    From now on this process ends with the one that started it as a rank.
    """
    end_with_launcher()
    seed_everything(config["seed"])
    threads = set_threads(config["threads"])
    folder = run_folder_of_rank(config)
    _run_ids[:] = [config["run_id"]]
    if _typed:
        sys.argv[1:] = _typed  # run.json records what the user typed, without our quotes
    if is_first_rank() or "sampler" in config:  # each rank of an evaluation has a folder of its own
        record = write_run_json(folder, config, threads=threads)
        log.info("%s; %s threads, %s", record["machine"], threads, record["dtype"])
    else:
        logging.disable(logging.INFO)  # lines come once; warnings and errors may be this rank's own
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
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
    _typed[:] = sys.argv[1:]
    sys.argv[1:] = quote_prompt(_typed)
    try:
        main()
    except (SpecDiffError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_report(error, config_dir))
    except (OSError, RuntimeError) as error:
        message, refused = storage_problem(error), slurm.refusal(error)
        if refused is not None:
            sys.exit(f"error: {refused}")
        if message is None:
            raise
        print(f"error: {message}; free some space (or choose another paths.outputs) and run the same command again "
              f"with {_how_to_continue()}; what was written stays", file=sys.stderr)  # fmt: skip
        sys.exit(1)
    except KeyboardInterrupt:
        finish_sweep(wait=False)
        print(f"\ninterrupted; what was written stays. Rerun with {_how_to_continue()} to go on.", file=sys.stderr)
        sys.exit(130)
    finally:
        finish_sweep()


def _how_to_continue() -> str:
    """The run_id of the run in progress, as an override."""
    return f"run_id={_run_ids[-1]}" if _run_ids else "the same run_id"


def _report(error: Exception, config_dir: Path) -> int:
    """Print one message; returns the exit code."""
    if isinstance(error, InstantiationException):
        raise error
    if not isinstance(error, SpecDiffError):
        error = clear_composition_error(error, config_dir, _typed)
    rank = own_rank()
    print(f"error: rank {rank}: {error}" if rank else f"error: {error}", file=sys.stderr)
    return 1
