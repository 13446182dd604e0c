"""First-error and chain credit, distribution matching for T > 0, and weighted sums of objectives."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from specdiff2.decoding.acceptance import make_rule
from specdiff2.evaluation.lossless_cases import fixed_table
from specdiff2.evaluation.losslessness import enumerate_outcomes, independent_drafts, speculative_round
from specdiff2.functional.streak import LOG_ZERO, log_overlap, reach, token_log_probs
from specdiff2.objectives import (
    AcceptanceLikelihood,
    Chain,
    CrossEntropy,
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
    part_names,
)
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import TrainConfig
from specdiff2.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def case():
    """Logits, targets (one undraftable), valid (one window cut short), probabilities with missing mass."""
    torch.manual_seed(0)
    logits = torch.randn((6, 4, 7), dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (6, 4))
    targets[2, 1] = -1
    valid = torch.ones((6, 4), dtype=torch.bool)
    valid[4, 2:] = False
    probs = torch.randn((6, 4, 9), dtype=torch.float64).mul(2.0).softmax(-1)[..., :7]
    return logits, targets, valid, probs


def gradient(objective, logits, targets, valid, probs=None):
    (result,) = torch.autograd.grad(objective(logits, targets, valid, probs).loss_sum, logits)
    return result


def draft_probs(logits):
    return logits.detach().softmax(-1)


# ---------------------------------------------------------------- block credit


def test_reach_is_survival_one_position_late(case):
    logits, targets, valid, _ = case
    log_probs = token_log_probs(logits, targets.masked_fill(~valid, -1)).detach()
    q = log_probs.exp()
    got = reach(log_probs, valid)
    for window in range(6):
        for position in range(4):
            expected = q[window, :position].prod() * valid[window, :position].all()
            torch.testing.assert_close(got[window, position], expected)


def test_first_error_credit_is_the_chance_that_the_streak_ends_there(case):
    """By enumeration of accept / reject at every position: P(first reject at i)."""
    logits, targets, valid, _ = case
    q = token_log_probs(logits, targets).exp().detach()[0]
    ends_at = torch.zeros(4, dtype=torch.float64)
    for accepted in itertools.product([True, False], repeat=4):
        probability = torch.stack([q[i] if ok else 1 - q[i] for i, ok in enumerate(accepted)]).prod()
        if not all(accepted):
            ends_at[accepted.index(False)] += probability
    log_probs = token_log_probs(logits, targets).detach()
    torch.testing.assert_close(FirstError(1.0).credit(log_probs, valid)[0] * 4, ends_at)
    torch.testing.assert_close(gradient(FirstError(0.0), *case), gradient(StreakCE(), *case))
    assert FirstError(3.0).credit(log_probs, valid)[0, 0] == pytest.approx((1 - q[0].item()) ** 3 / 4)


def test_first_error_leaves_solved_positions_alone_and_feeds_the_failing_one():
    logits = torch.zeros((1, 3, 4))
    logits[0, 0, 1] = logits[0, 2, 1] = 20.0  # solved, failing, solved
    logits[0, 1, 2] = 20.0
    credit = FirstError().credit(token_log_probs(logits, torch.ones((1, 3), dtype=torch.long)), torch.ones(1, 3).bool())
    assert credit[0].tolist() == pytest.approx([0.0, 1 / 3, 0.0], abs=1e-6)


def test_chain_is_the_sum_of_the_log_probabilities_of_all_prefixes(case):
    logits, targets, valid, _ = case
    output = Chain()(logits, targets, valid)
    q = token_log_probs(logits, targets)
    by_hand = 0.0
    for window in range(6):
        # an undraftable token is left out of every prefix that holds it
        terms = [q[window, k] if targets[window, k] >= 0 else q.new_zeros(()) for k in range(4) if valid[window, k]]
        by_hand = by_hand - sum(sum(terms[: j + 1]) for j in range(len(terms))) / 4
    torch.testing.assert_close(output.loss_sum, by_hand)
    torch.testing.assert_close(gradient(Chain(), *case), gradient(DPace(1.0), *case))
    assert Chain.name == "chain" and repr(Chain()) != repr(DPace(1.0))


# ---------------------------------------------------------------- distribution matching


def overlap(logits, probs):
    return torch.minimum(draft_probs(logits), probs).sum(-1)


def test_matching_values_by_hand(case):
    logits, _, valid, probs = case
    accept = overlap(logits, probs)
    torch.testing.assert_close(log_overlap(logits, probs).exp().detach(), accept)
    reached = torch.cat([torch.ones(6, 1), accept[:, :3]], dim=-1).cumprod(-1)
    tv = TotalVariation()(*case)
    torch.testing.assert_close(tv.loss_sum, ((1 - accept) * valid).sum())
    torch.testing.assert_close(TotalVariation(survival=True)(*case).loss_sum, ((1 - accept) * reached * valid).sum())
    torch.testing.assert_close(AcceptanceLikelihood()(*case).loss_sum, -(accept.log() * valid).sum() / 4)
    weighted = AcceptanceLikelihood(survival=True)(*case)
    torch.testing.assert_close(weighted.loss_sum, -(accept.log() * reached * valid).sum() / 4)
    survived = (reached * accept * valid).sum()
    torch.testing.assert_close(StreakExpected("min")(*case).loss_sum, -survived)
    assert tv.num_windows == 6


def test_matching_gradients(case):
    logits, targets, valid, probs = case
    for objective in (TotalVariation(), AcceptanceLikelihood(), StreakExpected("min")):
        loss = lambda x, o=objective: o(x, targets, valid, probs).loss_sum  # noqa: E731
        assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-7), objective
    # the survival weights are detached: the gradient of each position scaled, no credit to the ones before it
    weights = reach(overlap(logits, probs).log(), valid)
    (scaled,) = torch.autograd.grad(-(weights * log_overlap(logits, probs).expm1() * valid).sum(), logits)
    torch.testing.assert_close(gradient(TotalVariation(survival=True), *case), scaled)


def test_one_hot_verifier_gives_cross_entropy_and_its_mistakes(case):
    """T = 0: the overlap is q of the teacher's token."""
    logits, targets, valid, _ = case
    targets = targets.clamp(min=0)
    probs = functional.one_hot(targets, 7).double()
    ce = CrossEntropy()(logits, targets, valid)
    torch.testing.assert_close(AcceptanceLikelihood()(logits, targets, valid, probs).loss_sum, ce.loss_sum)
    q = token_log_probs(logits, targets).exp()
    torch.testing.assert_close(TotalVariation()(logits, targets, valid, probs).loss_sum, ((1 - q) * valid).sum())


