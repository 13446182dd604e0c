"""`prompt_lookup` at T > 0: the law of completions, by enumeration, with rounds that copy and rounds that cannot."""

from __future__ import annotations

import pytest
import torch
from helpers import Tab
from torch import Tensor

from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.engine import Drafting, decode
from specdiff2.decoding.greedy_law import draw
from specdiff2.decoding.prompt_lookup import PromptLookupDrafter
from specdiff2.evaluation.lossless_cases import random_table
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.protocols import AcceptanceRule, RandomSource
from specdiff2.types import Acceptance, SamplingParams

Tokens = tuple[int, ...]
TABLE = random_table(61, (3,))
NUM_TOKENS = 4
T1 = SamplingParams()


def completions(prompt: list[int], rule: AcceptanceRule, sampling: SamplingParams) -> dict[Tokens, float]:
    drafter = PromptLookupDrafter(num_tokens=3)
    drafting = Drafting(drafter, rule, None, drafter.gamma, 1, SamplingParams())
    return enumerate_outcomes(
        lambda rng: tuple(
            decode(Tab(TABLE), prompt, sampling=sampling, drafting=drafting, max_new_tokens=NUM_TOKENS, rng=rng).tokens
        )
    )


def expected(prompt: list[int], sampling: SamplingParams) -> dict[Tokens, float]:
    def law(prefix: Tokens) -> Tensor:
        return logits_to_probs(TABLE(prefix).log(), sampling)

    return verifier_law(law, NUM_TOKENS, tuple(prompt))


@pytest.mark.parametrize("sampling", [T1, SamplingParams(0.6, top_k=2), SamplingParams(1.4, top_p=0.8)], ids=str)
@pytest.mark.parametrize("prompt", [[0], [0, 1, 2, 0, 1], [2, 2, 2]])
def test_the_law_of_completions_is_the_verifiers(prompt: list[int], sampling: SamplingParams) -> None:
    law = completions(prompt, make_rule("greedy"), sampling)
    assert total_variation(law, expected(prompt, sampling)) < 1e-12


class TrustingRule:
    """Planted: keeps a copied token that the verifier finds likely enough, without drawing."""

    name, is_lossless, reads_draft_probs, walks_tree = "trusting", False, False, False

    def __call__(self, tree, verifier_probs, draft_probs, rng: RandomSource) -> Acceptance:
        path, parent = [], 0
        for node in tree.chain_nodes[0] if tree.chain_nodes else ():
            if float(verifier_probs[parent][tree.tokens[node]]) < 0.3:
                break
            path.append(node)
            parent = node
        return Acceptance(path, draw(verifier_probs, parent, rng))


def test_the_same_check_refuses_copies_that_are_trusted() -> None:
    prompt = [0, 1, 2, 0, 1]
    assert total_variation(completions(prompt, TrustingRule(), T1), expected(prompt, T1)) > 1e-2
    assert torch.isclose(torch.tensor(sum(expected(prompt, T1).values())), torch.tensor(1.0))
