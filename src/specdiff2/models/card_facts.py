"""What a model card tells about how a drafter was trained and measured: plain records, no file is read here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation on held-out windows during a run.

    Attributes:
        step: optimizer steps of the run so far.
        hours: training time of the run so far.
        loss: mean training loss since the evaluation before; None where nothing was trained in between.
        streak, streak_greedy: expected streak of sampled drafts, and streak of argmax drafts, without the bonus token.
    """

    step: int
    hours: float
    loss: float | None
    streak: float | None
    streak_greedy: float | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One training run.

    Attributes:
        name: relative to the outputs of the machine it ran on.
        command: to run it again; no path of that machine in it.
        stages: the objective schedule, one line each.
        num_steps, num_windows: optimizer steps done and windows trained on.
        hours: forward and backward passes; evaluations, checkpoints and pauses are not in it.
        is_online: whether rollouts were replaced by fresh ones while training.
    """

    name: str
    command: str
    stages: tuple[str, ...]
    num_steps: int
    num_windows: int
    hours: float
    machine: str
    verifier_dtype: str
    precision: str
    torch: str
    commit: str
    is_online: bool
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Rollouts of one prompt source.

    Attributes:
        source: first part of the prompt ids.
        temperatures: that the verifier sampled at.
        num_tokens: of the completions.
    """

    source: str
    num_rollouts: int
    num_tokens: int
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything on a card that the drafter's own config does not say.

    Attributes:
        runs: in the order they were trained; each one starts from the drafter of the one before.
        evaluation: Markdown tables of measured rows.
        measured: how they were measured: command, machine, dtype, commit.
        ship_command: that wrote the folder.
    """

    runs: tuple[RunFacts, ...]
    data: tuple[DataFacts, ...]
    evaluation: str
    measured: str
    ship_command: str
