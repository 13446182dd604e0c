"""Several rows decoded at once, enumerated: the law of each row is the verifier's, whatever the other rows do.

A real transformer of three tokens in float64, scored in shared passes over one cache. Row by row every random branch of
one row is taken while the others follow seeds: prompts of different lengths, ragged acceptance, rows that end early or
take over a place. Planted mistakes of the batch fail the very same check.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import FunctionDrafter, reference_logits, tiny_verifier

from specdiff2.decoding.samplers import make_decoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.evaluation.lossless_cases import random_table
from specdiff2.evaluation.losslessness import Prefix, enumerate_outcomes, total_variation, verifier_law
from specdiff2.models import verifier_batch
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.row_cache import RowCache
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import SamplingParams

VOCAB, GAMMA, NUM_NEW = 3, 2, 4
PROMPTS = [[0, 2, 1, 1, 2, 0], [1], [2, 2, 0]]
EXACT, CLEARLY_WRONG = 1e-9, 1e-4
T1 = SamplingParams()


@cache
def verifier_of(eos: int | None) -> HFVerifier:
    return tiny_verifier(VOCAB, torch.float64, seed=5, eos_ids=() if eos is None else (eos,), initializer_range=0.4)


def table_drafter() -> FunctionDrafter:
    """The most probable chains of tables of the last two tokens: no random branch of its own."""
    table = random_table(31, (GAMMA, VOCAB))

    def propose(context, gamma, num_drafts, rng):
        probs = table(tuple(context[-2:]))[:gamma]
        best = probs.argsort(-1, descending=True)[:, :num_drafts]
        return best.T.contiguous(), probs

    return FunctionDrafter(GAMMA, propose)


def random_drafter() -> FunctionDrafter:
    """Draws from the same tables, for rules that read the law of the drafts."""
    table = random_table(31, (GAMMA, VOCAB))

    def propose(context, gamma, num_drafts, rng):
        probs = table(tuple(context[-2:]))[:gamma]
        return rng.chains(probs, num_drafts), probs

    return FunctionDrafter(GAMMA, propose)


def decoder_of(sampler: str = "tree_match", num_drafts: int = 1, *, drafter=None, eos=None) -> SpeculativeDecoder:
    return make_decoder(
        verifier_of(eos), drafter or table_drafter(), sampler=sampler, num_drafts=num_drafts, verifier_sampling=T1
    )


@cache
def wanted(row: int, num_new: int = NUM_NEW, eos: int | None = None) -> dict[Prefix, float]:
    """The verifier's law from plain forward passes, cut behind EOS."""
    model, prompt = verifier_of(eos).model, PROMPTS[row]
    law: dict[Prefix, float] = {}
    for tokens, mass in verifier_law(
        cache(lambda prefix: reference_logits(model, prefix)[-1].softmax(-1)), num_new, tuple(prompt)
    ).items():
        kept = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
        law[kept] = law.get(kept, 0.0) + mass
    return law


def law_gap(decoder, row: int, *, num_new: int = NUM_NEW, eos: int | None = None, batch_size: int | None = None):
    """Total variation of one row's output to the verifier's law, the other rows on seeds."""

    def run(rng) -> Prefix:
        rngs = [rng if index == row else TorchRandomSource(10 + index) for index in range(len(PROMPTS))]
        done = decoder.generate_batch(PROMPTS, batch_size=batch_size, max_new_tokens=num_new, rngs=rngs)
        return tuple(done[row].tokens)

    return total_variation(enumerate_outcomes(run), wanted(row, num_new, eos))


@pytest.mark.parametrize("row", range(len(PROMPTS)))
@pytest.mark.parametrize(("sampler", "num_drafts"), [("specdiff2", 2), ("tree_match", 1), ("tree_match", 2)])
def test_law_of_every_row(sampler: str, num_drafts: int, row: int) -> None:
    assert law_gap(decoder_of(sampler, num_drafts), row, num_new=NUM_NEW if num_drafts == 1 else 3) < EXACT


@pytest.mark.parametrize("sampler", ["block", "traversal"])
def test_law_of_rules_that_read_the_law_of_the_drafts(sampler: str) -> None:
    assert law_gap(decoder_of(sampler, drafter=random_drafter()), 2, num_new=2) < EXACT


