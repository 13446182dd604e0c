"""Upload finished runs and sweeps to Weights & Biases, and build a W&B Report of them, from their local files.

python -m specdiff2.runtime.wandb_report outputs/multirun/eval/my_sweep --wandb entity/project
python -m specdiff2.runtime.wandb_report outputs/eval/my_run --wandb project --offline    # later: wandb sync
python -m specdiff2.runtime.wandb_report outputs/eval/my_run --wandb entity/project --publish    # the report as well

Training, evaluation and sweep folders alike; the trainings that an evaluated drafter came from go along. Every folder
becomes a run of the same group; uploading it again replaces its run. W&B's own files and the report
(``wandb_report.json``) are written into the first folder; the others are only read.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wandb

from specdiff2.models.shipped import drafter_folder
from specdiff2.runtime.rebuild_report import read_training_runs
from specdiff2.runtime.tool import run_tool
from specdiff2.runtime.wandb_charts import Chart, Content, read_content
from specdiff2.runtime.wandb_panels import build_report, write_report_json
from specdiff2.training.wandb_artifacts import drafter_artifact, log_training_artifacts, run_name, use_artifact
from specdiff2.training.wandb_runs import has_key, run_config, start_run
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)


@dataclass
class WandbTarget:
    """Where runs go.

    Attributes:
        entity: user or team; None: the default of the API key.
        artifacts: log drafters and rollouts too.
    """

    project: str
    entity: str | None = None
    offline: bool = False
    artifacts: bool = True
    init_timeout_s: float = 20.0

    @classmethod
    def parse(cls, text: str, **options: Any) -> WandbTarget:
        """``project`` or ``entity/project``.

        Raises:
            ConfigError: neither.
        """
        parts = text.split("/")
        if len(parts) > 2 or not all(parts):
            raise ConfigError(f"--wandb {text!r}: expected project or entity/project")
        return cls(parts[-1], parts[0] if len(parts) == 2 else None, **options)


def upload(folders: Sequence[Path], target: WandbTarget, *, fall_back: bool = False) -> list[Path]:
    """Upload the runs (or record them offline) and return the folders of W&B's own files, in the first one's ``wandb``.

    Args:
        fall_back: record offline, with a warning, where W&B cannot be reached; else that is an error.

    Raises:
        ConfigError: no key, host not reachable, W&B disabled, or a folder without results.
        CorruptFileError: a file of a run is damaged.
    """
    if os.environ.get("WANDB_MODE") == "disabled":
        if not fall_back:
            raise ConfigError("WANDB_MODE=disabled: nothing would be recorded; unset it")
        log.warning("W&B is disabled (WANDB_MODE): nothing is recorded")
        return []
    contents, group = collect(folders), group_name(folders)
    return [_upload_one(content, group, folders[0], target, fall_back) for content in contents]


def collect(folders: Iterable[Path]) -> list[Content]:
    """The runs of all folders, trainings first: what they log, later runs use."""
    folders = list(folders)
    found = [content for folder in folders for content in read_content(folder)]
    evaluated = [content.folder for content in found if content.kind == "eval"]
    trained = [content for folder in evaluated for run in read_training_runs(folder) for content in read_content(run)]
    unique = {(content.folder.resolve(), content.kind): content for content in [*found, *trained]}
    return sorted(unique.values(), key=lambda content: ("train", "eval", "sweep").index(content.kind))


def group_name(folders: Sequence[Path]) -> str:
    """One name for what is uploaded together."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", "+".join(run_name(folder.resolve()) for folder in folders))[:120]


