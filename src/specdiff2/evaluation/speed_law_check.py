"""Does the speed law predict runs it was not fitted on? Predicted against measured speed-ups, in three honest splits.

``other_runs``       costs from all other runs of the pool (where none of them has the way, from the other benchmarks
                     of the same run: ``costs_from`` says so); acceptance from the predicted records themselves.
``other_prompts``    costs and acceptance from every second prompt, the speed-up of the prompts between them.
``shorter_windows``  acceptance from the longest window of the same drafter and rule, cut off; costs from everything
                     but the predicted method: nothing of it was decoded.

Lengths of outputs are those of the verifier alone. Every row keeps the stages, so that an error can be traced: its
``reasons`` say which of them is off, and what else is known. Records in, plain values out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdiff2.evaluation.bootstrap import Interval, ratio_interval, ratio_of_ratios_interval
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.speed_law import CostLaw, fit_costs
from specdiff2.evaluation.speed_law_cases import Case, Stages, cases_of, full_window_nodes, measure, predict
from specdiff2.evaluation.speed_law_rounds import MeasuredRun, PoolKey
from specdiff2.evaluation.speed_law_streaks import StreakLaw
from specdiff2.types import ConfigError

TOLERANCE = 0.10
SPLITS = ("other_runs", "other_prompts", "shorter_windows")
_WORTH_TELLING = 0.02  # a stage that shifts the speed-up by less is no reason
_OTHER_LEVEL = 0.05
SAMPLING = "few prompts: the 95% intervals of prediction and measurement overlap"
Row = dict[str, Any]


def check_runs(runs: Sequence[MeasuredRun], tolerance: float = TOLERANCE) -> Row:
    """Every pool of comparable runs: its law, the predictions of all splits, and what could not be predicted.

    Raises:
        ConfigError: nothing to check.
    """
    if not runs:
        raise ConfigError("speed_law.runs is empty: expected run folders of evaluations")
    pools: dict[PoolKey, list[MeasuredRun]] = {}
    skipped = [row for run in runs for row in _roundless(run)]
    for run in runs:
        if any(record.method == BASELINE for record in run.records):
            pools.setdefault(run.key, []).append(run)
        else:
            skipped.append({"run": run.name, "reason": "no verifier alone in it: no speed-up was measured"})
    sections = []
    for pool in pools.values():
        rows: list[Row] = []
        for split, predictions in zip(SPLITS, (_other_runs, _other_prompts, _shorter_windows), strict=True):
            for row in predictions(pool, tolerance):
                (skipped if "reason" in row else rows).append({"split": split, **row})
        counts = {name: _count([row for row in rows if row["split"] == name]) for name in SPLITS}
        sections.append(
            {"runs": [run.name for run in pool], "law": fit_costs(pool).to_json(), "rows": rows, "counts": counts}
        )
    return {"tolerance": tolerance, "pools": sections, "not_predicted": skipped}


def _roundless(run: MeasuredRun) -> Iterator[Row]:
    for method in dict.fromkeys(record.method for record in run.records):
        if not any(record.rounds for record in run.records if record.method == method):
            yield {"run": run.name, "method": method, "reason": "it does not tell its rounds"}


def _other_runs(pool: Sequence[MeasuredRun], tolerance: float) -> Iterator[Row]:
    for run in pool:
        others = [other for other in pool if other is not run]
        law = fit_costs(others) if others else None
        for case in cases_of(run):
            row: Row = {**case.name(), "reason": "the only run on this machine, verifier, dtype, threads and runtime"}
            if law is not None:
                row = {**_row(case, case, law, tolerance), "costs_from": "other runs"}
            rest = _without_benchmark(pool, case)
            if "reason" in row and len({record.benchmark for record in run.records}) > 1:
                row = {**_row(case, case, fit_costs(rest), tolerance), "costs_from": "other benchmarks of the run"}
            yield row


def _other_prompts(pool: Sequence[MeasuredRun], tolerance: float) -> Iterator[Row]:
    known = [_half(run, 0) for run in pool]
    law = fit_costs(known)
    for run, first in zip(pool, known, strict=True):
        learned = {tuple(case.name().values()): case for case in cases_of(first)}
        for case in cases_of(_half(run, 1)):
            source = learned.get(tuple(case.name().values()))
            if source is None:
                yield {**case.name(), "reason": "only one prompt: no half to learn from"}
            else:
                yield _row(case, source, law, tolerance)


def _shorter_windows(pool: Sequence[MeasuredRun], tolerance: float) -> Iterator[Row]:
    """Chains only: how a tree spreads over a shorter window is another law."""
    families: dict[tuple[Any, ...], list[Case]] = {}
    for run in pool:
        for case in cases_of(run):
            first, nodes = case.records[0], full_window_nodes(case)
            if first.num_drafts == 1 and np.all(nodes == 1 + first.gamma):
                families.setdefault((case.way.acceptance, first.benchmark, first.temperature), []).append(case)
    for family in families.values():
        longest = max(family, key=lambda case: case.records[0].gamma)
        for case in family:
            gamma = case.records[0].gamma
            if gamma < longest.records[0].gamma:
                law = fit_costs([_without(run, case) for run in pool])
                yield _row(case, longest, law, tolerance, gamma)


def _row(case: Case, source: Case, law: CostLaw, tolerance: float, gamma: int | None = None) -> Row:
    """Prediction, measurement and reasons; only names and a ``reason`` where the law does not know the way.

    Args:
        source: what acceptance is learned from. gamma: the window of ``case`` where that of ``source`` is longer.
    """
    nodes = full_window_nodes(source) if gamma is None else np.array([1.0 + gamma])
    try:
        streaks = StreakLaw.of(source.records, source.run.max_new_tokens)
        streaks = streaks if gamma is None else streaks.shorter(gamma)
        told = predict(law, case, streaks, nodes)
    except ConfigError as error:
        return {**case.name(), "reason": str(error)}
    found = measure(case)
    mine, theirs = ([(float(len(r.tokens)), r.decode_s) for r in side] for side in (case.records, case.baseline))
    interval = ratio_of_ratios_interval(mine, theirs)
    other_prompts = source is not case and gamma is None
    predicted_interval = _sampled(told.speedup, source) if other_prompts else None
    off, level = told.speedup / found.speedup - 1.0, found.step_s / told.step_s
    row = {
        **case.name(),
        "num_prompts": len(case.records),
        "mean_streak_of_full_windows": streaks.mean,
        "predicted": told.speedup,
        "predicted_ci": predicted_interval and list(predicted_interval),
        "measured": found.speedup,
        "measured_ci": interval and list(interval),
        "error": off,
        "within": bool(abs(off) <= tolerance),
        "level": level,
        **{f"predicted_{name}": value for name, value in _shown(told).items()},
        **{f"measured_{name}": value for name, value in _shown(found).items()},
        "reasons": [],
    }
    if not row["within"]:
        row["reasons"] = _reasons(told, found, level)
        if predicted_interval and interval and _overlap(predicted_interval, interval):
            row["reasons"].append(SAMPLING)
        if float(np.max(nodes)) > law.nodes[-1]:
            row["reasons"].append(f"trees beyond the {law.nodes[-1]:g} nodes of the fit")
    return row


def _sampled(speedup: float, source: Case) -> Interval | None:
    """The prediction's own interval: tau differs between samples of prompts, and a speed-up is proportional to it."""
    tokens = [float(len(record.tokens)) for record in source.records]
    rounds = [float(len(record.rounds)) for record in source.records]
    found = ratio_interval(tokens, rounds)
    scale = speedup * sum(rounds) / sum(tokens)
    return found and (found[0] * scale, found[1] * scale)


