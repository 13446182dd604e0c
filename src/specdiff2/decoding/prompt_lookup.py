"""Prompt lookup: a drafter without a model that copies what followed the last tokens where they occurred before.

Of the longest suffix (at most ``max_ngram`` tokens) that occurred before, the FIRST occurrence counts, and the next
``num_tokens`` tokens are the draft, up to an end-of-text token. A round in which nothing recurs drafts nothing. The
drafts are deterministic, so a rule that never reads their law (greedy) is lossless with them.

Follows ``PromptLookupCandidateGenerator`` of transformers 5.24, proposal by proposal (tests/golden). Where a tree has
room for it, ``sampler=tree_lookup`` puts such a copy beside the drafter's own nodes instead. Knows no model.

Source: prompt lookup decoding (Saxena 2023), as huggingface/transformers has it, in
src/transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specdiff2.functional.suffix_lookup import SuffixLookup
from specdiff2.protocols import RandomSource
from specdiff2.types import ConfigError, Draft, SamplingParams

PROMPT_LOOKUP = "prompt_lookup"  # as the name of a drafter: prompt_lookup, or prompt_lookup:NUM_TOKENS:NGRAM
_DEFAULTS = (10, 2)  # transformers' own


class PromptLookupDrafter:
    """See ``protocols.Drafter``.

    Args:
        num_tokens: longest draft.
        max_ngram: longest suffix that is looked up.
        eos_ids: a draft ends before one of them.

    Raises:
        ConfigError: a number below 1.
    """

    offers_law = False  # copies have none

    def __init__(
        self, num_tokens: int = _DEFAULTS[0], max_ngram: int = _DEFAULTS[1], eos_ids: Collection[int] = ()
    ) -> None:
        for what, value in (("num_tokens", num_tokens), ("ngram", max_ngram)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{what}={value!r} of drafter {PROMPT_LOOKUP}: expected an integer >= 1")
        self.gamma = num_tokens
        self.max_ngram = max_ngram
        self.eos_ids = frozenset(eos_ids)
        self.fingerprint = f"{PROMPT_LOOKUP}:{num_tokens}:{max_ngram}"  # records are filed under it

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> PromptLookupSession:
        """Enter the prompt. Nothing is drawn, so ``sampling`` has no part in it."""
        return PromptLookupSession(self, prompt)


class PromptLookupSession:
    """See ``protocols.DrafterSession``."""

    def __init__(self, drafter: PromptLookupDrafter, prompt: Sequence[int]) -> None:
        self._drafter = drafter
        self._lookup = SuffixLookup(prompt, drafter.max_ngram, earliest=True)

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """One draft of at most ``gamma`` tokens; ``[1, 0]`` where nothing recurs.

        Raises:
            ConfigError: several drafts, or their law is asked for.
        """
        if num_drafts != 1 or needs_probs:
            asked = "the law of its drafts" if needs_probs else f"K={num_drafts!r}"
            raise ConfigError(
                f"{asked} of drafter {PROMPT_LOOKUP}: it copies one draft, which has no law; use sampler prompt_lookup "
                "(rule greedy, K=1)"
            )
        copy = self._lookup.find(gamma)
        tokens = [] if copy is None else copy.tokens
        end = next((i for i, token in enumerate(tokens) if token in self._drafter.eos_ids), len(tokens))
        return Draft(torch.tensor([tokens[:end]], dtype=torch.long))

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Newly committed tokens."""
        self._lookup.extend(tokens)


def read_prompt_lookup(name: object) -> tuple[int, int] | None:
    """(num_tokens, max_ngram) of a drafter's name; None for the name of another drafter.

    Raises:
        ConfigError: it begins like one, and goes on as none does.
    """
    kind, *numbers = str(name).split(":")
    if kind != PROMPT_LOOKUP or not isinstance(name, str):
        return None
    if len(numbers) in (0, 2) and all(number.isdecimal() and int(number) > 0 for number in numbers):
        num_tokens, max_ngram = map(int, numbers) if numbers else _DEFAULTS
        return num_tokens, max_ngram
    raise ConfigError(
        f"drafter={name!r}: expected {PROMPT_LOOKUP}, or {PROMPT_LOOKUP}:NUM_TOKENS:NGRAM with two integers >= 1, such "
        f"as {PROMPT_LOOKUP}:10:2"
    )
