"""Objectives: values by hand, gradients, limits, and inputs with nothing to train on."""

import itertools

import pytest
import torch
from torch.nn import functional

from specdiff2.functional.streak import credit_weights, expected_streak, token_log_probs
from specdiff2.objectives import (
    AcceptanceLikelihood,
    ARDistill,
    Chain,
    CrossEntropy,
    DistillSpec,
    DPace,
    FirstError,
    Mdm,
    ObjectiveSchedule,
    Part,
    Stage,
    Streak,
    StreakCE,
    StreakExpected,
    TotalVariation,
    Weighted,
)
from specdiff2.types import ConfigError

ALL = [
    CrossEntropy(),
    CrossEntropy(decay=0.7),
    Mdm(),
    Streak(),
    StreakCE(),
    DPace(),
    StreakExpected(),
    StreakExpected(factors="last"),
    StreakExpected(factors="min"),
    FirstError(focus=0.5),
    Chain(),
    ARDistill(),
    DistillSpec(),
    TotalVariation(),
    TotalVariation(survival=True),
    AcceptanceLikelihood(),
    Weighted({"streak": Part(Streak()), "ce": Part(CrossEntropy(0.8), 0.2), "lk": Part(AcceptanceLikelihood(), 0.1)}),
]


@pytest.fixture
def case():
    torch.manual_seed(0)
    logits = torch.randn((6, 4, 7), dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (6, 4))
    valid = torch.ones((6, 4), dtype=torch.bool)
    valid[4, 2:] = False
    return logits, targets, valid


def gradient(objective, logits, targets, valid, probs=None):
    (result,) = torch.autograd.grad(objective(logits, targets, valid, probs).loss_sum, logits)
    return result


def weighted_ce_gradient(weights, logits, targets, valid):
    """-sum of fixed weights times log q, by plain autograd."""
    log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    (result,) = torch.autograd.grad(-(weights * log_probs * valid).sum(), logits)
    return result


def test_streak_value_and_block_credit_gradient(case):
    logits, targets, valid = case
    output = Streak()(logits, targets, valid)
    log_probs = token_log_probs(logits, targets)
    torch.testing.assert_close(output.loss_sum, -expected_streak(log_probs, valid).sum())
    torch.testing.assert_close(output.streak, expected_streak(log_probs, valid).detach())
    weights = credit_weights(log_probs, valid)
    torch.testing.assert_close(gradient(Streak(), *case), weighted_ce_gradient(weights, *case))
    assert torch.autograd.gradcheck(lambda x: Streak()(x, targets, valid).loss_sum, (logits,), eps=1e-6, atol=1e-8)


def test_cross_entropy_uniform_is_the_mean_over_gamma(case):
    logits, targets, valid = case
    per_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(6, 4)
    torch.testing.assert_close(CrossEntropy()(*case).loss_sum, (per_token * valid).sum() / 4)
    decayed = per_token * valid * torch.tensor([1.0, 0.5, 0.25, 0.125]) / 1.875
    torch.testing.assert_close(CrossEntropy(decay=0.5)(*case).loss_sum, decayed.sum())


def test_streak_ce_weights_are_detached_survival(case):
    logits, targets, _ = case
    probs = token_log_probs(logits, targets).exp().detach()
    reached = torch.cat([torch.ones(6, 1), probs[:, :3]], -1).cumprod(-1) / 4
    torch.testing.assert_close(gradient(StreakCE(), *case), weighted_ce_gradient(reached, *case))


