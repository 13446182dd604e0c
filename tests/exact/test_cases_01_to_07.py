"""Cases 1-7 of the failure collection: lossless sampling."""

from __future__ import annotations

import math

import pytest
import torch

from specdiff2.decoding.acceptance import RULES, make_rule
from specdiff2.decoding.selection import make_selector
from specdiff2.evaluation.lossless_cases import fixed_table, random_table
from specdiff2.evaluation.losslessness import (
    enumerate_outcomes,
    exact_output_law,
    independent_drafts,
    speculative_round,
    total_variation,
    verifier_law,
)
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, Draft, SamplingParams

TOLERANCE = 1e-12
SAMPLERS = [
    ("greedy", None, 1),
    ("greedy", "self_selection", 3),
    ("tree_match", None, 3),
    ("leviathan", None, 1),
    ("block", None, 1),
    ("specinfer", None, 3),
    ("traversal", None, 3),
]
P, Q = (0.2, 0.3, 0.5), (0.7, 0.2, 0.1)


def loop(rule: str, selection: str | None, verifier_table, propose, num_tokens: int, seed: int) -> list[int]:
    """The seeded loop on tables."""
    rng, tokens = TorchRandomSource(seed), []
    while len(tokens) < num_tokens:
        tree, accepted = speculative_round(
            make_rule(rule), make_selector(selection), verifier_table, propose, tuple(tokens), rng
        )
        tokens += [*(tree.tokens[node] for node in accepted.path), accepted.next_token]
    return tokens[:num_tokens]


# ---------------------------------------------------------------- case 1
@pytest.mark.parametrize(
    ("verifier_sampling", "draft_sampling"),
    [
        (SamplingParams(top_k=5), SamplingParams(top_k=3)),
        (SamplingParams(top_p=0.7), SamplingParams(top_p=0.4)),
        (SamplingParams(temperature=0.5), SamplingParams(temperature=2.0)),
        (SamplingParams(temperature=2.0, top_k=2), SamplingParams(temperature=0.3)),
        (SamplingParams(temperature=0.0), SamplingParams(top_k=3)),
    ],
    ids=["top_k", "top_p", "temperature", "mixed", "greedy_verifier"],
)
@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_1_different_sampling_on_either_side(rule, selection, num_drafts, verifier_sampling, draft_sampling) -> None:
    num_drafts, gamma = min(num_drafts, 2), 1 if num_drafts > 1 else 2
    verifier = random_table(31, (6,), verifier_sampling)
    draft = random_table(32, (gamma, 6), draft_sampling)
    output = exact_output_law(
        make_rule(rule), make_selector(selection), verifier, draft, gamma, num_drafts, gamma + 1, max_rounds=1
    )
    assert total_variation(output, verifier_law(verifier, gamma + 1)) < TOLERANCE


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_1_reporting_the_untruncated_law_is_noticed(rule: str) -> None:
    """The planted error: tokens come from the top-2 of q while the ratio reads all of q."""
    verifier, whole = random_table(36, (4,)), random_table(37, (1, 4))
    drawn = random_table(37, (1, 4), SamplingParams(top_k=2))

    def propose(prefix, rng):
        return Draft(rng.chains(drawn(prefix), 1), whole(prefix))

    output = exact_output_law(make_rule(rule), None, verifier, whole, 1, 1, 2, propose=propose)
    assert total_variation(output, verifier_law(verifier, 2)) > 1e-2


# ---------------------------------------------------------------- case 2
TOP_K_TREE = Draft(torch.tensor([[0], [1]]), torch.tensor([[0.51, 0.49]], dtype=torch.float64))


def first_token(rule: str, draft: Draft, law: tuple[float, ...]) -> dict[tuple[int, ...], float]:
    return exact_output_law(
        make_rule(rule), None, fixed_table(law), torch.ones(1, len(law)), 1, 2, 1, propose=lambda prefix, rng: draft
    )