def _upload_one(content: Content, group: str, out: Path, target: WandbTarget, fall_back: bool) -> Path:
    name = run_name(content.folder.resolve())
    identity = f"{content.kind} {content.folder.resolve()} {content.provenance.get('started_at')}"
    run = start_run(
        out,
        target.project,
        "offline" if target.offline else "online",
        fall_back=fall_back,
        init_timeout_s=target.init_timeout_s,
        entity=target.entity,
        id=hashlib.sha256(identity.encode()).hexdigest()[:12],
        name=name,
        group=group,
        job_type=content.kind,
        config=run_config(content.provenance),
        # this process is not the run: its console, machine and code say nothing about it
        settings={"console": "off", "x_disable_meta": True, "x_disable_stats": True, "disable_git": True},
    )
    log_charts(run, content.charts)
    run.summary.update(content.summary())
    for table, (columns, lines) in content.tables().items():
        run.log({table: wandb.Table(columns, lines, allow_mixed_types=True)})
    if target.artifacts and content.kind == "train":
        log_training_artifacts(run, content.folder)
    elif target.artifacts and content.kind == "eval":
        for drafter in evaluated_drafters(content.provenance.get("config", {})):
            use_artifact(run, drafter_artifact(drafter))
    files = Path(run.dir).parent
    run.finish()
    log.info("W&B run %s (%s) in %s", name, content.kind, files)
    return files


def log_charts(run: Any, charts: Sequence[Chart]) -> None:
    """Every chart's points, as history over its own step metric; charts over the same one share their rows."""
    rows: dict[str, dict[float, dict[str, float]]] = {}
    for chart in charts:
        run.define_metric(chart.x, hidden=True)
        for name in chart.series():
            run.define_metric(name, step_metric=chart.x)
        for point in chart.points:
            rows.setdefault(chart.x, {}).setdefault(point[chart.x], {}).update(point)
    for points in rows.values():
        for value in sorted(points):
            run.log(points[value])


def evaluated_drafters(config: Mapping[str, Any]) -> list[Path]:
    """Folders of the drafters that an evaluation used, as far as they are still there."""
    nodes = [*(config.get("methods") or {}).values(), config.get("sampler") or {}]
    names = [
        str(one["drafter"]) for node in nodes for one in (node, *(node.get("drafters") or ())) if one.get("drafter")
    ]
    folders = []
    for name in dict.fromkeys(names):
        folder = Path(drafter_folder(name, config.get("verifier", {}).get("source"), config.get("model_name")))
        folders += [folder] if (folder / "config.json").is_file() else []
    return folders


def publish(report: Any) -> str:
    """Save the report at W&B and return its address.

    Raises:
        ConfigError: no entity, no key, or the host cannot be reached.
    """
    if not report.entity:
        raise ConfigError("a report belongs to a user or team: expected --wandb entity/project with --publish")
    kept = "wandb_report.json keeps it: publish it later with the same command"
    try:
        if not has_key():
            raise ConfigError(
                f"the report was not published, W&B has no API key on this machine (`wandb login`); {kept}"
            )
        return str(report.save().url)
    except (wandb.errors.Error, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"the report was not published, W&B cannot be reached ({reason}); {kept}") from error


def report_and_upload(folders: Sequence[Path], target: WandbTarget, *, title: str | None, publishing: bool) -> str:
    """What the command does: the report as a local file, the runs, the report at W&B; then one line about each.

    Raises:
        ConfigError, CorruptFileError: as ``upload`` and ``publish``. The local report has been written before.
    """
    report = build_report(target.project, target.entity or "", collect(folders), group_name(folders), title)
    lines = [f"report: {write_report_json(report, folders[0])}"]
    lines += [f"run: {files}" for files in upload(folders, target)]
    if publishing:
        lines.append(f"published: {publish(report)}")
    if target.offline:
        lines.append(f"upload later: wandb sync {' '.join(line[5:] for line in lines[1:])}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(
        prog="python -m specdiff2.runtime.wandb_report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of finished runs or sweeps")
    parser.add_argument("--wandb", required=True, metavar="ENTITY/PROJECT", help="or PROJECT, of the key's own entity")
    parser.add_argument("--offline", action="store_true", help="write W&B's files into the first folder, send nothing")
    parser.add_argument("--publish", action="store_true", help="save the report at W&B too")
    parser.add_argument("--no-artifacts", action="store_true", help="leave drafters and rollouts out")
    parser.add_argument("--title", help="of the report")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for W&B; default: 20")
    given = parser.parse_args(arguments)
    if given.offline and given.publish:
        parser.error("--publish needs the network: leave out --offline")

    def work() -> str:
        target = WandbTarget.parse(given.wandb, offline=given.offline, artifacts=not given.no_artifacts,
                                   init_timeout_s=given.timeout)  # fmt: skip
        return report_and_upload(given.folders, target, title=given.title, publishing=given.publish)

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