def _overlap(first: Interval, second: Interval) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def _reasons(told: Stages, found: Stages, level: float) -> list[str]:
    """What moves the prediction away, largest first; milliseconds at the level of the predicted run."""
    shifts = {"tau": (math.log(told.tau / found.tau), told.tau, found.tau, "tokens")}
    for name in ("draft_s", "verify_s", "other_s"):
        mine, theirs = getattr(told, name) * level, getattr(found, name)
        shifts[name.removesuffix("_s")] = ((theirs - mine) / found.round_s, 1e3 * mine, 1e3 * theirs, "ms")
    ordered = sorted(shifts.items(), key=lambda item: -abs(item[1][0]))
    reasons = [
        f"{name}: {mine:.2f} {unit} predicted, {theirs:.2f} measured ({100 * math.expm1(shift):+.0f}% of the speed-up)"
        for name, (shift, mine, theirs, unit) in ordered
        if abs(shift) > _WORTH_TELLING
    ]
    if abs(level - 1.0) > _OTHER_LEVEL:
        reasons.append(f"the machine was loaded otherwise: the verifier alone took {level:.2f} times the fit's seconds")
    return reasons


def _shown(stages: Stages) -> dict[str, float]:
    seconds = {f"{name}_ms": 1e3 * getattr(stages, f"{name}_s") for name in ("draft", "verify", "other", "step")}
    return {"tau": stages.tau, **seconds}


def _half(run: MeasuredRun, parity: int) -> MeasuredRun:
    """Every second prompt, in the order of the run."""
    order = {key: index for index, key in enumerate(dict.fromkeys((r.benchmark, r.prompt_id) for r in run.records))}
    kept = [record for record in run.records if order[record.benchmark, record.prompt_id] % 2 == parity]
    return replace(run, records=kept)


def _without_benchmark(pool: Sequence[MeasuredRun], case: Case) -> list[MeasuredRun]:
    benchmark = case.records[0].benchmark
    return [
        replace(run, records=[r for r in run.records if run is not case.run or r.benchmark != benchmark])
        for run in pool
    ]


def _without(run: MeasuredRun, case: Case) -> MeasuredRun:
    if run is not case.run:
        return run
    return replace(run, records=[record for record in run.records if record.method != case.method])


def _count(rows: Sequence[Row]) -> Row:
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "num": len(rows),
        "within": sum(row["within"] for row in rows),
        "explained_by_sampling": sum(SAMPLING in row["reasons"] for row in rows),
        "median_error": errors[len(errors) // 2] if errors else None,
        "largest_error": errors[-1] if errors else None,
    }