@pytest.mark.parametrize("objective", [TotalVariation(), AcceptanceLikelihood(), StreakExpected("min")], ids=repr)
def test_the_verifiers_own_law_is_the_optimum(objective):
    torch.manual_seed(1)
    target_logits = torch.randn((3, 4, 6), dtype=torch.float64)
    probs = target_logits.softmax(-1)
    targets, valid = torch.zeros((3, 4), dtype=torch.long), torch.ones((3, 4), dtype=torch.bool)
    best = objective(target_logits, targets, valid, probs).loss_sum
    assert best.item() == pytest.approx(-12.0 if objective.name == "streak_expected" else 0.0, abs=1e-12)
    for seed in range(5):
        torch.manual_seed(seed)
        other = target_logits + 0.3 * torch.randn_like(target_logits)
        assert objective(other, targets, valid, probs).loss_sum > best + 0.01
    # inner products have another optimum: the mode, not the law
    inner = StreakExpected("all")
    sharp = inner(target_logits * 3, targets, valid, probs).loss_sum
    assert sharp < inner(target_logits, targets, valid, probs).loss_sum


def test_missing_mass_cannot_be_matched():
    """Half of the verifier's mass lies outside the draft vocabulary; one position has none inside."""
    probs = torch.tensor([[[0.3, 0.2], [0.0, 0.0]]], dtype=torch.float64)
    targets, valid = torch.tensor([[0, -1]]), torch.ones((1, 2), dtype=torch.bool)
    logits = torch.tensor([[[3.0, 2.0], [1.0, 0.0]]], dtype=torch.float64).log().nan_to_num(neginf=-50).requires_grad_()
    tv = TotalVariation()(logits, targets, valid, probs)
    assert tv.loss_sum.item() == pytest.approx(0.5 + 1.0)  # q above p everywhere: 1 - 0.5, and nothing to match
    lk = AcceptanceLikelihood()(logits, targets, valid, probs)
    assert lk.loss_sum.item() == pytest.approx(torch.tensor(2.0).log().item() / 2)  # -log 0.5 over gamma = 2
    assert AcceptanceLikelihood(survival=True)(logits, targets, valid, probs).loss_sum.item() == pytest.approx(
        lk.loss_sum.item()
    )
    (got,) = torch.autograd.grad(lk.loss_sum, logits)
    assert torch.isfinite(got).all() and got[0, 1].abs().max() == 0
    assert log_overlap(logits, probs)[0, 1] < LOG_ZERO + 2


