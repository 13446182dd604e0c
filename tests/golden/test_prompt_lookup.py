"""`prompt_lookup` against transformers' own: the same proposals round by round, the same tokens, the same streaks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import reference_greedy, tiny_verifier
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

from specdiff2.decoding.acceptance import GreedyRule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.hf_decoder import HFDecoder, HFOptions
from specdiff2.decoding.prompt_lookup import PromptLookupDrafter
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.functional.suffix_lookup import Copy, SuffixLookup
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import SamplingParams

NUM_NEW, EOS = 40, 2
PROMPT = [5, 9, 33, 7, 21, 5, 9, 33, 40, 7, 21, 5]
SETTINGS = [(10, 2), (3, 3), (1, 1), (6, 5)]
T0 = SamplingParams(0.0)


def proposal(drafter: PromptLookupDrafter, text: Sequence[int], split: int, room: int) -> list[int]:
    """What we draft after ``text``, its tokens from ``split`` on committed while decoding."""
    session = drafter.start(text[:split], T0, 100)
    for token in text[split:]:
        session.observe([token])
    draft = session.propose(min(drafter.gamma, room), 1, TorchRandomSource(0), needs_probs=False)
    assert draft.draft_probs is None and draft.tokens.dtype == torch.long
    return draft.tokens[0].tolist()


def their_proposal(text: Sequence[int], num_tokens: int, ngram: int, eos: Sequence[int], room: int) -> list[int]:
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(eos) if eos else None, num_output_tokens=num_tokens, max_matching_ngram_size=ngram,
        max_length=len(text) + room + 1,
    )  # fmt: skip
    candidates, _ = generator.get_candidates(torch.tensor([text]))
    return candidates[0, len(text) :].tolist()[:room]  # what fits, the verifier's own token apart


def check_proposals(num_texts: int = 400) -> set[int]:
    """Random texts over few tokens, where much recurs; returns the lengths that were drafted."""
    numbers, lengths = random.Random(0), set()
    for index in range(num_texts):
        num_tokens, ngram = SETTINGS[index % len(SETTINGS)]
        text = [numbers.randrange(numbers.choice([2, 4, 9])) for _ in range(numbers.randint(1, 30))]
        room, eos = numbers.choice([1, 2, 30]), [[], [EOS], [0, EOS]][index % 3]
        ours = proposal(PromptLookupDrafter(num_tokens, ngram, eos), text, numbers.randint(1, len(text)), room)
        assert ours == their_proposal(text, num_tokens, ngram, eos, room), (text, num_tokens, ngram, eos, room)
        lengths.add(len(ours))
    return lengths


def test_every_proposal_is_theirs() -> None:
    assert check_proposals() >= {0, 1, 2, 3, 6, 10}


def one_too_early(self: SuffixLookup, max_tokens: int) -> Copy | None:
    copy = FIND(self, max_tokens)
    return copy and Copy([self._tokens[-1], *copy.tokens[:-1]], copy.num_matched, copy.prob)


def the_latest(self: SuffixLookup, tokens: Sequence[int], max_ngram: int, *, earliest: bool) -> None:
    START(self, tokens, max_ngram)


FIND, START = SuffixLookup.find, SuffixLookup.__init__


@pytest.mark.parametrize(("name", "fault"), [("find", one_too_early), ("__init__", the_latest)])
def test_the_check_refuses_copies_from_elsewhere(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuffixLookup, name, fault)
    with pytest.raises(AssertionError):
        check_proposals()


# ---------------------------------------------------------------- whole texts
class Recorded(PromptLookupDrafter):
    """Keeps (number of committed tokens, draft) of every round."""

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> Any:
        session, self.rounds = super().start(prompt, sampling, max_new_tokens), list[tuple[int, list[int]]]()
        propose = session.propose

        def noted(*args: Any, **kwargs: Any) -> Any:
            draft = propose(*args, **kwargs)
            self.rounds.append((len(session._lookup._tokens), draft.tokens[0].tolist()))
            return draft

        session.propose = noted
        return session


def their_rounds(verifier: HFVerifier, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Any], list[int]]:
    """(tokens, [(committed tokens, draft)], accepted draft tokens) of transformers' prompt lookup."""
    rounds: list[Any] = []
    accepted: list[int] = []
    get = PromptLookupCandidateGenerator.get_candidates

    def proposed(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        candidates = get(self, input_ids, **kwargs)
        rounds.append((input_ids.shape[1], candidates[0][0, input_ids.shape[1] :].tolist()))
        return candidates

    def noted(self: Any, input_ids: Tensor, scores: Tensor, num_matches: Any) -> None:
        accepted.append(int(num_matches))

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", proposed)
    for owner in (PromptLookupCandidateGenerator, CandidateGenerator):
        monkeypatch.setattr(owner, "update_candidate_strategy", noted)
    tokens = HFDecoder(verifier, HFOptions("prompt_lookup")).generate(PROMPT, max_new_tokens=NUM_NEW).tokens
    return tokens, rounds, accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [3, 4, 7])
def test_tokens_drafts_and_streaks_are_theirs(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_verifier(dtype=dtype, seed=seed, initializer_range=0.05)  # soon repeats itself
    tokens, rounds, accepted = their_rounds(verifier, monkeypatch)
    drafter = Recorded(eos_ids=verifier.eos_ids)
    generation = SpeculativeDecoder(verifier, drafter, rule=GreedyRule(), verifier_sampling=T0).generate(
        PROMPT, max_new_tokens=NUM_NEW
    )
    assert generation.tokens == tokens == reference_greedy(verifier.model, PROMPT, NUM_NEW)
    assert [record.num_accepted for record in generation.rounds] == accepted
    end = len(PROMPT) + NUM_NEW
    room = [(length, draft[: end - length - 1]) for length, draft in rounds if end - length > 1]
    assert drafter.rounds == room
    assert sum(accepted) >= 5 and any(not draft for _, draft in drafter.rounds)  # copies were right, and some missing


def test_case_11_any_length_and_sampled_texts() -> None:
    """At T > 0 drafts change which random numbers are drawn for what, not the law (tests/exact)."""
    verifier = tiny_verifier(seed=7, initializer_range=0.05)
    for max_new_tokens in (1, 2, 3, 10, 11, 12):
        decoder = SpeculativeDecoder(verifier, PromptLookupDrafter(), rule=GreedyRule(), verifier_sampling=T0)
        alone = AutoregressiveDecoder(verifier, sampling=T0).generate(PROMPT, max_new_tokens=max_new_tokens)
        assert decoder.generate(PROMPT, max_new_tokens=max_new_tokens).tokens == alone.tokens
        sampled = SpeculativeDecoder(
            verifier, PromptLookupDrafter(), rule=GreedyRule(), verifier_sampling=SamplingParams(1.0)
        ).generate(PROMPT, max_new_tokens=max_new_tokens)
        assert sampled.num_tokens == max_new_tokens == sum(record.num_committed for record in sampled.rounds)
