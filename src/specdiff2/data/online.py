"""Fresh rollouts during training: the next prompts in turn, sampled by the frozen verifier.

What is sampled depends only on the seed, the round and the rank, so a resumed run samples what an uninterrupted
one would have. Nothing is stored on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import BatchSampler
from specdiff2.data.prompt import Prompt, check_count, require_unique_ids, shuffled
from specdiff2.data.rollout_plan import RolloutPlan
from specdiff2.data.seeding import stable_generator
from specdiff2.types import Rollout, SamplingParams


class OnlineRollouts:
    """Samples ``prompts_per_round`` prompts per rank and round (``samples_per_prompt`` each and temperature)."""

    def __init__(
        self,
        verifier: BatchSampler,
        encoder: ChatEncoder,
        prompts: Sequence[Prompt],
        *,
        prompts_per_round: int = 64,
        temperatures: Sequence[float] = (1.0,),
        top_k: int = 0,
        top_p: float = 1.0,
        samples_per_prompt: int = 1,
        batch_size: int = 32,
        max_new_tokens: int = 256,
        seed: int = 0,
    ) -> None:
        counts = {"prompts_per_round": prompts_per_round, "batch_size": batch_size, "max_new_tokens": max_new_tokens}
        for name, value in (counts | {"samples_per_prompt": samples_per_prompt}).items():
            check_count(name, value, 1)
        require_unique_ids(prompts, "online rollouts")
        self.verifier, self.encoder, self.prompts = verifier, encoder, shuffled(prompts, seed)
        self.prompts_per_round, self.samples_per_prompt = prompts_per_round, samples_per_prompt
        self.temperatures, self.top_k, self.top_p = tuple(temperatures), top_k, top_p
        self.batch_size, self.max_new_tokens, self.seed = batch_size, max_new_tokens, seed

    def sample(self, round_index: int, rank: int = 0, world_size: int = 1) -> list[Rollout]:
        """The rollouts of one round; ranks take different prompts as long as there are enough."""
        count = min(self.prompts_per_round, len(self.prompts))
        start = (round_index * world_size + rank) * count
        chosen = [self.prompts[(start + offset) % len(self.prompts)] for offset in range(count)]
        plan = RolloutPlan(self.encoder, chosen, self.temperatures, self.samples_per_prompt)
        rollouts: list[Rollout] = []
        for rows in plan.batches(self.batch_size):
            batch = [plan[row] for row in rows]
            sampling = SamplingParams(batch[0].temperature, self.top_k, self.top_p)
            ids = [item.rollout_id for item in batch]
            generator = stable_generator("online", self.seed, round_index, rank, *ids)
            prompt_ids = [item.prompt_ids for item in batch]
            completions = self.verifier.sample_batch(prompt_ids, sampling, self.max_new_tokens, generator)
            for item, completion in zip(batch, completions, strict=True):
                name = f"online/{round_index}/{rank}/{item.rollout_id}"
                rollouts.append(Rollout(name, item.prompt_ids, completion, item.temperature))
        return rollouts
