"""Head and loss in chunks: same loss and gradients as in one piece, memory flat in the number of windows."""

import dataclasses
import gc
from contextlib import contextmanager

import pytest
import torch
from helpers import tiny_verifier
from tiny_training import GAMMA, VOCAB, language, make_module, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from specdiff2.data.windows import WindowCollator
from specdiff2.functional.previous_tokens import previous_tokens
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
    part_names,
)
from specdiff2.training.chunked import chunked_sum, even_chunks, row_chunks, select_windows
from specdiff2.training.window_mean import WindowTotals
from specdiff2.types import ConfigError

MIX = Weighted({"streak": Part(Streak()), "ce": Part(CrossEntropy(0.8), 0.2), "lk": Part(AcceptanceLikelihood(), 0.1)})
OBJECTIVES = [
    CrossEntropy(),
    CrossEntropy(0.8),
    Mdm(),
    Streak(),
    StreakCE(),
    DPace(),
    FirstError(),
    Chain(),
    ARDistill(),
    DistillSpec(),
    StreakExpected("all"),
    StreakExpected("last"),
    StreakExpected("min"),
    TotalVariation(),
    TotalVariation(survival=True),
    AcceptanceLikelihood(),
    MIX,
]


def wide(logits):
    """float32 at least, as drafters return them."""
    return logits if logits.dtype == torch.float64 else logits.float()


class WholeDrafter(nn.Module):
    """Logits in one piece: a body on (anchor, position), a trained head, a low-rank bias of the previous token."""

    def __init__(self, draft_vocab: int = VOCAB - 3, hidden: int = 8, vocab: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gamma = GAMMA
        self.embedding = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.randn(GAMMA, hidden))
        self.body = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, draft_vocab)
        self.left, self.right = nn.Embedding(vocab, 2), nn.Linear(2, draft_vocab, bias=False)
        self.register_buffer("draft_vocab_ids", torch.arange(draft_vocab))

    def to_draft_vocab(self, tokens):
        return torch.where((tokens >= 0) & (tokens < len(self.draft_vocab_ids)), tokens, -1)

    def forward(self, batch):
        return self._head(self._states(batch), previous_tokens(batch))

    def forward_with_prefix(self, batch):
        states, next_tokens = self._prefix(batch)
        return self.forward(batch), wide(self.head(states)), next_tokens

    def _states(self, batch):
        anchor = self.embedding(batch.input_ids[batch.window_row, batch.anchor])
        return torch.tanh(self.body(anchor[:, None] + self.position[: batch.targets.shape[1]]))

    def _head(self, states, previous):
        return wide(self.head(states) + self.right(self.left(previous)))

    def _prefix(self, batch):
        inside = torch.arange(batch.input_ids.shape[1] - 1) + 1 < batch.lengths[:, None]
        row, column = inside.nonzero(as_tuple=True)
        return torch.tanh(self.body(self.embedding(batch.input_ids[row, column]))), batch.input_ids[row, column + 1]


class StatesDrafter(WholeDrafter):
    """The same function through the interface that lets the loss work in chunks."""

    def forward(self, batch):
        raise AssertionError("logits of all windows at once")

    forward_with_prefix = forward

    def window_states(self, batch):
        return self._states(batch)

    def window_and_prefix_states(self, batch):
        return self._states(batch), *self._prefix(batch)

    def states_logits(self, states, previous):
        return self._head(states, previous)

    def token_logits(self, states):
        return wide(self.head(states))


def collate(lengths=(9, 4, 17, 6), masking="random", windows=100):
    return WindowCollator(GAMMA, windows, masking)(language(list(lengths)), (0, 0))


