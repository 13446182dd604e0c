"""One prediction of the speed law, and the measurement it is held against.

A prediction knows how the method drafts (its ``Way``), a streak law, the nodes of a full window, and how long the
outputs of the verifier alone are; seconds come from the cost law. Nothing of the method's own time goes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdiff2.evaluation.bootstrap import FloatArray
from specdiff2.evaluation.metrics import BASELINE, paired
from specdiff2.evaluation.records import Record
from specdiff2.evaluation.speed_law import CostLaw
from specdiff2.evaluation.speed_law_rounds import MeasuredRun, Rounds, Way
from specdiff2.evaluation.speed_law_streaks import StreakLaw, rounds_by_window


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean tokens of a round and seconds of its stages, and of a step of the verifier alone."""

    tau: float
    draft_s: float
    verify_s: float
    other_s: float
    step_s: float

    @property
    def round_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    @property
    def speedup(self) -> float:
        return self.tau * self.step_s / self.round_s


@dataclass(frozen=True, slots=True)
class Case:
    """One method on one benchmark at one temperature in one run, over the prompts the baseline decoded too."""

    run: MeasuredRun
    method: str
    records: Sequence[Record]
    baseline: Sequence[Record]

    @property
    def way(self) -> Way:
        return self.run.ways[self.method]

    @property
    def rounds(self) -> Rounds:
        return Rounds.of(self.records, self.run.max_new_tokens)

    def name(self) -> dict[str, Any]:
        """What a row is called by."""
        first = self.records[0]
        return {
            "run": self.run.name, "benchmark": first.benchmark, "temperature": first.temperature,
            "method": self.method, "gamma": first.gamma, "num_drafts": first.num_drafts,
        }  # fmt: skip


def cases_of(run: MeasuredRun) -> Iterator[Case]:
    """Every drafting method with rounds, group by group."""
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for record in run.records:
        groups.setdefault((record.benchmark, record.temperature, record.method), []).append(record)
    for (benchmark, temperature, method), records in groups.items():
        mine, theirs = paired(records, groups.get((benchmark, temperature, BASELINE), []))
        if method != BASELINE and any(record.rounds for record in mine):
            yield Case(run, method, mine, theirs)


def predict(law: CostLaw, case: Case, streaks: StreakLaw, full_nodes: FloatArray) -> Stages:
    """The stages of ``case`` by the law, from its way of drafting and the lengths of the verifier's outputs alone.

    Args:
        full_nodes: nodes of rounds with a full window, one number or the recorded ones; shorter windows have
            proportionally fewer drafted nodes.

    Raises:
        ConfigError: the law does not know the way.
    """
    run, num_drafts = case.run, case.records[0].num_drafts
    steps = Rounds.of(case.baseline, run.max_new_tokens)
    context = float(np.mean(steps.context))
    lengths = [len(record.tokens) for record in case.baseline]
    counts = rounds_by_window(streaks, run.max_new_tokens, lengths)
    drafted = float(np.mean(full_nodes)) - 1.0
    stages = np.zeros(3)
    for window, count in counts.items():
        full = window == streaks.gamma
        nodes = full_nodes if full else np.array([1.0 + drafted * window / streaks.gamma])
        scored, rest = law.verify(nodes, context), law.other_seconds(case.way, nodes)
        drafted_s = law.draft_seconds(case.way, window, num_drafts)
        stages += count * np.array([drafted_s, np.mean(scored), np.mean(rest)])
    num_rounds = sum(counts.values())
    draft, verify, other = (float(total) / num_rounds for total in stages)
    step = law.step_seconds(run.ways[BASELINE], context)
    return Stages(sum(lengths) / num_rounds, draft, verify, other, step)


def measure(case: Case) -> Stages:
    """The recorded stages; the speed-up of its ratio of pooled tokens per second."""
    sides = [(sum(len(r.tokens) for r in s), sum(r.decode_s for r in s)) for s in (case.records, case.baseline)]
    rounds = case.rounds
    draft, verify, other = (float(np.mean(s)) for s in (rounds.draft_s, rounds.verify_s, rounds.other_s))
    return Stages(sides[0][0] / len(rounds.nodes), draft, verify, other, step_s=sides[1][1] / sides[1][0])


def full_window_nodes(case: Case) -> FloatArray:
    """Nodes of the rounds whose window had room for all positions; of all rounds where none had."""
    rounds = case.rounds
    full = rounds.nodes[rounds.window == case.records[0].gamma]
    return full if full.size else rounds.nodes
