"""What a round costs on one machine, fitted on recorded runs: the cost side of the speed law.

    speed-up = E[tokens a round] * step / (draft + verify(nodes) + other)

* ``verify(nodes)``: the non-decreasing curve nearest to all recorded passes (isotonic regression), linear between node
  counts. Real machines show jumps (one token to two, a tile that spills a cache) that no line with a knee follows.
* ``draft``: seconds a denoising pass and seconds a drawn token, for each way of drafting.
* ``other``: seconds a round and seconds a node, for each rule.
* ``step``: one token of the verifier alone, ``verify(1)`` and the rest of its loop.
* context: seconds for each token in the cache, where the verifier's own steps show such a slope.

Machines slow down and recover between runs. So each run's seconds are divided by its ``level``, the time of its
verifier passes over what the curve says of their nodes, before anything is pooled (curve and levels are fitted in
turn); the level cancels out of a speed-up. Runs of another machine, verifier, dtype, number of threads or runtime are
refused, never pooled. Prefill is no part of it. Acceptance: ``evaluation.speed_law_streaks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from specdiff2.decoding.cost_table import isotonic
from specdiff2.evaluation.bootstrap import FloatArray
from specdiff2.evaluation.speed_law_rounds import (
    MeasuredRun,
    PoolKey,
    Rounds,
    Way,
    baseline_rounds,
    parts_of,
    require_same,
)
from specdiff2.types import ConfigError

_TURNS = 4  # of fitting curve and levels
_VISIBLE = 4.0  # standard errors that a slope over the context must be away from 0


@dataclass(frozen=True, slots=True)
class CostLaw:
    """Seconds at level 1.

    Attributes:
        nodes, verify_s: knots of the verifier's curve.
        context_s, mean_context: seconds a cached token beyond the mean; 0 where no slope is visible.
        draft: seconds a pass and a drawn token, by ``Way.draft``. other: a round and a node, by ``Way.other``.
        levels: of each run.
    """

    key: PoolKey
    nodes: tuple[float, ...]
    verify_s: tuple[float, ...]
    context_s: float
    mean_context: float
    draft: Mapping[str, tuple[float, float]]
    other: Mapping[str, tuple[float, float]]
    levels: Mapping[str, float]

    def verify(self, nodes: FloatArray, context: float) -> FloatArray:
        """One pass over each of ``nodes``; beyond the last knot along the mean slope of the whole curve."""
        at, seconds = np.asarray(self.nodes), np.asarray(self.verify_s)
        slope = (seconds[-1] - seconds[0]) / max(at[-1] - at[0], 1.0)
        beyond = np.maximum(nodes - at[-1], 0.0) * slope
        return np.interp(nodes, at, seconds) + beyond + self.context_s * (context - self.mean_context)

    def draft_seconds(self, way: Way, window: float, num_drafts: int) -> float:
        """One round's drafting over ``window`` positions; 0 positions are not drafted.

        Raises:
            ConfigError: no run of the fit drafted this way.
        """
        return float(_known(self.draft, way.draft, "draft") @ draft_features(way, np.array([window]), num_drafts)[0])

    def other_seconds(self, way: Way, nodes: FloatArray) -> FloatArray:
        """The rest of a round with each of ``nodes``.

        Raises:
            ConfigError: no run of the fit decided and committed this way.
        """
        return _known(self.other, way.other, "the rest of a round") @ np.stack([np.ones_like(nodes), nodes])

    def step_seconds(self, way: Way, context: float) -> float:
        """One token of the verifier alone; ``way`` is the baseline's."""
        one = np.ones(1)
        return float((self.verify(one, context) + self.other_seconds(way, one))[0])

    def to_json(self) -> dict[str, object]:
        """Plain values, milliseconds."""
        return {
            "key": asdict(self.key),
            "nodes": list(self.nodes),
            "verify_ms": [1e3 * s for s in self.verify_s],
            "context_ms_per_token": 1e3 * self.context_s,
            "draft_ms": {name: {"pass": 1e3 * a, "drawn token": 1e3 * b} for name, (a, b) in self.draft.items()},
            "other_ms": {name: {"round": 1e3 * a, "node": 1e3 * b} for name, (a, b) in self.other.items()},
            "levels": dict(self.levels),
        }


def draft_features(way: Way, window: FloatArray, num_drafts: int) -> FloatArray:
    """[round, 2]: passes and drawn tokens; more passes than positions have nothing left to say."""
    return np.stack([np.minimum(way.passes, window), num_drafts * window], axis=1)