def test_dpace_limits(case):
    """alpha=0: the streak's own gradient over gamma; alpha=1: fixed linear weights, whatever the drafter says."""
    logits, targets, valid = case
    torch.testing.assert_close(gradient(DPace(0.0), *case), gradient(Streak(), *case) / 4)
    linear = torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(6, 4).clone()
    linear[4] = torch.tensor([2.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(gradient(DPace(1.0), *case), weighted_ce_gradient(linear / 4, *case))
    probs = token_log_probs(logits, targets).exp().detach()
    smooth = credit_weights((0.5 * probs + 0.5).log(), valid) / 4
    torch.testing.assert_close(gradient(DPace(0.5), *case), weighted_ce_gradient(smooth, *case))


def test_mdm_weights_by_inverse_mask_ratio(case):
    logits, targets, _ = case
    masked = torch.zeros((6, 4), dtype=torch.bool)
    masked[0, 1] = True
    masked[1, [0, 3]] = True
    masked[2] = True
    per_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(6, 4)
    by_hand = per_token[0, 1] + per_token[1, [0, 3]].mean() + per_token[2].mean()
    output = Mdm()(logits, targets, masked)
    torch.testing.assert_close(output.loss_sum, by_hand)
    assert output.num_windows == 3
    assert Mdm.masking == "random" and CrossEntropy.masking == Streak.masking == "full"


@pytest.mark.parametrize("factors", ["all", "last", "min"])
def test_streak_expected_equals_streak_for_one_hot_verifier(case, factors):
    probs = functional.one_hot(case[1], 7).double()
    objective = StreakExpected(factors=factors)
    torch.testing.assert_close(objective(*case, probs).loss_sum, Streak()(*case).loss_sum)
    torch.testing.assert_close(gradient(objective, *case, probs), gradient(Streak(), *case))


def test_streak_expected_over_all_teacher_paths():
    """Mean over teacher paths x ~ p: exactly the expected streak with factors=last; another number with all."""
    torch.manual_seed(2)
    vocab, gamma = 3, 3
    logits = torch.randn((1, gamma, vocab), dtype=torch.float64)
    law = {
        path: torch.rand(vocab, dtype=torch.float64)
        for n in range(gamma)
        for path in itertools.product(range(vocab), repeat=n)
    }
    law = {path: probs / probs.sum() for path, probs in law.items()}
    means = dict.fromkeys(["streak", "last", "all"], 0.0)
    objectives = {"streak": Streak(), "last": StreakExpected("last"), "all": StreakExpected("all")}
    for path in itertools.product(range(vocab), repeat=gamma):
        probs = torch.stack([law[path[:k]] for k in range(gamma)])[None]
        weight = torch.stack([law[path[:k]][path[k]] for k in range(gamma)]).prod().item()
        for name, objective in objectives.items():
            output = objective(logits, torch.tensor([path]), torch.ones((1, gamma), dtype=torch.bool), probs)
            means[name] -= weight * output.loss_sum.item()
    assert abs(means["last"] - means["streak"]) < 1e-12
    assert abs(means["all"] - means["streak"]) > 1e-4


def test_streak_expected_finite_where_verifier_gives_zero():
    logits = torch.randn((2, 5, 4), requires_grad=True)
    probs = torch.zeros((2, 5, 4))
    probs[0] = 0.25
    objective = StreakExpected()
    targets, valid = torch.zeros((2, 5), dtype=torch.long), torch.ones((2, 5), dtype=torch.bool)
    objective(logits, targets, valid, probs).loss_sum.backward()
    assert torch.isfinite(logits.grad).all()
    with pytest.raises(ConfigError, match="verifier_probs"):
        objective(logits, targets, valid)


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_perfect_drafter_is_the_optimum(objective):
    """Case 21 at the objective: one-hot on the true token is the best value, one position off is not."""
    targets = torch.tensor([[1, 2, 3, 4], [0, 5, 2, 1]])
    valid = torch.ones((2, 4), dtype=torch.bool)
    right = functional.one_hot(targets, 6) * 60.0
    probs = functional.one_hot(targets, 6).float()
    best = objective(right, targets, valid, probs)
    shifted = objective(right.roll(1, dims=1), targets, valid, probs)
    optimum = {"streak": -8.0, "streak_expected": -8.0, "streak+ce+lk": -8.0, "distillspec": -2.0}.get(
        objective.name, 0.0
    )
    assert abs(best.loss_sum.item() - optimum) < 1e-5
    assert best.streak.tolist() == [4.0, 4.0]
    # weighed by survival, or as a mean of positions, a window loses 1 at most
    gap = 1.9 if getattr(objective, "survival", False) or objective.name == "distillspec" else 5
    assert shifted.loss_sum > best.loss_sum + gap and shifted.streak.max() < 0.1


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_nothing_to_train_on(objective):
    """Case 23: no window, no valid position, no draftable target: zero loss and gradient, nothing counted."""
    probs = torch.full((3, 4, 5), 0.2)
    for targets, valid in [
        (torch.full((3, 4), -1), torch.ones((3, 4), dtype=torch.bool)),
        (torch.randint(5, (3, 4)), torch.zeros((3, 4), dtype=torch.bool)),
        (torch.zeros((0, 4), dtype=torch.long), torch.zeros((0, 4), dtype=torch.bool)),
    ]:
        logits = torch.randn((len(targets), 4, 5), requires_grad=True)
        output = objective(logits, targets, valid, probs[: len(targets)])
        output.loss_sum.backward()
        assert torch.isfinite(logits.grad).all() and torch.isfinite(output.loss_sum)
        if not objective.needs_verifier_probs or not valid.any():  # with its probabilities any token may be accepted
            assert output.loss_sum == 0 and output.num_windows == 0
            assert logits.grad.numel() == 0 or logits.grad.abs().max() == 0
        assert output.streak.shape == (len(targets),) and not output.streak.any()


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_sums_add_up_over_micro_batches(objective, case):
    """Case 22 at the objective: windows split in any way give the same sum, count and gradient."""
    logits, targets, valid = case
    probs = torch.rand((6, 4, 7), dtype=torch.float64)
    whole = objective(logits, targets, valid, probs)
    parts = [objective(logits[s], targets[s], valid[s], probs[s]) for s in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(whole.loss_sum, parts[0].loss_sum + parts[1].loss_sum)
    for name, part_sum in whole.parts.items():
        torch.testing.assert_close(part_sum, parts[0].parts[name] + parts[1].parts[name])
    assert whole.num_windows == parts[0].num_windows + parts[1].num_windows == 6


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_tiny_probabilities_stay_finite_at_gamma_64(objective):
    logits = torch.zeros((2, 64, 8))
    logits[..., 0] = 90.0
    logits.requires_grad_()
    probs = torch.zeros((2, 64, 8))
    probs[..., 1] = 1.0
    output = objective(logits, torch.ones((2, 64), dtype=torch.long), torch.ones((2, 64), dtype=torch.bool), probs)
    output.loss_sum.backward()
    assert torch.isfinite(output.loss_sum) and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: CrossEntropy(0.0),
        lambda: CrossEntropy(1.5),
        lambda: DPace(-0.1),
        lambda: DPace(float("nan")),
        lambda: StreakExpected("some"),
        lambda: FirstError(-1.0),
        lambda: FirstError(float("inf")),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match="objective"):
        make()


def test_schedule():
    schedule = ObjectiveSchedule([Stage(CrossEntropy(), 3, name="warm-up"), Stage(Streak())])
    assert [schedule.stage_at(step).label for step in (0, 2, 3, 99)] == ["warm-up", "warm-up", "streak", "streak"]
    assert schedule.warmup_steps == 3 and ObjectiveSchedule.single(Streak()).warmup_steps == 0
    assert not schedule.needs_verifier_probs and not schedule.needs_random_masks
    assert ObjectiveSchedule.single(StreakExpected()).needs_verifier_probs
    assert ObjectiveSchedule([Stage(Mdm(), 1), Stage(Streak())]).needs_random_masks
    assert schedule.describe()[0] == {"name": "warm-up", "objective": "CrossEntropy(decay=1.0)", "steps": 3}
    for stages in ([], [Stage(CrossEntropy()), Stage(Streak())]):
        with pytest.raises(ConfigError):
            ObjectiveSchedule(stages)
    with pytest.raises(ConfigError, match="steps"):
        Stage(Streak(), 0)


def test_ar_distill_is_the_cross_entropy_of_the_first_position(case):
    logits, targets, _ = case
    first = functional.cross_entropy(logits[:, 0], targets[:, 0], reduction="sum")
    torch.testing.assert_close(ARDistill()(*case).loss_sum, first)
    assert not gradient(ARDistill(), *case)[:, 1:].any()


def test_distillspec_is_the_mean_of_the_positions_without_products(case):
    logits, targets, valid = case
    q = logits.softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(DistillSpec()(*case).loss_sum, -(q * valid).sum() / 4)
    undraftable = targets.clone()
    undraftable[0, 0] = -1  # counts as 0; the streak would lose the whole window, the mean loses one position
    expected = -(q * valid)[1:].sum() / 4 - q[0, 1:].sum() / 4
    torch.testing.assert_close(DistillSpec()(logits, undraftable, valid).loss_sum, expected)
