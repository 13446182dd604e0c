"""Several objectives at once: a weighted sum over the same windows, each part reported apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdiff2.objectives.base import (
    LawObjective,
    PathObjective,
    objective_output,
    path_log_probs,
    trainable_positions,
)
from specdiff2.protocols import Objective
from specdiff2.types import ConfigError, ObjectiveOutput

RESERVED = frozenset({"prefix"})  # the training module's own part


@dataclass(frozen=True, slots=True)
class Part:
    """One objective of a weighted sum.

    Raises:
        ConfigError: a weight below 0 or not finite.
    """

    objective: Objective
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not (math.isfinite(self.weight) and self.weight >= 0.0):
            raise ConfigError(f"objective part: weight={self.weight!r}: expected a finite number >= 0; 0 only reports")


class Weighted:
    """``loss = sum_parts weight * loss(part)``, e.g. the streak plus a little cross-entropy.

    Losses keep their own scales (``ce`` a mean over gamma, ``streak`` and ``tv`` sums over the window): the weights
    compare what the parts' own pages say. A window counts when any part can train on it; the sets of windows of
    the package's objectives are nested, so that the largest count is that number.

    Args:
        parts: name -> part; the name is that of the logged metric ``train/loss_<name>``.

    Raises:
        ConfigError: no parts, all weights 0, a bad name, a sum inside a sum, or parts that need different masks.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        _check(self.parts)
        objectives = [part.objective for part in self.parts.values()]
        self.name = "+".join(self.parts)
        self.needs_verifier_probs = any(objective.needs_verifier_probs for objective in objectives)
        self.masking = objectives[0].masking

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """See ``protocols.Objective``; ``parts`` of the result holds each part's own loss sum."""
        objectives = [part.objective for part in self.parts.values()]
        trains_path = any(isinstance(o, PathObjective) or getattr(o, "trains_path", False) for o in objectives)
        log_probs = path_log_probs(logits, targets, valid, differentiable=trains_path)
        trainable = trainable_positions(targets, valid)
        outputs: list[ObjectiveOutput] = []
        for objective in objectives:
            if isinstance(objective, PathObjective):
                loss = objective.path_loss(log_probs, valid, trainable)
                outputs.append(objective_output(loss, log_probs, valid, trainable))
            elif isinstance(objective, LawObjective):
                loss = objective.law_loss(logits, objective.require(verifier_probs), log_probs, valid)
                outputs.append(objective_output(loss, log_probs, valid, valid))
            else:
                outputs.append(objective(logits, targets, valid, verifier_probs))
        terms = [part.weight * output.loss_sum for part, output in zip(self.parts.values(), outputs, strict=True)]
        return ObjectiveOutput(
            loss_sum=torch.stack(terms).sum(),
            num_windows=torch.stack([output.num_windows for output in outputs]).amax(),
            streak=outputs[0].streak,
            parts={name: output.loss_sum.detach() for name, output in zip(self.parts, outputs, strict=True)},
        )

    def __repr__(self) -> str:
        terms = ", ".join(f"{name}={part.weight!r} * {part.objective!r}" for name, part in self.parts.items())
        return f"Weighted({terms})"


def part_names(objective: Objective) -> tuple[str, ...]:
    """Names of the parts that ``objective`` reports; none for a single one."""
    return tuple(objective.parts) if isinstance(objective, Weighted) else ()


def _check(parts: Mapping[str, Part]) -> None:
    if not parts:
        raise ConfigError("objective mix: parts={}: expected at least one part, name: {objective, weight}")
    for name, part in parts.items():
        if not re.fullmatch("[a-z0-9_]+", name) or name in RESERVED:
            raise ConfigError(
                f"objective mix: part name {name!r}: expected lower-case letters, digits and '_', and not "
                f"{', '.join(sorted(RESERVED))}, since train/loss_<name> is logged"
            )
        if not isinstance(part, Part):
            raise ConfigError(
                f"objective mix: part {name!r}={part!r}: expected {{_target_: specdiff2.objectives.Part, objective, "
                "weight}"
            )
        if isinstance(part.objective, Weighted):
            raise ConfigError(f"objective mix: part {name!r} is a sum itself: list its parts here, weights multiplied")
    if not any(part.weight for part in parts.values()):
        raise ConfigError("objective mix: all weights are 0: expected at least one above 0; nothing would be trained")
    masks = {name: part.objective.masking for name, part in parts.items()}
    if len(set(masks.values())) > 1:
        raise ConfigError(
            f"objective mix: masking={masks}: expected one kind, since all parts score the same windows; train 'mdm' "
            "in a stage of its own (objective.warmup)"
        )