def fit_costs(runs: Sequence[MeasuredRun]) -> CostLaw:
    """The law of all ``runs``.

    Raises:
        MismatchError: they were not measured on the same thing.
        ConfigError: no runs, or one without the verifier alone.
    """
    if not runs:
        raise ConfigError("no runs to fit: expected at least one evaluation with baseline=true")
    for run in runs[1:]:
        require_same(runs[0], run)
    steps = [baseline_rounds(run) for run in runs]
    slope = _context_slope(steps)
    centre = float(np.mean(np.concatenate([rounds.context for rounds in steps])))
    parts = [part for index, run in enumerate(runs) for part in parts_of(index, run)]
    run_of = np.concatenate([np.full(part.rounds.nodes.size, part.run) for part in parts])
    nodes = np.concatenate([part.rounds.nodes for part in parts])
    seconds = np.concatenate([part.rounds.verify_s - slope * (part.rounds.context - centre) for part in parts])
    levels = np.array([np.mean(rounds.verify_s - slope * (rounds.context - centre)) for rounds in steps])
    for _ in range(_TURNS):
        levels = levels / np.mean(levels)
        curve = _curve(nodes, seconds / levels[run_of])
        expected = np.bincount(run_of, np.interp(nodes, *curve))
        levels = levels if len(runs) == 1 else np.bincount(run_of, seconds) / expected
    draft, other = _Group(), _Group()
    for part in parts:
        level, rounds = levels[part.run], part.rounds
        draft.add(part.way.draft, draft_features(part.way, rounds.window, part.num_drafts), rounds.draft_s / level)
        other.add(part.way.other, np.stack([np.ones_like(rounds.nodes), rounds.nodes], 1), rounds.other_s / level)
    names = [run.name for run in runs]
    return CostLaw(
        runs[0].key, *curve, slope, centre, draft.fit(), other.fit(), dict(zip(names, map(float, levels), strict=True))
    )


def nonnegative_fit(features: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    """Coefficients >= 0 with the smallest squared error: the best of all subsets of columns, which are few."""
    columns = range(features.shape[1])
    best, lowest = np.zeros(len(columns)), float(np.sum(seconds**2))
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(columns, size)):
            found = np.linalg.lstsq(features[:, chosen], seconds, rcond=None)[0]
            error = float(np.sum((features[:, chosen] @ found - seconds) ** 2))
            if np.all(found >= 0.0) and error < lowest * (1.0 - 1e-9):
                best, lowest = np.zeros(len(columns)), error
                best[chosen] = found
    return tuple(float(value) for value in best)


class _Group:
    """Rows of several fits, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[FloatArray, FloatArray]]] = {}

    def add(self, name: str, features: FloatArray, seconds: FloatArray) -> None:
        self._rows.setdefault(name, []).append((features, seconds))

    def fit(self) -> dict[str, tuple[float, float]]:
        stacked = {
            name: tuple(np.concatenate(part) for part in zip(*rows, strict=True)) for name, rows in self._rows.items()
        }
        return {name: nonnegative_fit(*rows) for name, rows in stacked.items()}  # type: ignore[misc]


def _context_slope(steps: Sequence[Rounds]) -> float:
    """Seconds a cached token within runs, by least squares; 0 where it is not clearly above 0.

    A machine drifts over seconds, so errors within one output are not independent: the standard error is that of
    whole outputs (clusters, Liang & Zeger 1986).
    """
    context = np.concatenate([r.context - np.mean(r.context) for r in steps])
    seconds = np.concatenate([r.verify_s - np.mean(r.verify_s) for r in steps])
    spread = float(np.sum(context**2))
    if spread == 0.0:
        return 0.0
    slope = float(np.sum(context * seconds)) / spread
    firsts = np.cumsum([0, *(r.record[-1] + 1 for r in steps)])
    outputs = np.concatenate([r.record + first for r, first in zip(steps, firsts, strict=False)]).astype(int)
    scores = np.bincount(outputs, context * (seconds - slope * context))
    error = float(np.sqrt(np.sum(scores**2))) / spread
    return slope if slope > _VISIBLE * error else 0.0


def _curve(nodes: FloatArray, seconds: FloatArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The non-decreasing curve of means; every round weighs the same.

    Rounds of one node count are sorted downwards, so that ``isotonic`` gives them one value: their mean, or that of a
    longer stretch.
    """
    order = np.lexsort((-seconds, nodes))
    levelled = np.asarray(isotonic(list(seconds[order])))
    counts, first = np.unique(nodes[order], return_index=True)
    return tuple(map(float, counts)), tuple(map(float, levelled[first]))


def _known(found: Mapping[str, tuple[float, float]], name: str, what: str) -> FloatArray:
    if name not in found:
        raise ConfigError(f"no other run measured {what} of: {name}")
    return np.asarray(found[name])