@pytest.mark.parametrize(("eos", "row"), [(1, 0), (1, 2), (2, 2)])
def test_law_while_rows_end_early(eos: int, row: int) -> None:
    """Rows end at different rounds; the ones left are moved together."""
    assert law_gap(decoder_of(eos=eos), row, eos=eos) < EXACT


@pytest.mark.parametrize("row", [1, 2])
def test_law_of_a_row_in_the_place_of_another(row: int) -> None:
    """Two places for three prompts: the last one comes into a place that was used."""
    assert law_gap(decoder_of(eos=1), row, eos=1, batch_size=2) < EXACT


@pytest.mark.parametrize("conditioning", ["none", "verifier_kv"])
def test_law_with_a_block_drafter_in_shared_passes(conditioning: str) -> None:
    drafter = BlockDrafter.from_verifier(
        verifier_of(None), num_layers=1, gamma=GAMMA, conditioning=conditioning, shifted=True, dtype=torch.float64,
        mask_token_id=VOCAB - 1,
    )  # fmt: skip
    assert law_gap(decoder_of("tree_match", drafter=drafter), 2) < EXACT
    assert law_gap(decoder_of("block", drafter=drafter), 2, num_new=2) < EXACT


def test_rows_accept_different_lengths() -> None:
    """Otherwise nothing above would be ragged."""
    rngs = [TorchRandomSource(10 + index) for index in range(len(PROMPTS))]
    done = decoder_of("tree_match", 2).generate_batch(PROMPTS, max_new_tokens=12, rngs=rngs)
    assert len({tuple(record.num_accepted for record in generation.rounds) for generation in done}) == len(PROMPTS)


# ---------------------------------------------------------------- planted mistakes
def sees_the_gap(patch) -> None:
    """The mask lets a shorter row see the slots behind its end."""
    right = verifier_batch.ragged_tree_mask

    def wrong(parents, lengths, start, dtype):
        return right(parents, torch.full_like(lengths, start), start, dtype)

    patch.setattr(verifier_batch, "ragged_tree_mask", wrong)


def positions_of_the_first_row(patch) -> None:
    right = HFVerifier.forward

    def wrong(self, ids, *, positions=None, **others):
        return right(self, ids, positions=None if positions is None else positions[:1].expand_as(positions), **others)

    patch.setattr(HFVerifier, "forward", wrong)


def path_of_another_row(patch) -> None:
    """A row keeps the nodes that the row before it accepted, where it accepted as many."""
    right, before = RowCache.gather, [[0]]

    def wrong(self, prefix_length, indices, index=None):
        own = [slot - indices[0] for slot in indices]
        kept = before[0] if len(before[0]) == len(own) else own
        before[0] = own
        right(self, prefix_length, [indices[0] + node for node in kept])

    patch.setattr(RowCache, "gather", wrong)


def length_of_another_row(patch) -> None:
    """A row keeps as many tokens as the row before it, and takes what lies behind for the rest."""
    right, before = RowCache.gather, [1]

    def wrong(self, prefix_length, indices, index=None):
        right(self, prefix_length, indices[: before[0]])
        before[0] = len(indices)
        self.filled(prefix_length + len(indices))

    patch.setattr(RowCache, "gather", wrong)


def rows_moved_but_not_their_memory(patch) -> None:
    """When rows leave, the others go on with the memory of whoever was in their place."""
    right = verifier_batch.SharedCache.keep_rows
    patch.setattr(verifier_batch.SharedCache, "keep_rows", lambda self, rows: right(self, range(len(rows))))


@pytest.mark.parametrize(
    "mistake", [sees_the_gap, positions_of_the_first_row, path_of_another_row, length_of_another_row]
)
def test_planted_mistakes_fail(mistake, monkeypatch) -> None:
    decoder = decoder_of("tree_match", 2)
    mistake(monkeypatch)
    assert max(law_gap(decoder, row, num_new=3) for row in (1, 2)) > CLEARLY_WRONG


def test_planted_mistake_in_leaving_rows_fails(monkeypatch) -> None:
    decoder = decoder_of(eos=1)
    rows_moved_but_not_their_memory(monkeypatch)
    assert max(law_gap(decoder, row, eos=1) for row in (1, 2)) > CLEARLY_WRONG
