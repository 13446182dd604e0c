"""Streak mathematics against hand-computed numbers, float64 autograd and finite differences."""

import torch

from specdiff2.functional.streak import (
    LOG_ZERO,
    acceptance_sums,
    credit_weights,
    curves_from_sums,
    expected_streak,
    survival,
    token_log_probs,
)


def plain_streak(probs: list[float], valid: list[bool]) -> float:
    """The definition, in Python floats."""
    total, product = 0.0, 1.0
    for prob, is_valid in zip(probs, valid, strict=True):
        if not is_valid:
            break
        product *= prob
        total += product
    return total


def test_two_windows_by_hand():
    """Products per window, then the mean: 1.375. A product of per-position means gives 0.75 + 0.5625 instead."""
    probs = torch.tensor([[1.0, 1.0], [0.5, 0.5]])
    valid = torch.ones(2, 2, dtype=torch.bool)
    streaks = expected_streak(probs.log(), valid)
    torch.testing.assert_close(streaks, torch.tensor([2.0, 0.75]))
    assert streaks.mean().item() == 1.375
    wrong = probs.mean(0).cumprod(0).sum().item()
    assert abs(wrong - 1.3125) < 1e-6 and wrong != streaks.mean().item()


def test_stops_at_first_invalid_position():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand((200, 6), generator=generator)
    valid = torch.rand((200, 6), generator=generator) < 0.8
    expected = [plain_streak(p, v) for p, v in zip(probs.tolist(), valid.tolist(), strict=True)]
    torch.testing.assert_close(expected_streak(probs.log(), valid), torch.tensor(expected))
    assert survival(probs.log(), valid)[~valid].abs().max() == 0


def test_credit_is_the_gradient_by_log_prob():
    log_probs = torch.rand((5, 8), dtype=torch.float64).log().requires_grad_()
    valid = torch.ones(5, 8, dtype=torch.bool)
    valid[1, 3:] = False
    valid[2] = False
    (gradient,) = torch.autograd.grad(expected_streak(log_probs, valid).sum(), log_probs)
    torch.testing.assert_close(gradient, credit_weights(log_probs, valid))
    assert not credit_weights(log_probs, valid).requires_grad


def test_gradient_through_logits_against_finite_differences():
    torch.manual_seed(1)
    logits = torch.randn((2, 3, 5), dtype=torch.float64, requires_grad=True)
    targets = torch.randint(5, (2, 3))
    valid = torch.tensor([[True, True, True], [True, True, False]])

    def streak(values):
        return expected_streak(token_log_probs(values, targets), valid)

    assert torch.autograd.gradcheck(streak, (logits,), eps=1e-6, atol=1e-8)
    (exact,) = torch.autograd.grad(streak(logits).sum(), logits)
    single = logits.detach().float().requires_grad_()
    (rounded,) = torch.autograd.grad(streak(single).sum(), single)
    torch.testing.assert_close(rounded.double(), exact, atol=1e-6, rtol=1e-5)


def test_gamma_64_with_tiny_probabilities_stays_finite():
    logits = torch.zeros((3, 64, 10))
    logits[..., 0] = 80.0  # the targets have probability 1e-35 each; their product underflows long before position 64
    logits[2, :, 1] = 200.0  # and here they are likely
    logits.requires_grad_()
    targets = torch.ones((3, 64), dtype=torch.long)
    targets[1] = -1
    valid = torch.ones((3, 64), dtype=torch.bool)
    streaks = expected_streak(token_log_probs(logits, targets), valid)
    streaks.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert streaks.dtype == torch.float32
    torch.testing.assert_close(streaks, torch.tensor([0.0, 0.0, 64.0]))


def test_undraftable_target_ends_the_streak():
    logits = torch.randn((1, 4, 6), requires_grad=True)
    targets = torch.tensor([[2, 3, -1, 1]])
    valid = torch.ones((1, 4), dtype=torch.bool)
    log_probs = token_log_probs(logits, targets)
    assert log_probs[0, 2].item() == LOG_ZERO
    survived = survival(log_probs, valid)[0]
    assert survived[1] > 0 and survived[2] == 0 and survived[3] == 0
    expected_streak(log_probs, valid).sum().backward()
    assert logits.grad[0, 2:].abs().max() == 0 and logits.grad[0, :2].abs().max() > 0
    assert torch.isfinite(
        token_log_probs(torch.full((1, 1, 3), float("-inf")).index_fill(2, torch.tensor([0]), 0.0), torch.tensor([[1]]))
    ).all()


def test_bfloat16_logits_are_widened():
    logits = torch.randn((4, 8, 30))
    targets = torch.randint(30, (4, 8))
    valid = torch.ones((4, 8), dtype=torch.bool)
    wide = expected_streak(token_log_probs(logits.bfloat16().float(), targets), valid)
    torch.testing.assert_close(expected_streak(token_log_probs(logits.bfloat16(), targets), valid), wide)


def test_curves_by_hand_with_booleans():
    accept = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    curves = curves_from_sums(acceptance_sums(accept, valid))
    # reached: 4, 3 (window 2 failed at 1), 1 (window 1 failed at 2, window 3 ends); survived: 3, 2, 1
    assert curves.accept_rate == [3 / 4, 2 / 3, 1.0]
    assert curves.survival == [3 / 4, 2 / 4, 1 / 3]
    assert curves.mean_streak == (3 + 1 + 0 + 2) / 4
    assert curves.num_windows == 4


def test_curves_of_probabilities_match_streak_and_add_up():
    generator = torch.Generator().manual_seed(3)
    accept = torch.rand((50, 5), generator=generator, dtype=torch.float64)
    valid = torch.arange(5) < torch.randint(1, 6, (50, 1), generator=generator)
    whole = acceptance_sums(accept, valid)
    parts = acceptance_sums(accept[:13], valid[:13]) + acceptance_sums(accept[13:], valid[13:])
    torch.testing.assert_close(whole, parts)
    curves = curves_from_sums(whole)
    assert abs(curves.mean_streak - expected_streak(accept.log(), valid).mean().item()) < 1e-12
    alive = valid.all(-1)
    full = curves_from_sums(acceptance_sums(accept[alive], valid[alive]))
    product = 1.0
    for rate, survived in zip(full.accept_rate, full.survival, strict=True):
        product *= rate
        assert abs(product - survived) < 1e-12  # equal windows: survival is the product of conditional rates


def test_curves_of_nothing_are_none_not_nan():
    empty = curves_from_sums(acceptance_sums(torch.zeros((0, 3)), torch.zeros((0, 3), dtype=torch.bool)))
    assert empty.accept_rate == [None] * 3 and empty.survival == [None] * 3 and empty.mean_streak is None
    never = curves_from_sums(acceptance_sums(torch.zeros((2, 2)), torch.ones((2, 2), dtype=torch.bool)))
    assert never.accept_rate == [0.0, None] and never.survival == [0.0, 0.0] and never.mean_streak == 0.0
