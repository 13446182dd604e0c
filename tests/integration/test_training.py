"""DistillationModule with the shipped drafter, collator, data module and decoder."""

import dataclasses
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from helpers import reference_greedy, tiny_verifier
from tiny_training import GAMMA, VOCAB, language, make_drafter, make_module, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.windows import WindowCollator
from specdiff2.decoding.acceptance import make_rule
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.functional.streak import curves_from_sums
from specdiff2.objectives import CrossEntropy, DPace, Mdm, ObjectiveSchedule, Stage, Streak, StreakCE, StreakExpected
from specdiff2.rng import TorchRandomSource
from specdiff2.training.callbacks import DecodingProbe, StreakMonitor
from specdiff2.training.callbacks.streak_monitor import batch_sums
from specdiff2.training.module import DistillationModule
from specdiff2.types import ConfigError, Draft, Rollout, SpecDiffError, WindowBatch

CE = ObjectiveSchedule.single(CrossEntropy())


def collate(rollouts, windows_per_rollout=100, masking="full", key=(0, 0)):
    return WindowCollator(GAMMA, windows_per_rollout, masking)(rollouts, key)


def batches(*groups):
    return DataLoader([collate(group) for group in groups], batch_size=None)


def empty_batch(like: WindowBatch) -> WindowBatch:
    none = dataclasses.replace(like)
    for name in ("window_row", "anchor", "targets", "valid", "revealed"):
        setattr(none, name, getattr(like, name)[:0])
    return none


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# ---------------------------------------------------------------- learning, every objective, both precisions


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_warmup_then_streak_learns(tmp_path, precision):
    schedule = ObjectiveSchedule([Stage(CrossEntropy(), 20), Stage(Streak())])
    module = make_module(schedule, partial(torch.optim.AdamW, lr=1e-2))
    data = RolloutDataModule(language([16] * 2), gamma=GAMMA, batch_size=2, windows_per_rollout=16)
    streaks = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            streaks.append(float(trainer.callback_metrics["train/streak"]))

    trainer = make_trainer(tmp_path, max_steps=40, precision=precision, gradient_clip_val=1.0, callbacks=[Watch()])
    trainer.fit(module, data)
    assert streaks[0] < 0.3 and streaks[20] > 0.8 and streaks[-1] > streaks[20] + 0.3, streaks
    assert module.drafter.mask_embedding.dtype == torch.float32


@pytest.mark.parametrize("objective", [Mdm(), StreakCE(), DPace(), StreakExpected(), StreakExpected("last")], ids=repr)
def test_every_objective_trains_through_the_module(tmp_path, objective):
    module = make_module(ObjectiveSchedule.single(objective))
    data = RolloutDataModule(language([6, 3, 9]), gamma=GAMMA, batch_size=2, windows_per_rollout=3, masking="random")
    before = state(module)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, data)
    after = state(module)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert ("train/streak" in trainer.callback_metrics) == (objective.masking == "full")


def test_full_mask_objectives_never_see_revealed_tokens(tmp_path):
    module = make_module(CE)
    batch = collate(language([12, 12]), masking="random")
    assert batch.revealed.any()
    hidden = dataclasses.replace(batch, revealed=torch.zeros_like(batch.revealed))
    shown, masked = (module.objective_output(item, CrossEntropy()).loss_sum for item in (batch, hidden))
    torch.testing.assert_close(shown, masked)
    assert module.objective_output(batch, Mdm()).num_windows == batch.num_windows


def test_streak_expected_needs_a_verifier():
    _, drafter = make_drafter()
    with pytest.raises(ConfigError, match="verifier"):
        DistillationModule(drafter, None, ObjectiveSchedule.single(StreakExpected()), torch.optim.SGD)


# ---------------------------------------------------------------- case 21


class ReadsAhead(nn.Module):
    """Logits one-hot on the token ``shift`` after the true one, read from the rollout itself, not from the targets."""

    def __init__(self, text: list[int], shift: int = 0) -> None:
        super().__init__()
        self.gamma, self.text, self.shift = GAMMA, text, shift
        self.scale = nn.Parameter(torch.tensor(80.0))
        self.register_buffer("draft_vocab_ids", torch.arange(VOCAB))

    def forward(self, batch):
        position = batch.anchor[:, None] + 1 + torch.arange(GAMMA) + self.shift
        position = position.clamp(max=batch.input_ids.shape[1] - 1)
        return nn.functional.one_hot(batch.input_ids[batch.window_row[:, None], position], VOCAB) * self.scale

    def to_draft_vocab(self, tokens):
        return tokens

    def start(self, prompt, sampling, max_new_tokens):
        return ReadsAheadSession(self, list(prompt))


