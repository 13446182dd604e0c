"""Paired comparisons of methods or settings: contrasts of pooled quantities, with bootstrap intervals over prompts.

A contrast is ``sum_i w_i m(arm i)`` or, for speeds, ``prod_i m(arm i) ** w_i``: weights (1, -1) give a difference or a
ratio, (1, -1, -1, 1) an interaction. Every resample draws whole prompts and every arm's numbers of a prompt move
together, so what makes a prompt easy cancels. Prompts of several benchmarks are resampled as one set. Verdicts on
claims are made in ``claims``; nothing here reads a model.

Quantities (pooled over rounds, then divided, as in ``metrics``):

    mean_streak, tau   accepted and committed tokens per round
    accept_rate@j, survival@j   as in ``curves``
    expected_accepted  sum of survival@j over j: the mean streak as it would be without rounds cut by the end of an
                       output; positions that no round has reached add nothing
    tokens_per_s       tokens / decode seconds
    speedup            the same over the baseline of the arm's own run

Source of the interval: Efron & Tibshirani (1993), see ``bootstrap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from specdiff2.evaluation.arms import Arm, Key, check_pairs
from specdiff2.evaluation.bootstrap import BootstrapOptions, FloatArray, Interval, bootstrap_interval
from specdiff2.evaluation.curves import position_curves
from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError

_DEFAULT = BootstrapOptions()
_BY_POSITION = ("accept_rate", "survival")


@dataclass(frozen=True, slots=True)
class Metric:
    """A function of per-prompt column sums. ``is_speed``: compared by ratio, and only on one machine.

    Attributes:
        columns: (arm, prompts in order) -> [prompt, column].
        value: column sums [resample, column] -> [resample]; NaN where there is no evidence.
    """

    name: str
    columns: Callable[[Arm, Sequence[Key]], FloatArray]
    value: Callable[[FloatArray], FloatArray]
    is_speed: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One contrast. ``neutral`` is its value where nothing differs: 1 for ratios, 0 for differences.

    ``value`` and ``ci`` are None where an arm has no evidence (a decoder that tells no rounds, a position that nobody
    reached, fewer than two prompts).
    """

    metric: str
    labels: tuple[str, ...]
    weights: tuple[float, ...]
    values: tuple[float | None, ...]
    value: float | None
    ci: Interval | None
    confidence: float
    neutral: float
    num_paired: int

    def to_json(self) -> dict[str, Any]:
        """Strict JSON."""
        return asdict(self)


