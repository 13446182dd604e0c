"""T > 0 with a drafter whose tokenizer is not the verifier's: the law of completions, by enumeration.

Letters a and b. The verifier has a token for "ab", the drafter one for "ba": the same text has several tokenisations,
and the verifier's law tells them apart. Matching texts instead of tokens, or trusting the drafter's law, is refused by
the same check.
"""

from __future__ import annotations

import pytest
import torch
from helpers import Tab
from other_tokenizers import ScriptedDrafter
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdiff2.decoding.acceptance import LeviathanRule
from specdiff2.decoding.engine import Drafting, decode
from specdiff2.decoding.greedy_law import draw
from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.lossless_cases import random_table
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.retokenized_session import RetokenizedSession
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.protocols import AcceptanceRule, RandomSource
from specdiff2.types import Acceptance, Draft, SamplingParams

EOS, NUM_TOKENS, GAMMA = 3, 3, 2
PROMPT = [0]
Tokens = tuple[int, ...]


def letters(*pieces: str) -> PreTrainedTokenizerFast:
    """BPE with the ids of ``pieces`` in order; two letters are merged into one piece."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab, [(piece[0], piece[1]) for piece in pieces if len(piece) == 2]))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", clean_up_tokenization_spaces=False)


VERIFIER_PIECES = ["a", "b", "ab", "</s>"]
BRIDGE = TokenizerBridge(letters("b", "ba", "a", "</s>"), letters(*VERIFIER_PIECES))
TABLE = random_table(31, (4,))
VERIFIER = Tab(TABLE, eos_ids=[EOS], sampling=SamplingParams())


def draft_law(view: list[int], gamma: int) -> Tensor:
    """Two tokens out of four at each position, which ones depends on the drafter's view."""
    weights = torch.zeros(gamma, 4, dtype=torch.float64)
    for position in range(gamma):
        first = (3 * len(view) + sum(view) + position) % 4
        weights[position, first], weights[position, (first + 1 + position % 2) % 4] = 0.7, 0.3
    return weights


def drawn(view: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> Tensor:
    return rng.chains(draft_law(view, gamma), num_drafts)


def expected(sampling: SamplingParams) -> dict[Tokens, float]:
    """The verifier's law of completions, cut at EOS."""
    law: dict[Tokens, float] = {}
    whole = verifier_law(lambda prefix: logits_to_probs(TABLE(prefix).log(), sampling), NUM_TOKENS, tuple(PROMPT))
    for tokens, mass in whole.items():
        kept = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        law[kept] = law.get(kept, 0.0) + mass
    return law


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.6, top_k=3), SamplingParams(1.5, top_p=0.8)], ids=str
)
@pytest.mark.parametrize(("sampler", "num_drafts"), [("specdiff", 1), ("specdiff2", 2), ("tree_match", 2)])
def test_the_law_of_completions_is_the_verifiers(sampler: str, num_drafts: int, sampling: SamplingParams) -> None:
    decoder = make_decoder(
        VERIFIER, ScriptedDrafter(BRIDGE, GAMMA, drawn), sampler=sampler, num_drafts=num_drafts,
        verifier_sampling=sampling,
    )  # fmt: skip
    law = enumerate_outcomes(lambda rng: tuple(decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, rng=rng).tokens))
    assert total_variation(law, expected(sampling)) < 1e-12


def test_drafts_really_differ_in_length_and_are_really_accepted() -> None:
    """Otherwise the test above would prove nothing about them."""
    decoder = make_decoder(VERIFIER, ScriptedDrafter(BRIDGE, GAMMA, drawn), sampler="tree_match", num_drafts=2)
    streaks = enumerate_outcomes(
        lambda rng: tuple(
            (record.num_drafted, record.num_accepted)
            for record in decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, rng=rng).rounds
        )
    )
    first = {rounds[0] for rounds in streaks}
    assert {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)} <= first
    session = ScriptedDrafter(BRIDGE, GAMMA, drawn).start(PROMPT, SamplingParams(), NUM_TOKENS)
    drafts = enumerate_outcomes(lambda rng: tuple(session.propose(GAMMA, 1, rng).tokens[0].tolist()))
    assert len({len(draft) for draft in drafts}) > 1 and any(2 in draft for draft in drafts)


class TextMatchRule:
    """Planted: accepts a drafted token when the drawn token's TEXT begins it, and emits the drafted one."""

    name, is_lossless, reads_draft_probs, walks_tree = "text_match", False, False, False

    def __call__(self, tree, verifier_probs, draft_probs, rng: RandomSource) -> Acceptance:
        path: list[int] = []
        token = draw(verifier_probs, 0, rng)
        for node in tree.chain_nodes[0]:
            if not VERIFIER_PIECES[tree.tokens[node]].startswith(VERIFIER_PIECES[token]):
                break
            path.append(node)
            token = draw(verifier_probs, node, rng)
        return Acceptance(path, token)


class TrustedLawSession(RetokenizedSession):
    """Planted: states the drafter's law over its own ids as if it were one over the verifier's."""

    def propose(self, gamma, num_drafts, rng, *, needs_probs=False) -> Draft:
        draft = super().propose(gamma, num_drafts, rng)
        return Draft(draft.tokens, draft_law(self._text.drafter_ids, gamma)) if needs_probs else draft


@pytest.mark.parametrize(
    ("rule", "session"), [(TextMatchRule(), RetokenizedSession), (LeviathanRule(), TrustedLawSession)]
)
def test_the_same_check_refuses_what_trusts_texts_or_laws(rule: AcceptanceRule, session: type) -> None:
    sampling = SamplingParams()
    drafter = ScriptedDrafter(BRIDGE, GAMMA, drawn, session)
    drafting = Drafting(drafter, rule, None, gamma=GAMMA, num_drafts=1, sampling=sampling)
    law = enumerate_outcomes(
        lambda rng: tuple(
            decode(VERIFIER, PROMPT, sampling=sampling, drafting=drafting, max_new_tokens=NUM_TOKENS, rng=rng).tokens
        )
    )
    assert total_variation(law, expected(sampling)) > 1e-2
