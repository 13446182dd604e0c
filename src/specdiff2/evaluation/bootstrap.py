"""Bootstrap confidence intervals over prompts.

Rounds within one prompt are not independent, and both methods decode the same prompts, so whole prompts
are resampled and every method's numbers for a prompt move together (paired). Each quantity reported is a
function of per-prompt column sums (tokens, seconds, accepted, rounds), which is all this module knows.
Source: Efron & Tibshirani, *An Introduction to the Bootstrap* (1993), percentile interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Interval = tuple[float, float]
_CHUNK = 250  # resamples at a time: bounds memory to _CHUNK x prompts


@dataclass(frozen=True, slots=True)
class BootstrapOptions:
    """How intervals are computed; the same options give the same interval on every machine."""

    num_resamples: int = 2000
    seed: int = 0
    confidence: float = 0.95


_DEFAULT = BootstrapOptions()


def resampled_sums(columns: FloatArray, num_resamples: int, seed: int) -> FloatArray:
    """Column sums of ``num_resamples`` resamples with replacement: [prompt, column] -> [resample, column]."""
    num_prompts = columns.shape[0]
    generator = np.random.default_rng(seed)
    uniform = np.full(num_prompts, 1.0 / num_prompts)
    chunks = []
    for start in range(0, num_resamples, _CHUNK):
        size = min(_CHUNK, num_resamples - start)
        # counts of each prompt in each resample: the same law as drawing indices, and a matrix product
        chunks.append(generator.multinomial(num_prompts, uniform, size=size) @ columns)
    return np.concatenate(chunks)


def bootstrap_interval(
    columns: Sequence[Sequence[float]] | FloatArray,
    statistic: Callable[[FloatArray], FloatArray],
    options: BootstrapOptions = _DEFAULT,
) -> Interval | None:
    """Percentile interval of ``statistic``, a function of column sums.

    Args:
        columns: one row per prompt.
        statistic: [resample, column] sums -> [resample] values; non-finite values (an empty denominator
            in a resample) are left out.

    Returns:
        (low, high), or None with fewer than two prompts or no finite resample.
    """
    matrix = np.asarray(columns, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(resampled_sums(matrix, options.num_resamples, options.seed))
    values = values[np.isfinite(values)]
    if values.size == 0:
        return None
    tail = (1.0 - options.confidence) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], options: BootstrapOptions = _DEFAULT
) -> Interval | None:
    """Interval of ``sum(numerators) / sum(denominators)`` over prompts."""
    return bootstrap_interval(
        np.column_stack([numerators, denominators]) if len(numerators) else np.zeros((0, 2)),
        lambda sums: sums[:, 0] / sums[:, 1],
        options,
    )


def ratio_of_ratios_interval(
    first: Sequence[tuple[float, float]],
    second: Sequence[tuple[float, float]],
    options: BootstrapOptions = _DEFAULT,
) -> Interval | None:
    """Interval of ``(sum a / sum b) / (sum c / sum d)``; row i of both belongs to the same prompt."""
    return bootstrap_interval(
        _paired(first, second),
        lambda sums: (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]),
        options,
    )


def ratio_difference_interval(
    first: Sequence[tuple[float, float]],
    second: Sequence[tuple[float, float]],
    options: BootstrapOptions = _DEFAULT,
) -> Interval | None:
    """Interval of ``sum a / sum b - sum c / sum d``; row i of both belongs to the same prompt."""
    return bootstrap_interval(
        _paired(first, second),
        lambda sums: sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3],
        options,
    )


def _paired(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> FloatArray:
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} prompts cannot be paired")
    return np.concatenate(
        [np.asarray(first, np.float64).reshape(-1, 2), np.asarray(second, np.float64).reshape(-1, 2)], axis=1
    )
