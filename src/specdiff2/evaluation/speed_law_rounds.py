"""What the speed law reads of a run: its rounds as columns, and what they were measured on.

Seconds may be pooled only where the ``PoolKey`` of two runs agrees, and shared between methods only where the texts of
their ``Way`` are equal; who builds a run (``runtime.speed_law_runs``) decides what goes into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specdiff2.evaluation.bootstrap import FloatArray
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError, MismatchError


@dataclass(frozen=True, slots=True)
class PoolKey:
    """What must agree before seconds are pooled."""

    machine: str
    device: str
    verifier: str
    dtype: str
    threads: int
    runtime: str


@dataclass(frozen=True, slots=True)
class Way:
    """What a method's costs and acceptance depend on, as texts that are equal where they may be shared.

    Attributes:
        draft: drafter (its shape, not its weights) and how it is asked: chains or a law to grow a tree from.
        other: rule, selection, growth, and whether tokens are drawn: everything outside both models.
        acceptance: all of it and the weights, but the length of the window.
        passes: denoising passes of a draft.
    """

    draft: str
    other: str
    acceptance: str
    passes: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Records of one evaluation (warm-up left out), and what they were measured on.

    Attributes:
        ways: of every method that tells its rounds, the baseline included.
        max_new_tokens: longest output; windows are shortened to what it leaves room for.
    """

    name: str
    key: PoolKey
    ways: Mapping[str, Way]
    max_new_tokens: int
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one method as columns: place of their ``record`` among the records, ``nodes`` scored, positions of the
    ``window`` that had room, tokens in the cache (``context``), seconds of each stage."""

    record: FloatArray
    nodes: FloatArray
    window: FloatArray
    context: FloatArray
    draft_s: FloatArray
    verify_s: FloatArray
    other_s: FloatArray

    @classmethod
    def of(cls, records: Sequence[Record], max_new_tokens: int) -> Rounds:
        rows = []
        for index, record in enumerate(records):
            committed, prompt = 0, len(record.prompt_ids or ())
            for one in record.rounds:
                window = min(record.gamma, max(max_new_tokens - committed - 1, 0))
                seconds = (one.draft_s, one.verify_s, one.other_s)
                rows.append((index, one.num_nodes, window, prompt + committed, *seconds))
                committed += one.num_committed
        return cls(*np.asarray(rows, dtype=np.float64).reshape(-1, 7).T)


@dataclass(frozen=True, slots=True)
class Part:
    """Rounds of one way of one run."""

    run: int
    way: Way
    num_drafts: int
    rounds: Rounds


def parts_of(index: int, run: MeasuredRun) -> list[Part]:
    records: dict[str, list[Record]] = {}
    for record in run.records:
        if record.rounds:
            records.setdefault(record.method, []).append(record)
    return [
        Part(index, run.ways[method], found[0].num_drafts, Rounds.of(found, run.max_new_tokens))
        for method, found in records.items()
    ]


def baseline_rounds(run: MeasuredRun) -> Rounds:
    """Raises ConfigError where the verifier alone was not measured."""
    rounds = Rounds.of([r for r in run.records if r.method == BASELINE], run.max_new_tokens)
    if not rounds.nodes.size:
        raise ConfigError(f"run {run.name} has no rounds of the verifier alone: expected an evaluation, baseline=true")
    return rounds


def require_same(first: MeasuredRun, second: MeasuredRun) -> None:
    """Raises MismatchError with everything that differs between what two runs were measured on."""
    left, right = asdict(first.key), asdict(second.key)
    told = [f"{name} {left[name]!r} and {right[name]!r}" for name in left if left[name] != right[name]]
    if told:
        raise MismatchError(
            f"runs {first.name} and {second.name} differ in {'; '.join(told)}: their seconds cannot be pooled; "
            "fit them apart"
        )