def test_2_deterministic_top_k_tree() -> None:
    assert first_token("tree_match", TOP_K_TREE, (0.51, 0.49))[(1,)] == pytest.approx(0.49, abs=TOLERANCE)


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_2_a_deterministic_draft_has_q_equal_to_one(rule: str) -> None:
    right = Draft(torch.tensor([[0]]), torch.tensor([[1.0, 0.0]]))
    wrong = Draft(torch.tensor([[0]]), torch.tensor([[0.51, 0.49]]))
    assert first_token(rule, right, (0.51, 0.49))[(1,)] == pytest.approx(0.49, abs=TOLERANCE)
    assert first_token(rule, wrong, (0.51, 0.49)).get((1,), 0.0) == pytest.approx(0.0, abs=1e-6)  # the trap
    assert first_token("specinfer", TOP_K_TREE, (0.51, 0.49)).get((1,), 0.0) == 0.0


# ---------------------------------------------------------------- case 3
@pytest.mark.parametrize(
    ("rule", "selection", "num_drafts"),
    [(rule, selection, 4 if num_drafts > 1 else 1) for rule, selection, num_drafts in SAMPLERS],
)
def test_3_four_drafts_keep_the_law(rule: str, selection: str | None, num_drafts: int) -> None:
    output = exact_output_law(
        make_rule(rule), make_selector(selection), fixed_table(P), fixed_table([Q]), 1, num_drafts, 2, max_rounds=1
    )
    assert total_variation(output, verifier_law(fixed_table(P), 2)) < TOLERANCE


def test_3_identical_drafts_share_nodes_and_keep_their_multiplicity() -> None:
    tree = TokenTree.from_chains(9, [[1, 2]] * 4)
    assert tree.num_nodes == 3
    assert tree.chain_nodes == [[1, 2]] * 4
    # token 0 always fails; each failed draw takes q off once: (0, .4, .6) -> (0, .1, .4) / .5 -> (0, 0, .6) / .6
    impossible = torch.tensor([[0.0, 0.4, 0.6]], dtype=torch.float64).expand(2, 3)
    draft_probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    counts = {}
    for num_copies in (1, 4):
        tree = TokenTree.from_chains(9, [[0]] * num_copies)
        counts[num_copies] = enumerate_outcomes(
            lambda rng, t=tree: make_rule("specinfer")(t, impossible, draft_probs, rng).next_token
        )
    assert counts[1] == pytest.approx({1: 0.2, 2: 0.8})
    assert counts[4] == {2: 1.0}


@pytest.mark.parametrize(
    ("several", "selection", "single"),
    [
        ("tree_match", None, "greedy"),
        ("greedy", "self_selection", "greedy"),
        ("specinfer", None, "leviathan"),
        ("traversal", None, "block"),
    ],
)
def test_3_one_draft_equals_the_single_draft_path_with_the_same_seed(several, selection, single) -> None:
    verifier, propose = random_table(33, (5,)), independent_drafts(random_table(34, (3, 5)), 3, 1)
    for seed in range(20):
        assert loop(several, selection, verifier, propose, 12, seed) == loop(single, None, verifier, propose, 12, seed)


def test_3_greedy_with_a_deterministic_draft_equals_plain_sampling_with_the_same_seed() -> None:
    verifier = random_table(35, (5,))
    draft = Draft(torch.tensor([[0, 1, 2]]), None)
    for seed in range(20):
        rng, plain = TorchRandomSource(seed), []
        for _ in range(12):
            plain.append(rng.categorical(verifier(tuple(plain))))
        assert loop("greedy", None, verifier, lambda prefix, rng: draft, 12, seed) == plain


