"""Which rollouts a set of prompts calls for: the same plan, in the same order, in every process and on every run.

A plan of millions takes no more memory than its prompts: rows are computed when they are asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.prompt import Prompt, require_unique_ids
from specdiff2.types import Rollout


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One completion to be sampled. ``messages``: the prompt before its chat template."""

    rollout_id: str
    prompt_id: str
    prompt_ids: list[int]
    temperature: float
    messages: list[dict[str, str]]

    def rollout(self, completion_ids: list[int], **meta: str) -> Rollout:
        """It, sampled."""
        known: dict[str, str | int | float] = {"prompt_id": self.prompt_id, **meta}
        return Rollout(self.rollout_id, self.prompt_ids, completion_ids, self.temperature, known)


class RolloutPlan(Sequence[PlannedRollout]):
    """``samples_per_prompt`` rows a prompt and temperature, one at temperature 0. Grouped by temperature, longest
    prompts first: memory and ETA are honest early.

    Raises:
        ConfigError: no prompt, or an id twice.
    """

    def __init__(
        self, encoder: ChatEncoder, prompts: Sequence[Prompt], temperatures: Sequence[float], samples_per_prompt: int
    ) -> None:
        require_unique_ids(prompts, "rollouts")
        encoded = [(encoder.encode(prompt), prompt) for prompt in prompts]
        self._prompts = sorted(encoded, key=lambda pair: (-len(pair[0]), pair[1].prompt_id))
        self._temperatures = [float(temperature) for temperature in temperatures]
        self._samples = [samples_per_prompt if temperature > 0 else 1 for temperature in self._temperatures]
        self._starts = [0, *accumulate(len(prompts) * samples for samples in self._samples)]

    @property
    def longest(self) -> tuple[Prompt, int]:
        """The prompt with the most tokens, and their number."""
        ids, prompt = self._prompts[0]
        return prompt, len(ids)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> PlannedRollout:  # type: ignore[override]  # no slices
        if not 0 <= row < len(self):
            raise IndexError(row)
        part = bisect_right(self._starts, row) - 1
        index, sample = divmod(row - self._starts[part], self._samples[part])
        (ids, prompt), temperature = self._prompts[index], self._temperatures[part]
        rollout_id = f"{prompt.prompt_id}/T{temperature:g}/{sample}"
        return PlannedRollout(rollout_id, prompt.prompt_id, ids, temperature, prompt.messages)

    def batches(self, batch_size: int) -> Iterator[range]:
        """Consecutive rows of one temperature."""
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            for first in range(start, stop, batch_size):
                yield range(first, min(first + batch_size, stop))