class ReadsAheadSession:
    def __init__(self, drafter, tokens):
        self.drafter, self.tokens = drafter, tokens

    def propose(self, gamma, num_drafts, rng, *, needs_probs):
        start = len(self.tokens) + self.drafter.shift
        return Draft(torch.tensor([self.drafter.text[start : start + gamma]]).expand(num_drafts, -1))

    def observe(self, tokens, features=None):
        self.tokens.extend(tokens)


def test_perfect_stub_is_optimal_in_training_and_in_decoding():
    verifier = tiny_verifier(VOCAB, eos_ids=[])
    prompt = [5, 9, 2]
    text = prompt + reference_greedy(verifier.model, prompt, 40)
    rollout = Rollout("r", prompt, text[3:23], 0.0)  # 20 tokens: the last windows are cut short
    batch = collate([rollout])
    decoder_of = partial(SpeculativeDecoder, verifier, rule=make_rule("greedy"))
    results = {}
    for shift in (0, 1):
        drafter = ReadsAhead(text, shift)
        module = make_module(ObjectiveSchedule.single(Streak()), verifier=verifier, drafter=drafter)
        streak_output = module.objective_output(batch, Streak())
        ce_output = module.objective_output(batch, CrossEntropy())
        generation = decoder_of(drafter=drafter).generate(prompt, max_new_tokens=20, rng=TorchRandomSource(0))
        assert generation.tokens == text[3:23]
        results[shift] = (
            streak_output.loss_sum.item(),
            ce_output.loss_sum.item(),
            streak_output.streak,
            [record.num_accepted for record in generation.rounds],
        )
    loss, ce_loss, streaks, accepted = results[0]
    assert loss == pytest.approx(-batch.valid.sum().item()) and ce_loss == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(streaks, batch.valid.sum(-1).float())
    assert accepted == [GAMMA] * 4  # 4 x (gamma + bonus) = 20 tokens
    loss, ce_loss, streaks, accepted = results[1]
    assert loss > -0.5 * batch.valid.sum().item() and ce_loss > 100 and max(accepted) < GAMMA


# ---------------------------------------------------------------- case 22, 23


def one_sgd_step(folder, loader, accumulate, objective):
    verifier, drafter = make_drafter(torch.float64)
    module = make_module(ObjectiveSchedule.single(objective), partial(torch.optim.SGD, lr=1.0), None, verifier, drafter)
    before = state(module)
    trainer = make_trainer(folder, max_steps=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader)
    return {name: before[name] - tensor for name, tensor in state(module).items()}, trainer.callback_metrics


@pytest.mark.parametrize("objective", [CrossEntropy(), Streak()], ids=repr)
def test_accumulation_equals_one_batch(tmp_path, objective):
    """Case 22: rollouts with 3 and 30 tokens, all their windows."""
    short, long = language([3, 30])
    together, metrics = one_sgd_step(tmp_path, batches([short, long]), 1, objective)
    apart, metrics_apart = one_sgd_step(tmp_path, batches([short], [long]), 2, objective)
    assert max(tensor.abs().max() for tensor in together.values()) > 1e-4
    for name in together:
        torch.testing.assert_close(together[name], apart[name], atol=1e-6, rtol=0)
    assert metrics["train/num_windows"] == 33
    for name in ("train/loss", "train/streak", "train/num_windows"):
        torch.testing.assert_close(metrics[name], metrics_apart[name])


def test_clipping_sees_the_mean_gradient(tmp_path):
    """A clip value above the mean's norm and below the sum's norm leaves the step alone."""

    def step(clip):
        verifier, drafter = make_drafter()
        module = make_module(CE, partial(torch.optim.SGD, lr=1.0), None, verifier, drafter)
        before = state(module)
        make_trainer(tmp_path, max_steps=1, gradient_clip_val=clip).fit(module, batches(language([20, 20])))
        return torch.cat([(before[name] - tensor).flatten() for name, tensor in state(module).items()])

    free = step(None)
    torch.testing.assert_close(step(float(free.norm()) * 1.5), free)
    assert step(float(free.norm()) * 0.5).norm().item() == pytest.approx(free.norm().item() * 0.5, rel=1e-3)


