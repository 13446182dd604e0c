"""The printed result: aligned plain text for the terminal, Markdown for a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdiff2.evaluation.agreement import NEAR_TIE_SPACINGS
from specdiff2.evaluation.batched_rows import by_method, split_name

DASH = "-"
TIMES = "\N{MULTIPLICATION SIGN}"
_FOOTER = "mean streak: draft tokens accepted per round, bonus token excluded; tau: tokens per verifier pass, included"
_BATCH_FOOTER = "speed-up: over the verifier alone at the same batch size; tokens/s: of all prompts of a batch together"
_LABELS = {
    "autoregressive": "Autoregressive",
    "specdiff": "SpecDiff",
    "specdiff_distilled": "Distilled",
    "specdiff2": "SpecDiff-2",
    "tree_match": "Tree match",
    "leviathan": "Leviathan",
    "block": "Block verification",
    "specinfer": "SpecInfer",
    "hf_generate": "HF generate",
    "hf_prompt_lookup": "HF prompt lookup",
    "hf_assisted": "HF assisted",
    "traversal": "Traversal",
    "drafters": "Several drafters",
    "tree": "Tree",
    "tree_lookup": "Tree with copies",
    "sps": "SpS",
    "prompt_lookup": "Prompt lookup",
    "eagle": "EAGLE",
    "eagle2": "EAGLE-2",
}
MEASURED = ("tokens/s", "speed-up", "95% CI", "mean streak", "tau", "draft ms", "verify ms", "other ms")
COLUMNS = ("method", "K", *MEASURED)


def method_label(method: str) -> str:
    """How a method is called in tables and plots; unknown names stay as they are."""
    name, batch_size = split_name(method)
    return _LABELS.get(name, name) + ("" if batch_size == 1 else f", batch {batch_size}")


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Fixed digits, or a dash for an unknown value."""
    return DASH if value is None else f"{value:.{digits}f}{unit}"


def interval(values: Sequence[float] | None, digits: int = 2) -> str:
    """``[low, high]``, or a dash."""
    return DASH if values is None else f"[{values[0]:.{digits}f}, {values[1]:.{digits}f}]"


def row_cells(row: dict[str, Any]) -> list[str]:
    """One row of a summary as text, in the order of ``COLUMNS``."""
    return [
        method_label(row["method"]),
        str(row["num_drafts"]) if row.get("num_drafts") else DASH,
        *measured_cells(row),
    ]


def measured_cells(row: dict[str, Any]) -> list[str]:
    """What was measured of one row as text, in the order of ``MEASURED``."""
    return [
        number(row["tokens_per_s"], 1),
        number(row["speedup"], 2, "x"),
        interval(row["speedup_ci"]),
        number(row["mean_streak"], 2),
        number(row["tau"], 2),
        number(row["draft_ms"], 1),
        number(row["verify_ms"], 1),
        number(row["other_ms"], 1),
    ]


def group_title(row: dict[str, Any]) -> str:
    """What one table is about: benchmark, temperature and prompts."""
    return f"{row['benchmark']}, temperature {row['temperature']:g}, {row['num_prompts']} prompts"


def grouped(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of one (benchmark, temperature) together, order kept."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["benchmark"], row["temperature"]), []).append(row)
    return list(groups.values())


def lossless_note(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence on the token comparison at temperature 0; empty at T>0.

    Where the verifier was asked about the divergences (``metrics.write_summary``), how near they are to ties.
    """
    checks = [row["lossless_check"] for row in rows if row.get("lossless_check")]
    if not checks:
        return ""
    checked, identical = sum(c["checked"] for c in checks), sum(c["identical"] for c in checks)
    note = f"lossless check at T=0: {identical} of {checked} outputs equal the autoregressive tokens exactly"
    explained = [c for c in checks if c.get("num_unexplained") is not None]
    if identical == checked or len(explained) < len([c for c in checks if c["identical"] < c["checked"]]):
        return note
    unexplained = sum(c["num_unexplained"] for c in explained)
    if unexplained:
        return (
            f"{note}; {unexplained} of the {checked - identical} others NOT at a near-tie (more than "
            f"{NEAR_TIE_SPACINGS:g} spacings of {explained[0]['dtype']} apart, or ended early): see the report"
        )
    widest = max(c["max_margin_ulp"] for c in explained if c["max_margin_ulp"] is not None)
    return f"{note}; the others are near-ties, all within {widest:.1f} spacings of {explained[0]['dtype']}"


def wins_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each method with several drafters, one sentence on which of them the accepted tokens came from."""
    notes = []
    for row in rows:
        won = [
            f"{name} {number(None if share is None else 100 * share, 0, '%')} "
            f"({row['drafter_accepted_tokens'][name]} tokens)"
            for name, share in row.get("drafter_win_share", {}).items()
        ]
        if won:
            notes.append(
                f"{method_label(row['method'])}, rounds won by drafter (a tie counts for each): {', '.join(won)}"
            )
    return notes


def split_notes(summary: Mapping[str, Any]) -> list[str]:
    """For an evaluation by several processes, in one sentence, on what; and where their machines differ."""
    split = summary.get("split")
    if not split:
        return []
    ranks, differing = split["ranks"], split["differing"]
    hosts = len({rank["host"] for rank in ranks})
    note = f"decoded by {len(ranks)} processes on {hosts} machine{'s' if hosts != 1 else ''}"
    if not differing:
        return [f"{note}, all of one kind"]
    told = "; ".join(f"{key}: {', '.join(map(str, values))}" for key, values in differing.items())
    return [
        f"{note} that DIFFER in {told}. Every prompt's methods were measured on one of them, so speed-ups are ratios "
        f"within processes ({split['num_mixed_prompts']} prompts excepted); tokens/s are a mixture"
    ]


def plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned text, one table per (benchmark, temperature); the last line never ends with a line break."""
    blocks = []
    for group in grouped(rows):
        cells = [list(COLUMNS)] + [row_cells(row) for row in group]
        widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
        lines = ["  ".join(_align(i, cell, widths[i]) for i, cell in enumerate(line)).rstrip() for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        note = lossless_note(group)
        blocks.append("\n".join([group_title(group[0]), *lines, *wins_notes(group), *([note] if note else [])]))
    footer = f"{_FOOTER}\n{_BATCH_FOOTER}" if by_method(rows) else _FOOTER
    return "\n\n".join([*blocks, footer]) if blocks else "no measured prompts"


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """The same tables in Markdown."""
    blocks = []
    for group in grouped(rows):
        rule = "|" + "|".join([" --- "] + [" ---: "] * (len(COLUMNS) - 1)) + "|"
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
                 for cells in [list(COLUMNS)] + [row_cells(row) for row in group]]  # fmt: skip
        notes = [*wins_notes(group), *filter(None, [lossless_note(group)])]
        ending = [line for note in notes for line in ("", note)]
        blocks.append("\n".join([f"**{group_title(group[0])}**", "", lines[0], rule, *lines[1:], *ending]))
    return "\n\n".join(blocks)


def _align(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