# ---------------------------------------------------------------- case 4
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("verifier_row", "draft_row", "drafted"),
    [
        (P, P, 1),
        ((0.0, 1.0, 0.0), Q, 1),
        ((0.0, 0.0, 1.0), Q, 1),
        (P, (0.7, 0.0, 0.3), 1),
        ((0.5, 0.0, 0.5), (0.7, 0.0, 0.3), 1),
        ((0.0, 1.0, 0.0), (0.0, 1.0, 0.0), 1),
        ((1e-30, 1.0, 0.0), (1.0, 1e-30, 0.0), 0),
    ],
    ids=["equal", "right_one_hot", "wrong_one_hot", "q_zero", "both_zero", "equal_one_hot", "tiny"],
)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_4_degenerate_rows(rule: str, verifier_row, draft_row, drafted: int, dtype: torch.dtype) -> None:
    verifier_probs = torch.tensor([verifier_row] * 3, dtype=dtype)
    draft_probs = torch.tensor([draft_row] * 2, dtype=dtype)
    tree = TokenTree.from_chains(0, [[drafted, drafted]])

    def run(rng):
        accepted = make_rule(rule)(tree, verifier_probs, draft_probs, rng)
        return (*(tree.tokens[node] for node in accepted.path), accepted.next_token)

    outcomes = enumerate_outcomes(run)  # raises on NaN and on a law without mass
    assert math.fsum(outcomes.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert all(verifier_row[token] > 0 for tokens in outcomes for token in tokens)


# ---------------------------------------------------------------- case 5
@pytest.mark.parametrize(("rule", "selection", "num_drafts"), [(r, s, min(k, 2)) for r, s, k in SAMPLERS])
def test_5_accepted_replaced_and_bonus_tokens_stay_in_the_nucleus(rule, selection, num_drafts) -> None:
    logits, gamma = torch.tensor([1.0, 0.9, 0.8, 0.0], dtype=torch.float64), 2
    law = logits_to_probs(logits, SamplingParams(temperature=0.3, top_k=2, top_p=0.5))
    wide = logits_to_probs(logits, SamplingParams(temperature=0.3, top_k=2, top_p=0.9))
    assert law.count_nonzero() == 1 and wide.count_nonzero() == 2
    for row in (law, wide):
        verifier = fixed_table(row.tolist())
        propose = independent_drafts(torch.full((gamma, 4), 0.25, dtype=torch.float64), gamma, num_drafts)

        def run(rng, verifier=verifier, propose=propose):
            tree, accepted = speculative_round(make_rule(rule), make_selector(selection), verifier, propose, (), rng)
            kind = "bonus" if len(accepted.path) == gamma else "replaced"
            return tuple(tree.tokens[node] for node in accepted.path), kind, accepted.next_token

        outcomes = enumerate_outcomes(run)
        assert {kind for _, kind, _ in outcomes} == {"bonus", "replaced"}
        nucleus = set(row.nonzero().flatten().tolist())
        for path, _, token in outcomes:
            assert {*path, token} <= nucleus
        first: dict[int, float] = {}
        for (path, _, token), mass in outcomes.items():
            first[(*path, token)[0]] = first.get((*path, token)[0], 0.0) + mass
        assert total_variation(first, dict(enumerate(row.tolist()))) < TOLERANCE
        bonus = {token: mass for (path, kind, token), mass in outcomes.items() if kind == "bonus" and path == (0, 0)}
        given = {token: mass / math.fsum(bonus.values()) for token, mass in bonus.items()}
        assert total_variation(given, dict(enumerate(row.tolist()))) < TOLERANCE


# ---------------------------------------------------------------- case 6
@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_6_two_hundred_seeds(rule: str, selection: str | None, num_drafts: int) -> None:
    logits = torch.tensor([0.5, 1.0, 0.0])
    for temperature, few in ((1.0, False), (0.0, True)):
        row = logits_to_probs(logits, SamplingParams(temperature=temperature))
        propose = independent_drafts(torch.tensor([[0.3, 0.3, 0.4]]), 1, num_drafts)
        seen = {loop(rule, selection, lambda prefix, row=row: row, propose, 1, seed)[0] for seed in range(200)}
        assert seen == {1} if few else len(seen) > 1


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_6_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=temperature)


# ---------------------------------------------------------------- case 7
@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
@pytest.mark.parametrize(("drafted", "streak"), [(0, 0), (1, 1)])
def test_7_window_of_one(rule: str, selection: str | None, num_drafts: int, drafted: int, streak: int) -> None:
    verifier = fixed_table((0.0, 1.0, 0.0))
    one_hot = torch.nn.functional.one_hot(torch.tensor([drafted]), 3).double()
    draft = Draft(torch.full((num_drafts, 1), drafted), one_hot)
    _, accepted = speculative_round(
        make_rule(rule), make_selector(selection), verifier, lambda prefix, rng: draft, (), TorchRandomSource(0)
    )
    assert (len(accepted.path), accepted.next_token) == (streak, 1)
