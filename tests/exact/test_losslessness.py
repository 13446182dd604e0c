"""The measuring instrument itself: enumeration, total variation, its refusals."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specdiff2.decoding.acceptance import make_rule
from specdiff2.evaluation.lossless_cases import lossless_cases, random_table, worst_case_gap
from specdiff2.evaluation.losslessness import enumerate_outcomes, exact_output_law, total_variation, verifier_law
from specdiff2.types import ConfigError, SpecDiffError


def test_binomial_law() -> None:
    outcomes = enumerate_outcomes(lambda rng: sum(rng.bernoulli(0.3) for _ in range(4)))
    for heads, mass in outcomes.items():
        assert mass == pytest.approx(math.comb(4, heads) * 0.3**heads * 0.7 ** (4 - heads), abs=1e-15)


def test_branches_may_depend_on_earlier_ones() -> None:
    probs = torch.tensor([0.5, 0.0, 1.5])

    def run(rng):
        first = rng.categorical(probs)
        return first, rng.bernoulli(0.25) if first else None

    assert enumerate_outcomes(run) == {(0, None): 0.25, (2, False): 0.5625, (2, True): 0.1875}


def test_certain_branches_do_not_multiply_runs() -> None:
    assert enumerate_outcomes(lambda rng: (rng.bernoulli(0.0), rng.bernoulli(1.0), rng.bernoulli(1.5)), max_runs=1) == {
        (False, True, True): 1.0
    }


def test_chains_enumerate_every_draw() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    outcomes = enumerate_outcomes(lambda rng: tuple(map(tuple, rng.chains(probs, 2).tolist())))
    assert len(outcomes) == (2 * 3) ** 2
    assert outcomes[((0, 2), (1, 0))] == pytest.approx(0.5 * 0.5 * 0.5 * 0.2)


def test_other_randomness_is_noticed() -> None:
    numbers = random.Random(0)

    def run(rng):
        return rng.categorical(torch.ones(numbers.choice([2, 3, 4]))), rng.bernoulli(0.5)

    with pytest.raises(SpecDiffError, match="RandomSource only"):
        for _ in range(20):
            enumerate_outcomes(run)


def test_too_many_branches_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max_runs=8"):
        enumerate_outcomes(lambda rng: tuple(rng.bernoulli(0.5) for _ in range(4)), max_runs=8)


@pytest.mark.parametrize("weights", [[math.nan, 1.0], [0.0, 0.0], [-0.5, 1.5], [math.inf, 1.0]])
def test_weights_that_are_no_law_are_refused(weights: list[float]) -> None:
    with pytest.raises(SpecDiffError):
        enumerate_outcomes(lambda rng: rng.categorical(torch.tensor(weights)))


def test_nan_acceptance_is_refused() -> None:
    with pytest.raises(SpecDiffError, match="0/0"):
        enumerate_outcomes(lambda rng: rng.bernoulli(math.nan))


def test_total_variation() -> None:
    assert total_variation({"a": 1.0}, {"b": 1.0}) == 1.0
    assert total_variation({"a": 0.5, "b": 0.5}, {"b": 0.5, "a": 0.5}) == 0.0
    assert total_variation({"a": 0.75, "b": 0.25}, {"a": 0.5, "c": 0.5}) == 0.5


def test_verifier_law_depends_on_the_prefix() -> None:
    table = random_table(1, (3,))
    law = verifier_law(table, 2)
    assert math.fsum(law.values()) == pytest.approx(1.0)
    assert law[(2, 1)] == pytest.approx(float(table(())[2] * table((2,))[1]))
    assert not torch.allclose(table((0,)), table((1,)))


def test_one_speculative_round_and_all_of_them_agree() -> None:
    case = lossless_cases(1)[0]
    arguments = (make_rule("specinfer"), None, case.verifier_table, case.draft_table, 1, 2, 3)
    assert total_variation(exact_output_law(*arguments), exact_output_law(*arguments, max_rounds=1)) < 1e-12


def test_nothing_to_test_is_refused() -> None:
    with pytest.raises(ConfigError, match="gamma=0"):
        worst_case_gap(make_rule("greedy"), gamma=0)