def run(drafter_class, objective, batch, *, prefix=0.0, chunk=5, dtype=torch.float64, autocast=False):
    """(output, gradients by name) through the training module."""
    drafter, verifier = drafter_class().to(dtype), tiny_verifier(VOCAB, dtype)
    module = make_module(
        ObjectiveSchedule.single(objective),
        verifier=verifier,
        drafter=drafter,
        prefix_loss_weight=prefix,
        loss_chunk_windows=chunk,
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module.objective_output(batch, objective)
    (output.loss_sum * 3.0).backward()
    return output, {name: p.grad for name, p in drafter.named_parameters()}


def assert_same(one, two, **tolerance):
    (whole, whole_gradients), (chunked, chunked_gradients) = one, two
    torch.testing.assert_close(chunked.loss_sum, whole.loss_sum, **tolerance)
    torch.testing.assert_close(chunked.streak, whole.streak, **tolerance)
    assert chunked.num_windows == whole.num_windows and list(chunked.parts) == list(whole.parts)
    for name, value in whole.parts.items():
        torch.testing.assert_close(chunked.parts[name], value, **tolerance)
    assert whole_gradients.keys() == chunked_gradients.keys()
    for name, gradient in whole_gradients.items():
        assert (gradient is None) == (chunked_gradients[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(chunked_gradients[name], gradient, **tolerance)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("prefix", [0.0, 0.3])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_chunks_equal_one_piece(objective, prefix):
    batch = collate()
    whole = run(WholeDrafter, objective, batch, prefix=prefix)
    assert max(gradient.abs().max() for gradient in whole[1].values() if gradient is not None) > 1e-3
    for chunk in (1, 5, 1000):
        assert_same(whole, run(StatesDrafter, objective, batch, prefix=prefix, chunk=chunk), rtol=1e-6, atol=1e-9)


def test_chunks_equal_one_piece_in_float32_and_under_autocast():
    batch = collate()
    whole = run(WholeDrafter, MIX, batch, prefix=0.3, dtype=torch.float32)
    assert_same(whole, run(StatesDrafter, MIX, batch, prefix=0.3, dtype=torch.float32), rtol=1e-4, atol=1e-5)
    # bfloat16: weights are cast once and shared by all chunks, gradients are rounded once more per chunk
    whole = run(WholeDrafter, MIX, batch, prefix=0.3, dtype=torch.float32, autocast=True)
    chunked = run(StatesDrafter, MIX, batch, prefix=0.3, dtype=torch.float32, autocast=True)
    torch.testing.assert_close(chunked[0].loss_sum, whole[0].loss_sum, rtol=1e-3, atol=0.0)
    for name, gradient in whole[1].items():
        assert gradient.norm() > 0.1 and (chunked[1][name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_a_planted_wrong_predecessor_is_found(monkeypatch):
    """The comparison above would notice a head that reads the token to be drafted, or the wrong window's."""
    batch = collate()
    whole = run(WholeDrafter, Streak(), batch)
    for wrong in (lambda b: b.targets.where(b.valid, 0), lambda b: previous_tokens(b).roll(1, dims=0)):
        monkeypatch.setattr("specdiff2.training.chunked.previous_tokens", wrong)
        with pytest.raises(AssertionError):
            assert_same(whole, run(StatesDrafter, Streak(), batch), rtol=1e-6, atol=1e-9)


def test_previous_tokens_by_hand():
    batch = collate([6], "full")
    batch.targets[~batch.valid] = -100  # padding may be anything
    text = batch.input_ids[0]
    got = previous_tokens(batch)
    for window, anchor in enumerate(batch.anchor.tolist()):
        for position in range(GAMMA):
            known = anchor + position < int(batch.lengths[0])
            assert got[window, position] == text[anchor + position if known else anchor]
    assert (got >= 0).all() and (~batch.valid).any()


def test_without_gradients_and_without_windows():
    batch = collate()
    module = make_module(ObjectiveSchedule.single(MIX), verifier=tiny_verifier(VOCAB), drafter=StatesDrafter())
    with torch.no_grad():
        output = module.objective_output(batch, MIX)
    assert not output.loss_sum.requires_grad
    torch.testing.assert_close(output.loss_sum, module.objective_output(batch, MIX).loss_sum.detach())
    empty = module.objective_output(select_windows(batch, slice(0, 0)), MIX)
    assert empty.loss_sum == 0 and empty.num_windows == 0 and len(empty.streak) == 0
    empty.loss_sum.backward()
    undraftable = dataclasses.replace(batch, valid=torch.zeros_like(batch.valid))
    none = module.objective_output(undraftable, Streak())
    none.loss_sum.backward()
    assert none.num_windows == 0 and all(p.grad is None or not p.grad.any() for p in module.drafter.parameters())


def test_chunked_sum_passes_gradients_once_and_skips_constant_chunks():
    states, weight = torch.randn(6, 3, requires_grad=True), nn.Parameter(torch.randn(3))

    def loss_of(part, chunk):
        return part.new_ones(()) if chunk.start == 2 else (part @ weight).square().sum()

    total = chunked_sum(loss_of, states, even_chunks(6, 2), [weight])
    kept = states.detach()[[0, 1, 4, 5]]
    torch.testing.assert_close(total, (kept @ weight).square().sum() + 1)
    (of_states, of_weight) = torch.autograd.grad(total.square(), (states, weight), create_graph=True)
    assert not of_states[2:4].any()
    torch.testing.assert_close(of_weight, 4 * total * ((kept @ weight)[:, None] * kept).sum(0))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_weight.sum().backward()


def test_chunk_borders():
    assert even_chunks(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)] and even_chunks(0, 2) == [slice(0, 0)]
    assert row_chunks([0, 0, 0, 1, 1, 2], 4) == [slice(0, 3), slice(3, 6)]
    assert row_chunks([0] * 5 + [1], 2) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert row_chunks([], 3) == [slice(0, 0)]
    for size in range(1, 8):
        rows = [0, 0, 1, 1, 1, 3, 4, 4, 4, 4, 4, 0]
        chunks = row_chunks(rows, size)
        assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(12))
        assert all(1 <= c.stop - c.start <= size for c in chunks)


def test_the_verifier_sees_chunks_of_whole_rollouts(monkeypatch):
    """Rollouts with at most ``loss_chunk_windows`` windows are read by the verifier once each."""
    batch = collate([9, 4, 17, 6], windows=4)
    verifier, seen = tiny_verifier(VOCAB), []
    original = verifier.window_probs

    def spy(part, *arguments):
        seen.append(part.window_row.unique().tolist())
        assert part.num_windows <= 8
        return original(part, *arguments)

    monkeypatch.setattr(verifier, "window_probs", spy)
    objective = TotalVariation()
    module = make_module(
        ObjectiveSchedule.single(objective), verifier=verifier, drafter=StatesDrafter(), loss_chunk_windows=8
    )
    module.objective_output(batch, objective)
    assert len(seen) > 1 and sorted(row for rows in seen for row in rows) == [0, 1, 2, 3]


# ---------------------------------------------------------------- memory


class Held:
    """A saved tensor that counts its bytes for as long as autograd holds it."""

    now = peak = 0

    def __init__(self, tensor):
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Held.now += self.size
        Held.peak = max(Held.peak, Held.now)

    def __del__(self):
        Held.now -= self.size


@contextmanager
def saved_bytes():
    gc.collect()
    Held.now = Held.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        yield


def peak_and_kept(drafter_class, objective, num_windows, chunk, prefix=0.0):
    """Most bytes saved at once, and those kept for backward, of head and loss: the body's own are left out."""
    drafter = drafter_class(draft_vocab=2000, vocab=2003)
    batch = collate([num_windows], "full", num_windows)
    assert batch.num_windows == num_windows
    probs = torch.full((1, 1, 2000), 1 / 2003)

    class Flat:
        model = nn.Linear(1, 1)

        def window_probs(self, part, ids, sampling):
            return probs.expand(part.num_windows, GAMMA, -1)

    module = make_module(
        ObjectiveSchedule.single(objective),
        verifier=Flat(),
        drafter=drafter,
        prefix_loss_weight=prefix,
        loss_chunk_windows=chunk,
    )
    with saved_bytes():
        output = module.objective_output(batch, objective)
        peak, kept = Held.peak, Held.now
        output.loss_sum.backward()
    return peak, kept


@pytest.mark.parametrize("objective", [Streak(), MIX, TotalVariation(True)], ids=repr)
@pytest.mark.parametrize("prefix", [0.0, 0.1])
def test_saved_memory_grows_with_the_states_only(objective, prefix):
    logits_of_a_window = GAMMA * 2000 * 4
    state_of_a_window = GAMMA * 8 * 4

    def growth(drafter_class, chunk_of):
        small, large = (peak_and_kept(drafter_class, objective, n, chunk_of(n), prefix) for n in (32, 256))
        return [(b - a) / (256 - 32) for a, b in zip(small, large, strict=True)]

    # states: saved by tanh, linear and as gradients; the prefix has one token more per window
    assert all(0 < grown < 12 * state_of_a_window for grown in growth(StatesDrafter, lambda n: 16))
    # the same measure sees logits where they are kept: a chunk as long as the batch, and the drafter in one piece
    assert growth(StatesDrafter, lambda n: n)[0] > logits_of_a_window
    assert min(growth(WholeDrafter, lambda n: 16)) > logits_of_a_window


# ---------------------------------------------------------------- logging through the trainer


def fit(folder, groups, accumulate, schedule, max_steps=1, prefix=0.5):
    drafter = StatesDrafter().double()
    module = make_module(
        schedule, verifier=tiny_verifier(VOCAB, torch.float64), drafter=drafter, prefix_loss_weight=prefix
    )
    loader = DataLoader(groups, batch_size=None)
    trainer = make_trainer(folder, max_steps=max_steps, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module, trainer


def test_parts_and_prefix_are_logged_apart_as_exact_means(tmp_path):
    """Case 22 for the parts: 3 and 30 tokens in one batch, accumulated, and beside a batch without windows."""
    short, long = language([3, 30])
    batches = {name: WindowCollator(GAMMA, 100)(rollouts, (0, 0)) for name, rollouts in
               {"both": [short, long], "short": [short], "long": [long]}.items()}  # fmt: skip
    none = select_windows(batches["short"], slice(0, 0))
    schedule = ObjectiveSchedule.single(MIX)
    whole, module, _ = fit(tmp_path, [batches["both"]], 1, schedule)
    apart, _, _ = fit(tmp_path, [batches["short"], none, batches["long"]], 3, schedule)
    names = ["train/loss", "train/loss_streak", "train/loss_ce", "train/loss_lk", "train/loss_prefix", "train/streak"]
    for name in names:
        assert whole[name] == pytest.approx(apart[name], rel=1e-6), name
    terms = [whole[f"train/loss_{name}"] * weight for name, weight in {"streak": 1, "ce": 0.2, "lk": 0.1}.items()]
    assert whole["train/loss"] == pytest.approx(sum(terms) + 0.5 * whole["train/loss_prefix"], rel=1e-6)
    assert whole["train/loss_streak"] == pytest.approx(-whole["train/streak"], rel=1e-6)
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["specdiff2"]["schedule"][0]["objective"] == repr(MIX)


class TwoRanks:
    """Strategy whose ``reduce`` adds what the other rank sent."""

    def __init__(self):
        self.sent = []

    def reduce(self, local, reduce_op):
        assert reduce_op == "sum"
        self.sent.append(local)
        return torch.stack(self.sent).sum(0)


def test_a_rank_with_empty_batches_sends_as_many_numbers():
    batch = collate([8, 8], "full")
    module = make_module(ObjectiveSchedule.single(MIX), verifier=tiny_verifier(VOCAB), drafter=StatesDrafter())
    output = module.objective_output(batch, MIX)
    empty, full, strategy = WindowTotals(), WindowTotals(), TwoRanks()
    empty.add_empty()
    full.add(output)
    names, device = part_names(MIX), torch.device("cpu")
    assert set(empty.take(strategy, device, names).metrics()) == {"train/num_windows", "train/empty_batches"}
    totals = full.take(strategy, device, names)
    assert totals.num_empty_batches == 1 and totals.num_windows == 16
    for name, value in output.parts.items():
        assert totals.metrics()[f"train/loss_{name}"] == pytest.approx(value.item() / 16, rel=1e-6)
    assert full.is_empty_group


def test_each_stage_logs_its_own_parts(tmp_path):
    batch = collate([8, 8], "full")
    stages = ObjectiveSchedule([Stage(CrossEntropy(), 1), Stage(MIX)])
    first, _, _ = fit(tmp_path, [batch], 1, stages, prefix=0.0)
    assert not [name for name in first if name.startswith("train/loss_")]
    second, _, _ = fit(tmp_path, [batch], 1, stages, max_steps=2, prefix=0.0)
    assert sorted(name for name in second if name.startswith("train/loss_")) == [
        "train/loss_ce", "train/loss_lk", "train/loss_streak",
    ]  # fmt: skip
    single, _, _ = fit(tmp_path, [batch], 1, ObjectiveSchedule.single(CrossEntropy()), prefix=0.5)
    parts = single["train/loss_ce"] + 0.5 * single["train/loss_prefix"]
    assert single["train/loss"] == pytest.approx(parts, rel=1e-6)


@pytest.mark.parametrize("size", [0, -1, True])
def test_chunk_size_is_checked(size):
    with pytest.raises(ConfigError, match=f"loss_chunk_windows={size}"):
        make_module(ObjectiveSchedule.single(Streak()), loss_chunk_windows=size)