def test_lk_gradient_of_a_cold_drafter_survives_where_tv_has_none():
    """q puts e^-40 on the verifier's token: below float32's resolution beside 1, still a full gradient for lk."""
    logits = torch.tensor([[[40.0, 0.0, 0.0]]], requires_grad=True)
    probs = torch.tensor([[[0.0, 1.0, 0.0]]])
    targets, valid = torch.tensor([[1]]), torch.ones((1, 1), dtype=torch.bool)
    assert gradient(AcceptanceLikelihood(), logits, targets, valid, probs)[0, 0, 1] == pytest.approx(-1.0)
    assert gradient(TotalVariation(), logits, targets, valid, probs).abs().max() < 1e-12


def test_min_factors_are_the_expected_streak_of_the_ratio_rule():
    """Against the shipped rule, every random branch enumerated: p and q that do not depend on the path."""
    p, q = (0.2, 0.5, 0.3), (0.6, 0.1, 0.3)
    for gamma in (1, 2, 3):
        propose = independent_drafts(torch.tensor([q] * gamma), gamma, 1)
        outcomes = enumerate_outcomes(
            lambda rng, propose=propose: len(
                speculative_round(make_rule("leviathan"), None, fixed_table(p), propose, (), rng)[1].path
            )
        )
        expected = sum(streak * mass for streak, mass in outcomes.items())
        logits = torch.tensor([[q] * gamma], dtype=torch.float64).log()
        inputs = (torch.zeros((1, gamma), dtype=torch.long), torch.ones((1, gamma), dtype=torch.bool))
        probs = torch.tensor([[p] * gamma], dtype=torch.float64)
        assert -StreakExpected("min")(logits, *inputs, probs).loss_sum.item() == pytest.approx(expected, abs=1e-6)
        assert abs(-StreakExpected("all")(logits, *inputs, probs).loss_sum.item() - expected) > 1e-2


@pytest.mark.parametrize("objective", [TotalVariation(), AcceptanceLikelihood(), StreakExpected("min")], ids=repr)
def test_matching_without_probabilities_is_refused(objective, case):
    with pytest.raises(ConfigError, match=f"objective {objective.name}: verifier_probs=None"):
        objective(*case[:3])


# ---------------------------------------------------------------- weighted sums

MIX = Weighted({"streak": Part(Streak()), "ce": Part(CrossEntropy(0.8), 0.2), "tv": Part(TotalVariation(), 0.5)})


def test_weighted_sum_of_values_gradients_and_parts(case):
    output = MIX(*case)
    apart = {"streak": Streak()(*case), "ce": CrossEntropy(0.8)(*case), "tv": TotalVariation()(*case)}
    total = apart["streak"].loss_sum + 0.2 * apart["ce"].loss_sum + 0.5 * apart["tv"].loss_sum
    torch.testing.assert_close(output.loss_sum, total)
    assert list(output.parts) == ["streak", "ce", "tv"]
    for name, part in apart.items():
        torch.testing.assert_close(output.parts[name], part.loss_sum.detach())
        assert not output.parts[name].requires_grad
    gradients = gradient(Streak(), *case) + 0.2 * gradient(CrossEntropy(0.8), *case)
    torch.testing.assert_close(gradient(MIX, *case), gradients + 0.5 * gradient(TotalVariation(), *case))
    torch.testing.assert_close(output.streak, apart["streak"].streak)
    assert not apart["streak"].parts


def test_a_window_counts_when_any_part_trains_on_it(case):
    logits, targets, valid, probs = case
    targets = targets.clone()
    targets[3] = -1  # the teacher's tokens cannot be drafted, others can still be accepted
    ce = Weighted({"ce": Part(CrossEntropy())})
    assert ce(logits, targets, valid, probs).num_windows == 5
    assert MIX(logits, targets, valid, probs).num_windows == 6


