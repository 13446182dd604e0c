"""Records of ``task=budgeted`` -> one row per method and budget. Pure: reads no model.

    accuracy         correct answers / prompts, with a Wilson interval (Wilson, JASA 22, 1927: right near 0 and 1 too)
    accuracy_difference   minus the baseline's at the same budget, over the prompts both have; paired bootstrap interval
    share_finished   thoughts that had ended by themselves (eos or stop); share_capped: by max_thought_tokens
    tokens_per_s     num_tokens / decode_s, the seconds until the last of them: prefill is in it, as it is in the budget
    tau              thought tokens / rounds

Streak and stage times are null: a stream of tokens does not tell them. The lossless check compares the thoughts of the
largest budget with the baseline's as far as both go, and stands in the rows of that budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from specdiff2.evaluation.agreement import lossless_check
from specdiff2.evaluation.bootstrap import (
    BootstrapOptions,
    ratio_difference_interval,
    ratio_interval,
    ratio_of_ratios_interval,
)
from specdiff2.evaluation.budgeted_records import BUDGETED_FILE, BudgetRecord, read_budget_records
from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.evaluation.metrics import BASELINE, HEADER_KEYS, ratio

Row = dict[str, Any]
_DEFAULT = BootstrapOptions()


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> list[float] | None:
    """Score interval of a binomial share; None without trials."""
    if trials == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share, extra = successes / trials, z * z / trials
    middle = (share + extra / 2.0) / (1.0 + extra)
    half = z / (1.0 + extra) * math.sqrt(share * (1.0 - share) / trials + extra / (4.0 * trials))
    # the ends are exactly 0 and 1 for no and all successes; rounding must not take them beyond
    return [max(0.0, middle - half), min(1.0, middle + half)]


def summarize_budgeted(
    records: Iterable[BudgetRecord], *, baseline: str = BASELINE, options: BootstrapOptions = _DEFAULT
) -> list[Row]:
    """Rows ordered by (benchmark, temperature), then method as first met, then budget; strict-JSON ready."""
    groups: dict[tuple[str, float], dict[str, dict[float, list[BudgetRecord]]]] = {}
    for record in records:
        methods = groups.setdefault((record.benchmark, record.temperature), {})
        methods.setdefault(record.method, {}).setdefault(record.budget_s, []).append(record)
    return [
        _row(group, methods.get(baseline, {}).get(budget_s, []), budget_s == max(budgets), options)
        for methods in groups.values()
        for budgets in methods.values()
        for budget_s, group in sorted(budgets.items())
    ]


def _row(
    group: Sequence[BudgetRecord], reference: Sequence[BudgetRecord], last: bool, options: BootstrapOptions
) -> Row:
    first, n = group[0], len(group)
    correct, tokens = sum(r.correct for r in group), sum(r.num_thought_tokens for r in group)
    is_baseline = bool(reference) and reference[0].method == first.method
    checked = last and bool(reference) and not is_baseline and first.temperature == 0
    return {
        "method": first.method,
        "benchmark": first.benchmark,
        "temperature": first.temperature,
        "gamma": first.gamma,
        "num_drafts": first.num_drafts,
        "runtime": first.runtime,
        "num_prompts": n,
        "num_tokens": tokens,
        "decode_s": sum(r.thought_s for r in group),
        "budget_s": first.budget_s,
        "accuracy": {"graded": n, "correct": correct, "accuracy": correct / n},
        "accuracy_ci": wilson_interval(correct, n, options.confidence),
        "mean_score": sum(r.score for r in group) / n,
        "num_scorer_errors": sum(r.scorer_error is not None for r in group),
        "tokens_thought": tokens / n,
        "tokens_thought_ci": _listed(ratio_interval([r.num_thought_tokens for r in group], [1.0] * n, options)),
        "thought_s": sum(r.thought_s for r in group) / n,
        "answer_s": sum(r.answer_s for r in group) / n,
        "share_finished": sum(r.ended in ("eos", "stop") for r in group) / n,
        "share_capped": sum(r.ended == "length" for r in group) / n,
        "tokens_per_s": ratio(tokens, sum(r.thought_s for r in group)),
        **_against(group, reference, is_baseline, options),
        "mean_streak": None,
        "tau": ratio(tokens, sum(r.num_rounds for r in group)),
        **dict.fromkeys(("draft_ms", "verify_ms", "other_ms")),
        "accept_rate": [],
        "lossless_check": _lossless(reference, group) if checked else None,
    }


def _against(
    group: Sequence[BudgetRecord], reference: Sequence[BudgetRecord], is_baseline: bool, options: BootstrapOptions
) -> Row:
    """Accuracy and speed against the baseline at the same budget; nothing to say about the baseline itself."""
    others = {} if is_baseline else {record.prompt_id: record for record in reference}
    mine = [record for record in group if record.prompt_id in others]
    theirs = [others[record.prompt_id] for record in mine]
    graded, graded_base = ([(float(r.correct), 1.0) for r in side] for side in (mine, theirs))
    timed, timed_base = ([(float(r.num_thought_tokens), r.thought_s) for r in side] for side in (mine, theirs))
    speeds = [ratio(sum(a for a, _ in side), sum(b for _, b in side)) for side in (timed, timed_base)]
    gain = ratio(sum(r.correct for r in mine) - sum(r.correct for r in theirs), len(mine))
    return {
        "accuracy_difference": gain,
        "accuracy_difference_ci": _listed(ratio_difference_interval(graded, graded_base, options)),
        "num_paired": len(mine),
        "speedup": 1.0 if is_baseline else speeds[0] / speeds[1] if speeds[0] is not None and speeds[1] else None,
        "speedup_ci": _listed(ratio_of_ratios_interval(timed, timed_base, options)),
    }


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What ``agreement.lossless_check`` compares."""

    prompt_id: str
    tokens: list[int]


def _lossless(reference: Sequence[BudgetRecord], group: Sequence[BudgetRecord]) -> Row:
    """``lossless_check`` of the thoughts, each pair cut to the shorter one."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    expected = {record.prompt_id: record.thought or [] for record in reference}
    for record in (one for one in group if one.prompt_id in expected):
        pair = (expected[record.prompt_id], record.thought or [])
        shared = min(map(len, pair))
        for side, tokens in zip(sides, pair, strict=True):
            side.append(_Tokens(record.prompt_id, tokens[:shared]))
    return lossless_check(*sides)


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return list(interval) if interval else None


def write_budgeted_summary(folder: Path | str) -> dict[str, Any]:
    """Summarise ``folder/budgeted.jsonl`` into ``folder/summary.json`` (header from ``run.json``) and return it.

    Raises:
        ConfigError: no records in the folder.
        CorruptFileError: a file of the run cannot be read.
    """
    folder = Path(folder)
    rows = summarize_budgeted(read_budget_records(folder / BUDGETED_FILE))
    known = read_json(folder / "run.json", "a run's file; delete it") or {}
    summary = {**{key: known.get(key) for key in HEADER_KEYS}, "task": "budgeted", "rows": rows}
    write_json(folder / "summary.json", summary)
    return summary
