"""Charts of finished reports as SVG files that stand alone, e.g. for a README.

A page draws its charts inline and styles them once for the whole page; a file of its own takes that style along. Reads
``*.html`` pages only, draws nothing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from specdiff2.types import ConfigError, CorruptFileError

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_CHART = re.compile(r"<svg\b[^>]*\baria-label=\"([^\"]*)\".*?</svg>", re.DOTALL)
# what a chart inherits from its page; the page behind the file may be dark or light
_GROUND = "svg{background:var(--card);font-family:system-ui,sans-serif}"


def find_charts(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Label -> every chart of that label in the pages of ``folders``, as a complete SVG document.

    Raises:
        CorruptFileError: a chart is not well-formed.
    """
    charts: dict[str, list[str]] = {}
    for page in (path for folder in folders for path in sorted(folder.glob("*.html"))):
        content = page.read_text(encoding="utf-8")
        style = f"<style><![CDATA[{''.join(_STYLE.findall(content))}{_GROUND}]]></style>"
        for found in _CHART.finditer(content):
            opening, rest = found.group().split(">", 1)
            drawing = f"{opening}>{style}{rest}\n"
            label = html.unescape(found.group(1))
            try:
                ElementTree.fromstring(drawing)
            except ElementTree.ParseError as error:
                raise CorruptFileError(
                    f"{page}: chart {label!r} is not an SVG ({error}): rebuild the page with `make report`"
                ) from error
            charts.setdefault(label, []).append(drawing)
    return charts


def pick_charts(folders: Sequence[Path], labels: Sequence[str]) -> dict[str, str]:
    """File name -> SVG of the charts with these labels; where a label occurs again: ``NAME-2.svg`` and so on.

    Raises:
        ConfigError: no page has a chart of that label; names those there are.
        CorruptFileError: see ``find_charts``.
    """
    charts = find_charts(folders) if labels else {}
    picked = {}
    for label in labels:
        if label not in charts:
            raise ConfigError(f"plot {label!r}: expected one of {sorted(charts)} (of the reports in these folders)")
        name = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-").lower()
        for number, drawing in enumerate(charts[label], start=1):
            picked[f"{name}{'' if number == 1 else f'-{number}'}.svg"] = drawing
    return picked
