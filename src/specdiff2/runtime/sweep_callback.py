"""What a sweep leaves behind: a status file per job, and the merged table, CSV and K-curve of all finished ones.

``status.json`` (running | done | failed, with the configuration's fingerprint) is written for every run;
``traceback.txt`` beside it for a failed one. Results are collected from the job folders after every job, since
Hydra skips its own end-of-sweep hook when a job has failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specdiff2.evaluation.sweep import merge_jobs
from specdiff2.runtime.provenance import write_json

log = logging.getLogger(__name__)
STATUS_FILE = "status.json"
_current_sweep: list[Path] = []  # folder of the sweep this process leads; at most one


class SweepCallback(Callback):
    """Hydra callback; see ``conf/hydra/default.yaml``."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _current_sweep[:] = [Path(config.hydra.sweep.dir)]

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.runtime.output_dir)
        if not is_done(folder, fingerprint(config)):
            write_json(folder / STATUS_FILE, _status("running", config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        folder = Path(config.hydra.runtime.output_dir)
        status = _status("done" if job_return.status == JobStatus.COMPLETED else "failed", config)
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the property would raise it
            status["error"] = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            (folder / "traceback.txt").write_text(text, encoding="utf-8")
            if config.hydra.mode == RunMode.MULTIRUN:  # a single run ends with this message anyway
                log.error("%s failed: %s", folder, error)
        else:
            (folder / "traceback.txt").unlink(missing_ok=True)  # from an earlier try
        write_json(folder / STATUS_FILE, status)


def fingerprint(config: DictConfig) -> str:
    """Digest of the resolved settings of a job, Hydra's own left out."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    for key in ("hydra", "run_id"):  # where it runs, not what
        plain.pop(key, None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_done(folder: Path, digest: str) -> bool:
    """Whether the job of these settings has already finished in ``folder``."""
    status = read_status(folder / STATUS_FILE)
    return status["status"] == "done" and status.get("fingerprint") == digest


def read_status(path: Path) -> dict[str, Any]:
    """What a job wrote; a missing or damaged file is a job that is not done."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"status": "not started"}
    except ValueError:
        status = None
    if isinstance(status, dict) and isinstance(status.get("status"), str):
        return status
    log.warning("%s: damaged, so the job counts as not done", path)
    return {"status": "damaged"}


def finish_sweep() -> None:
    """Merge what the jobs of the current sweep have written and say where it is; nothing outside a sweep."""
    if not _current_sweep:
        return
    folder = _current_sweep.pop()
    files = sorted(folder.glob(f"*/{STATUS_FILE}"))
    states = {path.parent: read_status(path) for path in files}
    failed = [job for job, state in states.items() if state["status"] != "done"]
    if any((job / "summary.json").is_file() for job in states):  # evaluations; it lists what failed too
        print(merge_jobs(folder))
    else:
        for job, state in states.items():
            print(f"{job}: {state['status']} {state.get('error', '')}".rstrip())
    if failed:
        run_id = "/".join(folder.parts[-2:])
        num_done = len(states) - len(failed)
        print(f"{num_done} of {len(states)} jobs done; add run_id={run_id} to the command to run the others")


def _status(state: str, config: DictConfig) -> dict[str, Any]:
    overrides = OmegaConf.to_container(config.hydra.overrides.task)
    return {"status": state, "fingerprint": fingerprint(config), "overrides": overrides}