def test_batches_without_windows(tmp_path):
    """Case 23: an empty batch changes nothing, alone in its step or beside another; only empty ones: an error."""
    full = collate(language([10]))
    none = empty_batch(full)

    def fit(items, accumulate, max_steps):
        module = make_module(CE)
        trainer = make_trainer(tmp_path, max_steps=max_steps, accumulate_grad_batches=accumulate)
        trainer.fit(module, DataLoader(items, batch_size=None))
        return state(module), trainer.callback_metrics

    once, _ = fit([full], 1, 1)
    for items, accumulate, steps in [([full, none], 1, 2), ([none, full], 2, 1), ([none, full], 1, 2)]:
        got, metrics = fit(items, accumulate, steps)
        assert all(torch.equal(once[name], got[name]) for name in once)  # AdamW with weight decay would move them
        assert metrics["train/num_windows"] in (0, full.num_windows)
    undraftable = dataclasses.replace(full, valid=torch.zeros_like(full.valid))
    for items in ([none, none], [undraftable, undraftable]):
        with pytest.raises(ConfigError, match="0 trainable windows"):
            fit(items, 1, 2)


def test_divergence_stops_before_the_parameters_break(tmp_path):
    module = make_module(CE)
    with torch.no_grad():
        module.drafter.mask_embedding.fill_(float("nan"))
    before = {name: tensor for name, tensor in state(module).items() if "mask_embedding" not in name}
    with pytest.raises(SpecDiffError, match="diverged"):
        make_trainer(tmp_path, max_steps=1).fit(module, batches(language([6])))
    assert all(torch.equal(before[name], state(module)[name]) for name in before)


# ---------------------------------------------------------------- case 25


def test_verifier_is_frozen_and_outside(tmp_path):
    """Case 25: eval, unchanged, in no optimizer and no state_dict."""
    verifier, drafter = make_drafter()
    weights = {name: tensor.clone() for name, tensor in verifier.model.state_dict().items()}
    module = make_module(ObjectiveSchedule.single(StreakExpected()), None, None, verifier, drafter)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, batches(language([9, 4]), language([7])))
    verifier.model.train()
    module.train()
    assert not verifier.model.training and not any(child.training for child in verifier.model.modules())
    assert module.drafter.training
    assert all(torch.equal(weights[name], tensor) for name, tensor in verifier.model.state_dict().items())
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in drafter.parameters() if p.requires_grad}
    assert not trained & {id(p) for p in verifier.model.parameters()}
    assert set(module.state_dict()) == {name for name, p in module.named_parameters() if p.requires_grad}
    # no copy of a verifier tensor either: trained ones have moved away from what they were copied from
    for tensor in module.state_dict().values():
        assert not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in weights.values())


# ---------------------------------------------------------------- online rollouts, real decoding


def test_online_rollouts_are_refreshed_every_n_steps(tmp_path):
    data = RolloutDataModule(language([8, 8]), gamma=GAMMA, batch_size=2, windows_per_rollout=2)
    calls = []

    def refresh(step):
        calls.append(step)
        data.set_rollouts(language([8 + step] * 3))

    module = make_module(CE, refresh_rollouts=refresh, refresh_every_n_steps=2)
    lengths = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            lengths.append(batch.input_ids.shape[1])

    make_trainer(tmp_path, max_steps=6, accumulate_grad_batches=2, callbacks=[Watch()]).fit(module, data)
    assert calls == [2, 4]
    assert lengths[0] == 11 and lengths[-1] == 3 + 8 + 4
    with pytest.raises(ConfigError, match="refresh_every_n_steps"):
        make_module(CE, refresh_rollouts=refresh)


