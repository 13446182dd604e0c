"""The seeded random source: reproducible, strict, never a token of probability zero."""

from __future__ import annotations

import pytest
import torch

from specdiff2.rng import TorchRandomSource


def draws(seed: int):
    rng = TorchRandomSource(seed)
    probs = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])
    return (
        [rng.bernoulli(0.5) for _ in range(20)],
        [rng.categorical(probs[0]) for _ in range(20)],
        rng.chains(probs, 20).tolist(),
    )


def test_same_seed_same_draws() -> None:
    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    first = draws(0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert draws(0) == first


def test_chains_shape_and_independence_of_order() -> None:
    tokens = TorchRandomSource(0).chains(torch.full((4, 7), 1 / 7), 3)
    assert tokens.shape == (3, 4)
    assert tokens.dtype == torch.long
    assert tokens.is_contiguous()


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_extreme_uniforms_pick_a_token_with_mass(u: float, monkeypatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, u, dtype=torch.float64))
    rng = TorchRandomSource(0)
    assert rng.categorical(torch.tensor([0.0, 0.3, 0.7, 0.0, 0.0])) == (1 if u == 0.0 else 2)
    assert rng.categorical(torch.tensor([0.0, 0.0, 1.0])) == 2
    assert rng.categorical(torch.tensor([1.0, 0.0, 0.0])) == 0
    assert rng.bernoulli(0.0) is False
    assert rng.bernoulli(1.0) is (u < 1.0)


def test_frequencies() -> None:
    """20,000 draws: a standard error of 0.0035 at most, so 0.02 is more than five of them."""
    probs = torch.tensor([[0.2, 0.3, 0.5], [7.0, 2.0, 1.0]])  # the second row is not normalised
    tokens = TorchRandomSource(0).chains(probs, 20_000)
    for position, expected in enumerate(probs / probs.sum(-1, keepdim=True)):
        seen = torch.bincount(tokens[:, position], minlength=3) / 20_000
        assert float((seen - expected).abs().max()) < 0.02
    joint = ((tokens[:, 0] == 2) & (tokens[:, 1] == 0)).double().mean()
    assert float(joint) == pytest.approx(0.35, abs=0.02)  # positions are independent
    rng = TorchRandomSource(1)
    assert sum(rng.bernoulli(0.3) for _ in range(20_000)) / 20_000 == pytest.approx(0.3, abs=0.02)


def test_a_wide_float32_row_never_yields_an_impossible_token() -> None:
    probs = torch.zeros(50_000)
    probs[::7] = torch.rand(probs[::7].shape) * 1e-6
    tokens = TorchRandomSource(0).chains(probs[None], 5_000).flatten()
    assert bool((probs[tokens] > 0).all())


@pytest.mark.parametrize("row", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_what_is_no_law_is_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot draw"):
        TorchRandomSource(0).categorical(torch.tensor(row))
    with pytest.raises(ValueError, match="cannot draw"):
        TorchRandomSource(0).chains(torch.tensor([[0.5, 0.5], row]), 2)
