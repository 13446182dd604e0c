"""Exact means over windows, however they are spread over accumulated batches and ranks.

Lightning averages losses over accumulated batches and DDP averages gradients over ranks. Both are wrong as soon as
batches hold different numbers of windows. So each micro-batch back-propagates the *sum* of its window losses, and
the gradient is divided once, before clipping, by the number of windows of the whole optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from specdiff2.training.strategies import DeepSpeed
from specdiff2.types import ObjectiveOutput, WindowBatch


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all micro-batches and ranks of one optimizer step."""

    loss_sum: float
    num_windows: int
    streak_sum: float
    num_streaks: int
    num_empty_batches: int
    part_sums: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Means per window; a mean over nothing is left out, never NaN."""
        metrics = {"train/num_windows": float(self.num_windows), "train/empty_batches": float(self.num_empty_batches)}
        if self.num_windows:
            metrics["train/loss"] = self.loss_sum / self.num_windows
            for name, part_sum in self.part_sums.items():
                metrics[f"train/loss_{name}"] = part_sum / self.num_windows
        if self.num_streaks:
            metrics["train/streak"] = self.streak_sum / self.num_streaks
        return metrics


class WindowTotals:
    """Adds up objective outputs between two optimizer steps."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._parts: list[dict[str, Tensor]] = []

    @property
    def is_empty_group(self) -> bool:
        """No micro-batch since the last optimizer step."""
        return not self._rows

    def add(self, output: ObjectiveOutput) -> None:
        # kept as tensors: one transfer to the host per optimizer step, not one per micro-batch
        streak = output.streak
        self._parts.append({name: part_sum.detach().double() for name, part_sum in output.parts.items()})
        self._rows.append(
            torch.stack(
                [
                    output.loss_sum.detach().double(),
                    output.num_windows.double(),
                    streak.double().sum(),
                    torch.tensor(float(len(streak)), device=streak.device, dtype=torch.float64),
                    (output.num_windows == 0).double(),
                ]
            )
        )

    def add_empty(self) -> None:
        """A micro-batch without windows."""
        self._rows.append(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64))

    def take(self, strategy: Strategy, device: torch.device, part_names: Sequence[str] = ()) -> StepTotals:
        """Totals over all ranks (every rank must call this, with the same names); starts the next group.

        ``part_names`` come from the objective and not from what was added: a rank with empty batches only has seen
        none of them, and still has to send as many numbers as the others.
        """
        zero = torch.zeros((), dtype=torch.float64, device=device)
        parts = [sum((p[name].to(device) for p in self._parts if name in p), zero) for name in part_names]
        local = torch.cat([torch.stack([row.to(device) for row in self._rows]).sum(0), *(p[None] for p in parts)])
        self._rows, self._parts = [], []
        reduced = strategy.reduce(local, reduce_op="sum")
        loss, windows, streak, streaks, empty, *sums = reduced.tolist()
        part_sums = dict(zip(part_names, sums, strict=True))
        return StepTotals(loss, round(windows), streak, round(streaks), round(empty), part_sums)


def divide_gradients(strategy: Strategy, optimizer: Optimizer, num_windows: int) -> None:
    """Sum of window gradients -> mean. Without any window gradients become None: the optimizer then leaves
    parameters, moments and weight decay alone. DeepSpeed does both itself."""
    if isinstance(strategy, DeepSpeed):
        return strategy.divide_step(num_windows)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if num_windows == 0:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.div_(num_windows)


def one_window(batch: WindowBatch) -> WindowBatch:
    """The rollouts of a batch that has no window, with one behind the first token of the first: something to compute
    where every rank must compute."""
    rows = torch.arange(1, batch.targets.shape[1] + 1, device=batch.input_ids.device)
    exists = (rows < batch.lengths[0])[None]
    targets = batch.input_ids[0, rows.clamp(max=batch.input_ids.shape[1] - 1)][None]
    first = batch.lengths.new_zeros(1)
    return dataclasses.replace(
        batch, window_row=first, anchor=first, targets=torch.where(exists, targets, 0), valid=exists,
        revealed=torch.zeros_like(exists),
    )  # fmt: skip
