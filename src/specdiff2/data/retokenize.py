"""Rollouts in the tokens of a drafter whose tokenizer is not the verifier's.

Training then asks of the drafter what decoding does: to continue its own view of the verifier's text with its own
tokens. The streak is that of the drafter's tokens, not of the verifier's. Knows how a text is cut in two at the end of
the prompt; how it is tokenised is ``models.bridged_text``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.types import Rollout

_log = logging.getLogger(__name__)


def retokenize_rollouts(rollouts: Iterable[Rollout], bridge: TokenizerBridge) -> list[Rollout]:
    """The same texts in the drafter's tokens; ids, temperature and meta are kept.

    A token boundary stays where the prompt ends. A completion that ends with the verifier's EOS ends with the
    drafter's. Completions of which nothing is visible to the drafter are left out, with a warning.
    """
    translated, num_given = [], 0
    for rollout in rollouts:
        num_given += 1
        prompt, completion = _split(rollout, bridge)
        if completion:
            meta = dict(rollout.meta)
            translated.append(replace(rollout, prompt_ids=prompt, completion_ids=completion, meta=meta))
    if len(translated) < num_given:
        _log.warning(
            "%d of %d rollouts have no text that the drafter could be trained on; they are left out",
            num_given - len(translated),
            num_given,
        )
    return translated


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
