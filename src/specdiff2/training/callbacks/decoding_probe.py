"""DecodingProbe: run the real decoder on a few prompts during training.

Held-out windows say how well the drafter predicts stored rollouts; this says what decoding really gives. Logs
``probe/mean_streak``, ``probe/tau`` (tokens per verifier pass, bonus token included) and ``probe/tokens_per_s``
(decode time only, prefill excluded; noisy while training shares the machine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from specdiff2.protocols import Decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.training.callbacks.metric_log import StepTrigger, log_now
from specdiff2.training.strategies import whole_weights
from specdiff2.types import ConfigError, Generation


class DecodingProbe(pl.Callback):
    """Decodes the prompts every n optimizer steps, on rank 0.

    Args:
        prompts: token ids, one list per prompt.
        make_decoder: ``make_decoder(drafter)`` gives the decoder to run, with the drafter being trained.
        every_n_steps: optimizer steps between probes.
        max_new_tokens: per prompt.
        seed: of the decoder's random source, the same at every probe.

    Raises:
        ConfigError: no prompts, or ``every_n_steps`` or ``max_new_tokens`` below 1.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        make_decoder: Callable[[Any], Decoder],
        *,
        every_n_steps: int = 200,
        max_new_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        if not prompts:
            raise ConfigError("decoding probe: prompts=[]: expected at least one prompt, or leave the probe out")
        if max_new_tokens < 1:
            raise ConfigError(f"decoding probe: max_new_tokens={max_new_tokens!r}: expected >= 1")
        self.prompts = [list(prompt) for prompt in prompts]
        self.history: list[dict[str, Any]] = []
        self._make_decoder, self._max_new_tokens, self._seed = make_decoder, max_new_tokens, seed
        self._trigger = StepTrigger("decoding probe", every_n_steps)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._trigger.due(trainer.global_step):
            return
        with whole_weights(trainer.strategy):  # of all ranks
            if trainer.is_global_zero:
                metrics = self.probe(pl_module.drafter)
                self.history.append({"step": trainer.global_step, **metrics})
                log_now(trainer, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "last_step": self._trigger.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self._trigger.last_step = state_dict["history"], state_dict["last_step"]

    @torch.no_grad()
    def probe(self, drafter: Any) -> dict[str, float | None]:
        """Pooled over prompts; None where nothing was decoded."""
        was_training = drafter.training
        drafter.eval()
        decoder = self._make_decoder(drafter)
        generations = [
            decoder.generate(prompt, max_new_tokens=self._max_new_tokens, rng=TorchRandomSource(self._seed + index))
            for index, prompt in enumerate(self.prompts)
        ]
        drafter.train(was_training)
        return _pooled(generations)


def _pooled(generations: Sequence[Generation]) -> dict[str, float | None]:
    rounds = [record for generation in generations for record in generation.rounds]
    num_tokens = sum(generation.num_tokens for generation in generations)
    decode_s = sum(generation.decode_s for generation in generations)
    return {
        "probe/mean_streak": sum(record.num_accepted for record in rounds) / len(rounds) if rounds else None,
        "probe/tau": num_tokens / len(rounds) if rounds else None,
        "probe/tokens_per_s": num_tokens / decode_s if decode_s > 0 else None,
    }