def test_decoding_probe_runs_the_real_decoder(tmp_path):
    verifier, drafter = make_drafter()
    probe = DecodingProbe(
        [[3, 4, 5]],
        lambda model: SpeculativeDecoder(verifier, model, rule=make_rule("greedy")),
        every_n_steps=1,
        max_new_tokens=10,
    )
    module = make_module(CE, None, None, verifier, drafter)
    make_trainer(tmp_path, max_steps=2, callbacks=[probe]).fit(module, batches(language([9]), language([9, 9])))
    assert [point["step"] for point in probe.history] == [1, 2]
    assert all(0 <= point["probe/mean_streak"] <= GAMMA and point["probe/tokens_per_s"] > 0 for point in probe.history)


# ---------------------------------------------------------------- held-out windows in chunks


class WholeOnly(nn.Module):
    """A drafter that hides its states: the monitor asks for all logits at once."""

    def __init__(self, drafter) -> None:
        super().__init__()
        self.drafter, self.gamma, self.draft_vocab_ids = drafter, drafter.gamma, drafter.draft_vocab_ids

    def forward(self, batch):
        return self.drafter(batch)

    def to_draft_vocab(self, tokens):
        return self.drafter.to_draft_vocab(tokens)


@pytest.mark.parametrize(
    "changes", [{}, {"shifted": True}, {"shifted": True, "conditioning": "verifier_kv", "markov_rank": 3}], ids=repr
)
def test_streak_monitor_reads_windows_in_chunks(changes, tmp_path, monkeypatch):
    """The same curves as from all logits at once, and never more windows' logits than ``loss_chunk_windows``."""
    verifier, drafter = make_drafter(draft_vocab_ids=list(range(50)), **changes)
    if drafter.markov is not None:
        with torch.no_grad():  # it starts at zero: a wrong predecessor would not show
            drafter.markov.token_out.normal_(std=1.0, generator=torch.Generator().manual_seed(0))
            drafter.context_input.anchor.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    batch = collate(language([9, 17, 6]))
    assert batch.num_windows > 20 and not batch.valid.all()
    whole = batch_sums(WholeOnly(drafter), batch, 7)
    sizes = []
    original = type(drafter).states_logits
    monkeypatch.setattr(
        type(drafter), "states_logits", lambda self, s, p: (sizes.append(len(s)), original(self, s, p))[1]
    )
    for chunk in (1, 7, 1000):
        torch.testing.assert_close(batch_sums(drafter, batch, chunk), whole)
        assert max(sizes) == min(chunk, batch.num_windows) and sum(sizes) == batch.num_windows
        sizes.clear()
    monitor = StreakMonitor(every_n_steps=1, batches=[batch])
    module = make_module(CE, verifier=verifier, drafter=drafter, loss_chunk_windows=5)
    make_trainer(tmp_path, max_steps=1, callbacks=[monitor]).fit(module, batches(language([4])))
    curves = curves_from_sums(whole[0])
    assert monitor.history[0]["val/streak"] == pytest.approx(curves.mean_streak, rel=1e-5) and max(sizes) == 5


# ---------------------------------------------------------------- prefix loss


def test_prefix_loss_is_exact_under_accumulation_and_trains(tmp_path):
    rollouts = language([3, 30])
    groups = {"one batch": ([rollouts], 1), "accumulated": ([rollouts[:1], rollouts[1:]], 2)}
    after = {}
    for name, (parts, accumulate) in groups.items():
        verifier, drafter = make_drafter(shifted=True)
        sgd = partial(torch.optim.SGD, lr=0.1)
        module = make_module(CE, sgd, verifier=verifier, drafter=drafter, prefix_loss_weight=0.5)
        trainer = make_trainer(tmp_path / name, max_steps=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, batches(*parts))
        after[name] = state(module)
    for name, value in after["one batch"].items():
        torch.testing.assert_close(after["accumulated"][name], value, rtol=0, atol=1e-6)
    verifier, drafter = make_drafter(shifted=True)
    plain = make_module(CE, partial(torch.optim.SGD, lr=0.1), verifier=verifier, drafter=drafter)
    make_trainer(tmp_path, max_steps=1).fit(plain, batches(rollouts))
    assert any(not torch.allclose(after["one batch"][name], value) for name, value in state(plain).items())


def test_prefix_loss_weight_is_checked():
    with pytest.raises(ConfigError, match="prefix_loss_weight=-1"):
        make_module(CE, prefix_loss_weight=-1.0)
