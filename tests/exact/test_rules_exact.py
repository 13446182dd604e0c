"""Every lossless rule reproduces the verifier's law to 1e-12, by enumerating every random branch."""

from __future__ import annotations

import pytest
import torch

from specdiff2.decoding.acceptance import RULES, make_rule
from specdiff2.decoding.selection import make_selector
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table, worst_case_gap
from specdiff2.evaluation.losslessness import (
    enumerate_outcomes,
    exact_output_law,
    speculative_round,
    total_variation,
    verifier_law,
)
from specdiff2.types import Draft

TOLERANCE = 1e-12
SAMPLERS = [
    *((name, None, 1) for name in RULES),
    *((name, None, num_drafts) for name in ("tree_match", "specinfer", "traversal") for num_drafts in (2, 3)),
    *(("greedy", "self_selection", num_drafts) for num_drafts in (1, 2, 3)),
]


def test_every_registered_rule_claims_to_be_lossless_and_is_covered() -> None:
    assert {name for name, _, _ in SAMPLERS} == set(RULES)
    assert all(make_rule(name).is_lossless for name in RULES)


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_law_of_gamma_plus_one_tokens(rule: str, selection: str | None, num_drafts: int, gamma: int) -> None:
    case, gap = worst_case_gap(make_rule(rule), make_selector(selection), num_drafts=num_drafts, gamma=gamma)
    assert gap < TOLERANCE, case


@pytest.mark.parametrize(("rule", "selection", "num_drafts"), SAMPLERS)
def test_law_of_the_whole_loop(rule: str, selection: str | None, num_drafts: int) -> None:
    """Every round speculates, also those that start after a partly accepted window."""
    gamma, num_tokens = (1, 3) if num_drafts == 3 else (2, 3)
    case = lossless_cases(gamma)[0]
    output = exact_output_law(
        make_rule(rule), make_selector(selection), case.verifier_table, case.draft_table, gamma, num_drafts, num_tokens
    )
    assert total_variation(output, verifier_law(case.verifier_table, num_tokens)) < TOLERANCE


@pytest.mark.parametrize("rule", ["leviathan", "block", "traversal"])
def test_window_of_three(rule: str) -> None:
    """Block verification has inner prefixes on both sides only from gamma = 3."""
    case, gap = worst_case_gap(make_rule(rule), gamma=3)
    assert gap < TOLERANCE, case


@pytest.mark.parametrize(("rule", "selection", "num_drafts"), [s for s in SAMPLERS if s[2] > 1 or s[1] is None])
def test_bonus_token_follows_the_verifier_given_the_accepted_window(
    rule: str, selection: str | None, num_drafts: int
) -> None:
    case, gamma = lossless_cases(1)[0], 1

    def run(rng):
        def propose(prefix, rng):
            probs = case.draft_table(prefix)
            return Draft(rng.chains(probs, num_drafts), probs)

        tree, accepted = speculative_round(
            make_rule(rule), make_selector(selection), case.verifier_table, propose, (), rng
        )
        return (*(tree.tokens[node] for node in accepted.path), accepted.next_token)

    outcomes = enumerate_outcomes(run)
    for window in {tokens[:-1] for tokens in outcomes if len(tokens) == gamma + 1}:
        bonus = {tokens[-1:]: mass for tokens, mass in outcomes.items() if tokens[:-1] == window}
        given = {tokens: mass / sum(bonus.values()) for tokens, mass in bonus.items()}
        assert total_variation(given, verifier_law(case.verifier_table, 1, window)) < TOLERANCE


@pytest.mark.parametrize("rule", ["greedy", "tree_match"])
def test_rules_that_never_read_q_take_any_draft(rule: str) -> None:
    """Scripted drafts, wrong draft_probs and no draft_probs at all."""
    table = random_table(11, (3,))
    for tokens in ([[0, 0]], [[2, 1]]):
        for probs in (None, torch.tensor([[0.0, 0.0, 1.0]] * 2)):
            draft = Draft(torch.tensor(tokens), probs)
            output = exact_output_law(
                make_rule(rule), None, table, torch.ones(2, 3), 2, 1, 3, propose=lambda prefix, rng, d=draft: d
            )
            assert total_variation(output, verifier_law(table, 3)) < TOLERANCE


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_tree_without_drafts_is_one_autoregressive_step(rule: str) -> None:
    table = random_table(12, (3,))
    output = exact_output_law(
        make_rule(rule),
        None,
        table,
        torch.ones(0, 3),
        0,
        1,
        2,
        propose=lambda prefix, rng: Draft(torch.zeros((0, 0), dtype=torch.long), None),
    )
    assert total_variation(output, verifier_law(table, 2)) < TOLERANCE


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_a_window_may_be_shortened_by_what_is_known_before_its_tokens(rule: str) -> None:
    """The law has more rows than the draft has positions; its length depends on the prefix only."""
    case = lossless_cases(2)[0]

    def propose(prefix, rng):
        probs = case.draft_table(prefix)
        return Draft(rng.chains(probs, 1)[:, : 1 + len(prefix) % 2], probs)

    output = exact_output_law(make_rule(rule), None, case.verifier_table, case.draft_table, 2, 1, 3, propose=propose)
    assert total_variation(output, verifier_law(case.verifier_table, 3)) < TOLERANCE


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_unnormalised_float32_rows_use_the_law_that_is_drawn_from(rule: str) -> None:
    """float32 rows sum to 1 +- 1e-7; RandomSource normalises them, so the ratio has to do the same."""
    scaled = torch.tensor([[0.14, 0.05, 0.02]])
    table = random_table(13, (3,))
    output = exact_output_law(make_rule(rule), None, lambda prefix: 3.0 * table(prefix), scaled, 1, 1, 2)
    assert total_variation(output, verifier_law(table, 2)) < TOLERANCE
