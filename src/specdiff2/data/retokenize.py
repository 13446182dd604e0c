"""Rollouts in the tokens of a drafter whose tokenizer is not the verifier's.

Training then asks of the drafter what decoding does: to continue its own view of the verifier's text with its own
tokens. The streak is that of the drafter's tokens, not of the verifier's. Knows how a text is cut in two at the end of
the prompt; how it is tokenised is ``models.bridged_text``. All texts are tokenised once for their lengths, and a text
again when it is read: 20 bytes a rollout stay in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from specdiff2.data.lazy_rollouts import FACTS, LazyRollouts, rollout_facts
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.types import Rollout

_log = logging.getLogger(__name__)


class RetokenizedRollouts(LazyRollouts):
    """The same texts in the drafter's tokens; ids, temperature and meta are kept.

    A token boundary stays where the prompt ends. A completion that ends with the verifier's EOS ends with the
    drafter's. Completions of which nothing is visible to the drafter are left out, with a warning.
    """

    def __init__(self, rollouts: Sequence[Rollout], bridge: TokenizerBridge) -> None:
        self._rollouts, self._bridge = rollouts, bridge
        self._facts = np.fromiter(self._visible(), dtype=np.dtype([("row", "<i4"), *FACTS.descr]))
        num_hidden = len(rollouts) - len(self)
        if num_hidden:
            _log.warning(
                "%d of %d rollouts have no text that the drafter could be trained on; they are left out",
                num_hidden,
                len(rollouts),
            )

    def __len__(self) -> int:
        return len(self._facts)

    def facts(self, rows: np.ndarray) -> np.ndarray:
        return self._facts[rows]

    def read(self, row: int) -> Rollout:
        return self._translated(self._rollouts[int(self._facts["row"][row])])

    def _visible(self) -> Iterator[tuple[int, ...]]:
        for row, rollout in enumerate(self._rollouts):
            translated = self._translated(rollout)
            if translated.completion_ids:
                yield row, *rollout_facts(translated)

    def _translated(self, rollout: Rollout) -> Rollout:
        prompt, completion = _split(rollout, self._bridge)
        return replace(rollout, prompt_ids=prompt, completion_ids=completion, meta=dict(rollout.meta))


def _split(rollout: Rollout, bridge: TokenizerBridge) -> tuple[list[int], list[int]]:
    """Prompt and completion in the drafter's ids."""
    completion, end = rollout.completion_ids, list[int]()
    if completion and completion[-1] == bridge.verifier_eos and bridge.drafter_eos is not None:
        completion, end = completion[:-1], [bridge.drafter_eos]
    text = bridge.start(rollout.prompt_ids)
    text.seal()
    prompt = text.drafter_ids
    text.extend(completion)
    return prompt, text.drafter_ids[len(prompt) :] + end
