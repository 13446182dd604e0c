"""logits_to_probs: always a law, always inside the right support, and equal to a slow reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdiff2.functional import sampling as sampling_module
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.types import SamplingParams, SpecDiffError

values = st.one_of(st.integers(-4, 4).map(float), st.floats(-60, 60, width=32), st.just(-math.inf))  # ties are likely
rows = st.lists(values, min_size=1, max_size=9).filter(lambda row: max(row) > -math.inf)
params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-30, 20.0)),
    top_k=st.integers(0, 10),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
)


def reference(row: list[float], sampling: SamplingParams) -> list[float]:
    """The definition, token by token, in Python floats."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if sampling.temperature == 0.0:
        return [float(token == order[0]) for token in range(len(row))]
    weights = [math.exp((value - row[order[0]]) / sampling.temperature) for value in row]
    kept = order[: sampling.top_k or len(row)]
    total = math.fsum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if nucleus and mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    total = math.fsum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(row))]


@settings(deadline=None, max_examples=200)
@given(rows, params)
def test_equals_the_definition_in_float64(row: list[float], sampling: SamplingParams) -> None:
    probs = logits_to_probs(torch.tensor(row, dtype=torch.float64), sampling)
    assert probs.dtype == torch.float64
    expected = torch.tensor(reference(row, sampling), dtype=torch.float64)
    mass = expected[expected > 0].sort(descending=True).values.cumsum(-1)
    if sampling.top_p < 1.0 and bool(((mass - sampling.top_p).abs() < 1e-9).any()):
        return  # the border of the nucleus is within rounding: either answer is right
    assert torch.allclose(probs, expected, atol=1e-9, rtol=0.0)


@settings(deadline=None, max_examples=100)
@given(rows, params, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_always_a_law(row: list[float], sampling: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.tensor(row).to(dtype)
    probs = logits_to_probs(logits, sampling)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(torch.isfinite(probs).all()) and float(probs.min()) >= 0.0
    assert float(probs.double().sum()) == pytest.approx(1.0, abs=1e-5)
    assert not bool(probs[logits == -math.inf].any())
    if sampling.top_k:
        assert int(probs.count_nonzero()) <= sampling.top_k
    if sampling.temperature == 0.0:
        assert int(probs.argmax()) == row.index(max(row)) or dtype == torch.bfloat16
        assert int(probs.count_nonzero()) == 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(values, min_size=5, max_size=5), min_size=1, max_size=4), params)
def test_a_row_alone_equals_the_row_in_a_batch(batch: list[list[float]], sampling: SamplingParams) -> None:
    """Verifier tree and single step must truncate alike, ties included."""
    batch = [row for row in batch if max(row) > -math.inf] or [[0.0] * 5]
    logits = torch.tensor(batch, dtype=torch.float64)
    together = logits_to_probs(logits[None], sampling)[0]
    for row, probs in zip(logits, together, strict=True):
        assert torch.equal(logits_to_probs(row, sampling), probs)


def test_ties_keep_exactly_k_tokens_the_first_ones() -> None:
    probs = logits_to_probs(torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]), SamplingParams(top_k=3))
    assert (probs > 0).tolist() == [False, True, True, False, True]
    assert logits_to_probs(torch.zeros(6), SamplingParams(top_k=2)).tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert logits_to_probs(torch.zeros(4), SamplingParams(top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]
    assert logits_to_probs(torch.zeros(4), SamplingParams(temperature=0.0)).tolist() == [1, 0, 0, 0]


def test_argmax_ties_in_a_wide_row_go_to_the_first() -> None:
    logits = torch.zeros(3, 50_001)
    logits[:, [17_000, 33_333, 50_000]] = 1.0
    assert logits_to_probs(logits, SamplingParams(temperature=0.0)).argmax(-1).tolist() == [17_000] * 3


def test_temperature_before_top_p() -> None:
    """At T = 1 the nucleus of mass .8 has two tokens, at T = .2 only one."""
    logits = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    assert int(logits_to_probs(logits, SamplingParams(top_p=0.8)).count_nonzero()) == 2
    assert int(logits_to_probs(logits, SamplingParams(temperature=0.2, top_p=0.8)).count_nonzero()) == 1


def test_top_p_is_taken_of_what_top_k_left() -> None:
    """(.4, .3, .2, .1) cut to two is (4/7, 3/7): .55 of that is one token, .55 of the whole is two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert int(logits_to_probs(logits, SamplingParams(top_k=2, top_p=0.55)).count_nonzero()) == 1
    assert int(logits_to_probs(logits, SamplingParams(top_p=0.55)).count_nonzero()) == 2


@pytest.mark.parametrize("guesses", [(), (1,), (2, 8)])
def test_the_fast_nucleus_equals_a_full_sort(guesses: tuple[int, ...], monkeypatch) -> None:
    logits = torch.randn(8, 40, dtype=torch.float64) * 2
    expected = logits_to_probs(logits, SamplingParams(top_p=0.9))
    monkeypatch.setattr(sampling_module, "_NUCLEUS_GUESSES", guesses)
    assert torch.equal(logits_to_probs(logits, SamplingParams(top_p=0.9)), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    for sampling in (SamplingParams(), SamplingParams(temperature=0.0)):
        with pytest.raises(SpecDiffError, match="logits"):
            logits_to_probs(torch.tensor([[0.0, 1.0], [bad, 0.0]]), sampling)
        with pytest.raises(SpecDiffError, match="masked"):
            logits_to_probs(torch.full((2,), -math.inf), sampling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