def contrast(
    arms: Sequence[Arm], weights: Sequence[float], metric: str, options: BootstrapOptions = _DEFAULT
) -> Comparison:
    """The contrast of ``arms`` with its interval.

    Raises:
        MismatchError: the arms must not be paired.
        ConfigError: there is no such quantity, or a run has no baseline to form speed-ups with.
    """
    found = parse_metric(metric)
    check_pairs(arms, timed=found.is_speed)
    keys, factors = list(arms[0].records), np.asarray(weights, np.float64)
    blocks = [found.columns(arm, keys) for arm in arms]
    edges = np.cumsum([block.shape[1] for block in blocks])[:-1]

    def each(sums: FloatArray) -> FloatArray:  # [resample, column] -> [arm, resample]
        return np.stack([found.value(part) for part in np.split(sums, edges, axis=1)])

    def combine(values: FloatArray) -> FloatArray:
        return np.exp(factors @ np.log(values)) if found.is_speed else factors @ values

    columns = np.concatenate(blocks, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = each(columns.sum(axis=0, keepdims=True))
        value = combine(values)
    return Comparison(
        metric=metric,
        labels=tuple(arm.label for arm in arms),
        weights=tuple(float(weight) for weight in weights),
        values=tuple(_known(one) for one in values[:, 0]),
        value=_known(value[0]),
        ci=bootstrap_interval(columns, lambda sums: combine(each(sums)), options) if _known(value[0]) is not None
        else None,
        confidence=options.confidence,
        neutral=1.0 if found.is_speed else 0.0,
        num_paired=len(keys),
    )  # fmt: skip


def lead(first: Arm, second: Arm, metric: str, options: BootstrapOptions = _DEFAULT) -> Comparison:
    """``first`` minus ``second``, or ``first`` over ``second`` for speeds. Raises as ``contrast``."""
    return contrast([first, second], [1, -1], metric, options)


def interaction(
    both: Arm, first: Arm, second: Arm, neither: Arm, metric: str, options: BootstrapOptions = _DEFAULT
) -> Comparison:
    """``(both - first) - (second - neither)``: what the two changes bring together beyond the sum of what each brings
    alone (beyond the product, for speeds). Raises as ``contrast``."""
    return contrast([both, first, second, neither], [1, -1, -1, 1], metric, options)


@dataclass(frozen=True, slots=True)
class Trend:
    """The best of some settings and its lead over each of the others."""

    best: str
    values: dict[str, float | None]
    leads: dict[str, Comparison]


def trend(
    arms: dict[str, Arm],
    metric: str,
    options: BootstrapOptions = _DEFAULT,
    *,
    candidates: Sequence[str] | None = None,
) -> Trend:
    """The best of ``candidates`` (default: all) and its lead over every setting that is no rival candidate.

    The best is picked by the same prompts that measure its lead, which flatters it. So the intervals are those of
    Bonferroni: with n candidates their error is divided by n.

    Raises:
        ConfigError: no candidate has a value. Else as ``contrast``.
    """
    picked = list(arms) if candidates is None else list(candidates)
    values = {name: contrast([arm], [1], metric, replace(options, num_resamples=1)).value for name, arm in arms.items()}
    known = [name for name in picked if values[name] is not None]
    if not known:
        raise ConfigError(f"{metric}: none of {picked} has a value: expected records with evidence for it")
    best = max(known, key=lambda name: values[name] or -math.inf)
    sharper = replace(options, confidence=1.0 - (1.0 - options.confidence) / len(picked))
    others = [name for name in arms if name != best and (candidates is None or name not in picked)]
    return Trend(best, values, {name: lead(arms[best], arms[name], metric, sharper) for name in others})


# ---------------------------------------------------------------- quantities
def parse_metric(name: str) -> Metric:
    """The quantity called ``name``.

    Raises:
        ConfigError: there is none.
    """
    base, _, position = name.partition("@")
    if base in _BY_POSITION and position.isdigit() and int(position) >= 1:
        length = int(position)
        value = _accept_rate if base == "accept_rate" else lambda sums: _survival(sums)[:, -1]
        return Metric(name, partial(_curve_columns, length=length), value)
    if name in _METRICS:
        return _METRICS[name]
    expected = [*_METRICS, *(f"{curve}@j" for curve in _BY_POSITION)]
    raise ConfigError(f"metric {name!r}: expected one of {', '.join(expected)} with j >= 1")


def _round_columns(arm: Arm, keys: Sequence[Key], count: str) -> FloatArray:
    rows = [(sum(getattr(one, count) for one in arm.records[key].rounds), len(arm.records[key].rounds)) for key in keys]
    return np.asarray(rows, np.float64)


def _curve_columns(arm: Arm, keys: Sequence[Key], length: int | None = None) -> FloatArray:
    """``num_reached`` of every position, then ``num_accepted``."""
    drafted = [one.num_drafted for record in arm.records.values() for one in record.rounds]
    size = max(drafted, default=0) if length is None else length
    curves = [position_curves(arm.records[key].rounds, size) for key in keys]
    return np.asarray([curve.num_reached + curve.num_accepted for curve in curves], np.float64)


def _speed_columns(arm: Arm, keys: Sequence[Key]) -> FloatArray:
    return np.asarray([_tokens_and_seconds(arm.records[key]) for key in keys], np.float64)


def _speedup_columns(arm: Arm, keys: Sequence[Key]) -> FloatArray:
    missing = [key for key in keys if key not in arm.baseline]
    if missing:
        raise ConfigError(f"{arm.label}: no baseline record of prompt {missing[0]}: expected a run with baseline=true "
                          "to form speed-ups; compare tokens_per_s instead, or measure again")  # fmt: skip
    return np.asarray([(*_tokens_and_seconds(arm.records[key]), *_tokens_and_seconds(arm.baseline[key]))
                       for key in keys], np.float64)  # fmt: skip


def _tokens_and_seconds(record: Record) -> tuple[float, float]:
    return float(len(record.tokens)), record.decode_s


def _ratio(sums: FloatArray) -> FloatArray:
    return sums[:, 0] / sums[:, 1]


def _speedup(sums: FloatArray) -> FloatArray:
    return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])


def _accept_rate(sums: FloatArray) -> FloatArray:
    return sums[:, -1] / sums[:, sums.shape[1] // 2 - 1]


def _survival(sums: FloatArray) -> FloatArray:
    """Product-limit curve: reached and accepted [resample, 2 * position] -> [resample, position]."""
    reached, accepted = np.split(sums, 2, axis=1)
    alive, curve = np.ones(len(sums)), []
    for at, passed in zip(reached.T, accepted.T, strict=True):
        # nothing survives a position that nobody passed, however many positions follow
        alive = np.where(alive == 0.0, 0.0, alive * passed / at)
        curve.append(alive)
    return np.stack(curve, axis=1) if curve else np.full((len(sums), 1), np.nan)


def _expected_accepted(sums: FloatArray) -> FloatArray:
    curve = _survival(sums)
    return np.where(np.isnan(curve[:, 0]), np.nan, np.nansum(curve, axis=1))


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


_METRICS = {
    metric.name: metric
    for metric in (
        Metric("mean_streak", partial(_round_columns, count="num_accepted"), _ratio),
        Metric("tau", partial(_round_columns, count="num_committed"), _ratio),
        Metric("expected_accepted", _curve_columns, _expected_accepted),
        Metric("tokens_per_s", _speed_columns, _ratio, is_speed=True),
        Metric("speedup", _speedup_columns, _speedup, is_speed=True),
    )
}
