"""Which objective trains at which optimizer step, e.g. 300 steps of ``ce``, then ``streak``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdiff2.protocols import Objective
from specdiff2.types import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One objective for ``steps`` optimizer steps; ``steps=None``: until the end (the last stage only)."""

    objective: Objective
    steps: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.steps is not None and (isinstance(self.steps, bool) or self.steps < 1):
            raise ConfigError(f"stage {self.label!r}: steps={self.steps!r}: expected an integer >= 1, or null")

    @property
    def label(self) -> str:
        return self.name or self.objective.name


class ObjectiveSchedule:
    """Stages one after the other. Steps count optimizer steps from 0.

    Raises:
        ConfigError: no stage, or a stage without ``steps`` before the last one.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        if not self.stages:
            raise ConfigError("objective schedule: stages=[]: expected at least one stage")
        for stage in self.stages[:-1]:
            if stage.steps is None:
                raise ConfigError(
                    f"stage {stage.label!r}: steps=null, but another stage follows it: give it a number of steps"
                )

    @classmethod
    def single(cls, objective: Objective) -> ObjectiveSchedule:
        """One objective from the first step to the last."""
        return cls([Stage(objective)])

    def index_at(self, step: int) -> int:
        """Index of the stage that optimizer step ``step`` belongs to; the last stage has no end."""
        end = 0
        for index, stage in enumerate(self.stages[:-1]):
            end += stage.steps or 0
            if step < end:
                return index
        return len(self.stages) - 1

    def stage_at(self, step: int) -> Stage:
        """The stage that optimizer step ``step`` belongs to."""
        return self.stages[self.index_at(step)]

    @property
    def warmup_steps(self) -> int:
        """Steps of the first stage when another one follows it, else 0."""
        return (self.stages[0].steps or 0) if len(self.stages) > 1 else 0

    @property
    def needs_verifier_probs(self) -> bool:
        return any(stage.objective.needs_verifier_probs for stage in self.stages)

    @property
    def needs_random_masks(self) -> bool:
        return any(stage.objective.masking == "random" for stage in self.stages)

    def describe(self) -> list[dict[str, str | int | None]]:
        """Plain record for checkpoints and run files."""
        return [
            {"name": stage.label, "objective": repr(stage.objective), "steps": stage.steps} for stage in self.stages
        ]
