"""A W&B Report of finished runs and sweeps, built by code: text about how they were made, tables, line charts.

The panels show the very series that ``wandb_report`` uploads (``wandb_charts``). Run sets name no project, so that they
mean the report's own and the report serialises without the network. Needs wandb-workspaces (extra ``wandb-report``).
Source: https://github.com/wandb/wandb-workspaces, reports v2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import write_json
from specdiff2.evaluation.metrics import HEADER_KEYS
from specdiff2.evaluation.sweep_table import table_cells
from specdiff2.runtime.wandb_charts import Chart, Content, series_name
from specdiff2.types import ConfigError

REPORT_FILE = "wandb_report.json"
_TITLES = {"train": "Training", "eval": "Acceptance and speed", "sweep": "Sweep"}


def build_report(project: str, entity: str, contents: Sequence[Content], group: str, title: str | None = None) -> Any:
    """The report (``wandb_workspaces.reports.v2.Report``); nothing is sent.

    Args:
        entity: user or team; may be empty as long as the report is not published.
        group: the runs shown are those of this W&B group.

    Raises:
        ConfigError: wandb-workspaces is not installed, or there is nothing to show.
    """
    wr = _reports()
    if not contents:
        raise ConfigError("no run to report: name at least one folder of a finished run or sweep")
    blocks = [wr.TableOfContents()]
    for kind, heading in _TITLES.items():
        mine = [content for content in contents if content.kind == kind]
        if mine:
            blocks += [wr.H1(heading), *_block(wr, group, mine)]
    blocks += [wr.H1("Provenance"), *(wr.MarkdownBlock(_provenance(content)) for content in contents)]
    described = "Built from local files by python -m specdiff2.runtime.wandb_report"
    return wr.Report(project=project, entity=entity, title=(title or f"SpecDiff-2: {group}")[:128],
                     description=described, blocks=blocks, width="fluid")  # fmt: skip


def write_report_json(report: Any, folder: Path) -> Path:
    """The report as W&B stores it, in ``wandb_report.json``."""
    path = folder / REPORT_FILE
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, report._to_model().model_dump(mode="json", by_alias=True))
    return path


def _block(wr: Any, group: str, contents: Sequence[Content]) -> list[Any]:
    """Text, tables and panels of all runs of one kind; charts of the same name are laid over each other."""
    blocks: list[Any] = [wr.MarkdownBlock(_table(content)) for content in contents if content.rows]
    charts = _merged([chart for content in contents for chart in content.charts])
    panels = [wr.LinePlot(title=title, x=x, y=names, title_x=x.rsplit("/", 1)[-1], smoothing_factor=0.0,
                          layout=_place(wr, index)) for index, (title, x, names) in enumerate(charts)]  # fmt: skip
    kind = contents[0].kind
    if kind == "eval":
        panels += _evaluation_panels(wr, contents, len(panels))
    runset = wr.Runset(name=_TITLES[kind], filters=f"Group = '{group}' and JobType = '{kind}'")
    return [*blocks, wr.PanelGrid(runsets=[runset], panels=panels)] if panels else blocks


def _evaluation_panels(wr: Any, contents: Sequence[Content], start: int) -> list[Any]:
    """Speed-up bars, and the logged tables."""
    rows = [row for content in contents for row in content.rows]
    bars = list(dict.fromkeys(series_name("speedup", row) for row in rows if row.get("speedup") is not None))
    panels = [wr.BarPlot(title="speed-up", metrics=bars, layout=_place(wr, start))] if bars else []
    tables = dict.fromkeys(name for content in contents for name in content.tables())
    wide = [wr.WeavePanelSummaryTable(table_name=name, layout=wr.Layout(x=0, y=100 + 12 * index, w=24, h=12))
            for index, name in enumerate(tables)]  # fmt: skip
    return [*panels, *wide]


def _merged(charts: Sequence[Chart]) -> list[tuple[str, str, list[str]]]:
    """(title, x, series), once per title and x."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for chart in charts:
        found.setdefault((chart.title, chart.x), {}).update(dict.fromkeys(chart.series()))
    return [(title, x, list(names)) for (title, x), names in found.items()]


def _place(wr: Any, index: int) -> Any:
    """Three panels in a row of 24 columns."""
    return wr.Layout(x=8 * (index % 3), y=8 * (index // 3), w=8, h=8)


def _table(content: Content) -> str:
    head, lines, num_text = table_cells(content.rows, content.axes)
    rule = ["---" if index < num_text else "---:" for index in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, rule, *lines)
    )


def _provenance(content: Content) -> str:
    """Command, commit, machine, dtype, threads, runtime and seed, as recorded when the run began."""
    known = content.provenance
    command = f"```\n{known['command']}\n```\n" if known.get("command") else ""
    facts = [f"- {key}: {known[key]}" for key in HEADER_KEYS if key != "command" and known.get(key) is not None]
    dirty = ["- the working tree had uncommitted changes"] if known.get("dirty") else []
    return f"### {_TITLES[content.kind]}: {content.folder.name}\n\n{command}\n" + "\n".join([*facts, *dirty])


def _reports() -> Any:
    """The reports interface of wandb-workspaces.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
    except ImportError as error:
        raise ConfigError(
            f"a W&B Report needs the package wandb-workspaces ({error}): pip install 'specdiff2[wandb-report]'"
        ) from error
    return reports