def test_weight_zero_only_reports(case):
    watched = Weighted({"streak": Part(Streak()), "ce": Part(CrossEntropy(), 0.0)})
    torch.testing.assert_close(gradient(watched, *case), gradient(Streak(), *case))
    torch.testing.assert_close(watched(*case).parts["ce"], CrossEntropy()(*case).loss_sum.detach())


def test_description_and_needs():
    assert MIX.needs_verifier_probs and MIX.masking == "full"
    plain = Weighted({"streak": Part(Streak(), 1.0), "ce": Part(CrossEntropy(0.8), 0.2)})
    assert not plain.needs_verifier_probs and plain.name == "streak+ce"
    assert Weighted({"mdm": Part(Mdm())}).masking == "random"
    assert part_names(plain) == ("streak", "ce") and part_names(Streak()) == ()
    schedule = ObjectiveSchedule([Stage(CrossEntropy(), 3), Stage(plain)])
    assert schedule.describe()[1] == {
        "name": "streak+ce",
        "objective": "Weighted(streak=1.0 * Streak(), ce=0.2 * CrossEntropy(decay=0.8))",
        "steps": None,
    }
    assert ObjectiveSchedule.single(MIX).needs_verifier_probs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weighted({}), "at least one part"),
        (lambda: Weighted({"prefix": Part(Streak())}), "'prefix'"),
        (lambda: Weighted({"my loss": Part(Streak())}), "'my loss'"),
        (lambda: Weighted({"streak": Streak()}), "specdiff2.objectives.Part"),
        (lambda: Weighted({"inner": Part(MIX)}), "a sum itself"),
        (lambda: Weighted({"streak": Part(Streak(), 0.0)}), "all weights are 0"),
        (lambda: Weighted({"streak": Part(Streak()), "mdm": Part(Mdm())}), "masking"),
        (lambda: Part(Streak(), -0.1), "weight=-0.1"),
        (lambda: Part(Streak(), float("nan")), "weight=nan"),
    ],
)
def test_bad_sums_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---------------------------------------------------------------- YAML


def from_yaml(tmp_path, *overrides):
    config = build.check(build.load_config(CONF, "train", list(overrides), tmp_path), TrainConfig)
    return build.instantiate(config["objective"])


def test_a_sum_from_yaml_and_changed_on_the_command_line(tmp_path):
    lk = "{_target_: specdiff2.objectives.AcceptanceLikelihood}"
    lk = f"{{_target_: specdiff2.objectives.Part, weight: 0.5, objective: {lk}}}"
    plain = from_yaml(tmp_path, "objective=mix")
    assert repr(plain.stages[-1].objective) == "Weighted(streak=1.0 * Streak(), ce=0.2 * CrossEntropy(decay=0.8))"
    assert not plain.needs_verifier_probs
    changed = from_yaml(tmp_path, "objective=mix", "objective.main.parts.ce.weight=0", f"+objective.main.parts.lk={lk}")
    assert repr(changed.stages[-1].objective) == (
        "Weighted(streak=1.0 * Streak(), ce=0 * CrossEntropy(decay=0.8), lk=0.5 * AcceptanceLikelihood(survival=False))"
    )
    assert changed.needs_verifier_probs and changed.stages[0].objective.name == "ce"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("first_error", "FirstError(focus=1.0)"),
        ("chain", "Chain(alpha=1.0)"),
        ("tv", "TotalVariation(survival=True)"),
        ("lk", "AcceptanceLikelihood(survival=False)"),
    ],
)
def test_single_members_from_yaml(tmp_path, name, expected):
    assert repr(from_yaml(tmp_path, f"objective={name}").stages[-1].objective) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+objective.main.parts.ce.weigth=1", "did you mean 'objective.main.parts.ce.weight'"),
        ("objective.main.parts.ce.weight=much", "objective.main.parts.ce.weight='much'"),
        ("objective.main.parts.ce.weight=-1", "weight=-1"),
        ("+objective.main.parts.ce.objective.decays=1", "objective.main.parts.ce.objective.decays"),
    ],
)
def test_slips_in_a_sum_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        from_yaml(tmp_path, "objective=mix", override)
