"""Learning-rate schedule and parameter groups. Knows no model and no loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from specdiff2.types import ConfigError

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LambdaLR]


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Trainable parameters only, those with fewer than two axes (norms, biases, embeddings of one token) undecayed.

    Raises:
        ConfigError: nothing is trainable.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ConfigError("optimizer: the drafter has 0 trainable parameters: expected some; unfreeze its layers")
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    plain = [parameter for parameter in trainable if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def lr_factor(step: int, *, num_steps: int, warmup_steps: int, final_factor: float) -> float:
    """Factor on the peak learning rate at optimizer step ``step`` (from 0).

    Linear from ``1 / warmup_steps`` to 1, then a half cosine that reaches ``final_factor`` at ``num_steps``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return final_factor + (1.0 - final_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(
    optimizer: Optimizer, *, num_steps: int, warmup_steps: int = 0, final_factor: float = 0.1
) -> LambdaLR:
    """Warm-up + cosine, stepped once per optimizer step.

    The factor is a plain function of the step, so a checkpoint holds only the step: a resumed run with another
    ``num_steps`` follows the new one.

    Raises:
        ConfigError: ``num_steps`` < 1, ``warmup_steps`` not in 0 .. num_steps, ``final_factor`` not in [0, 1].
    """
    if num_steps < 1:
        raise ConfigError(f"scheduler: num_steps={num_steps!r}: expected >= 1 optimizer steps")
    if not 0 <= warmup_steps <= num_steps:
        raise ConfigError(f"scheduler: warmup_steps={warmup_steps!r}: expected 0 .. num_steps={num_steps}")
    if not 0.0 <= final_factor <= 1.0:
        raise ConfigError(f"scheduler: final_factor={final_factor!r}: expected 0 <= final_factor <= 1")
    factor = partial(lr_factor, num_steps=num_steps, warmup_steps=warmup_steps, final_factor=final_factor)
    # a lambda, not the partial: LambdaLR would put a callable object's attributes into the checkpoint
    return LambdaLR(optimizer, lambda step: factor(step))
