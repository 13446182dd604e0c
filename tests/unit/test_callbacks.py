"""Training callbacks on a drafter that is one small table."""

import csv
import math
import shutil
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from specdiff2.functional.streak import token_log_probs
from specdiff2.objectives import CrossEntropy, ObjectiveSchedule, Stage, Streak
from specdiff2.runtime.publish import exported_names
from specdiff2.training.callbacks import DecodingProbe, DrafterExport, ProgressEta, StreakMonitor
from specdiff2.training.module import DistillationModule
from specdiff2.types import ConfigError, Generation, RoundRecord, WindowBatch

GAMMA, VOCAB = 3, 8


class TableDrafter(nn.Module):
    """Logits of position k depend on k and the anchor token only."""

    def __init__(self):
        super().__init__()
        self.gamma = GAMMA
        self.table = nn.Parameter(torch.randn(VOCAB, GAMMA, VOCAB))
        self.register_buffer("draft_vocab_ids", torch.arange(VOCAB))

    def forward(self, batch):
        return self.table[batch.input_ids[batch.window_row, batch.anchor]]

    def to_draft_vocab(self, tokens):
        return tokens


def windows(seed: int, num_windows: int = 5) -> WindowBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (num_windows, GAMMA + 1), generator=generator)
    valid = torch.arange(GAMMA) < torch.randint(1, GAMMA + 1, (num_windows, 1), generator=generator)
    valid[0] = True
    return WindowBatch(
        input_ids=ids,
        lengths=torch.full((num_windows,), GAMMA + 1),
        window_row=torch.arange(num_windows),
        anchor=torch.zeros(num_windows, dtype=torch.long),
        targets=ids[:, 1:],
        valid=valid,
        revealed=torch.zeros_like(valid),
    )


def fit(folder, callbacks, *, max_steps=8, accumulate=1, warmup=3, logger=None):
    torch.manual_seed(0)
    schedule = ObjectiveSchedule([Stage(CrossEntropy(), warmup), Stage(Streak())])
    module = DistillationModule(TableDrafter(), None, schedule, partial(torch.optim.SGD, lr=0.5))
    trainer = pl.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=logger or False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader([windows(seed) for seed in range(4)], batch_size=None))
    return trainer, module


def plain_curves(drafter, batches):
    """Ten-line reference: expected and greedy acceptance, window by window."""
    result = {}
    for suffix in ("", "_greedy"):
        reached, survived, present, streaks = [0.0] * GAMMA, [0.0] * GAMMA, [0] * GAMMA, []
        for batch in batches:
            logits = drafter(batch).detach()
            accept = token_log_probs(logits, batch.targets).exp() if not suffix else logits.argmax(-1) == batch.targets
            for row, valid in zip(accept.tolist(), batch.valid.tolist(), strict=True):
                alive, streak = 1.0, 0.0
                for j in range(sum(valid)):
                    present[j] += 1
                    reached[j] += alive
                    alive *= row[j]
                    survived[j] += alive
                    streak += alive
                streaks.append(streak)
        result[f"val/streak{suffix}"] = sum(streaks) / len(streaks)
        for j in range(GAMMA):
            result[f"val/accept_rate{suffix}@{j + 1}"] = survived[j] / reached[j] if reached[j] else None
            result[f"val/survival{suffix}@{j + 1}"] = survived[j] / present[j] if present[j] else None
    return result


def test_streak_monitor_matches_plain_loop_and_reaches_the_files(tmp_path):
    held_out = [windows(100), windows(101, num_windows=9)]
    monitor = StreakMonitor(every_n_steps=4, batches=held_out)
    trainer, module = fit(tmp_path, [monitor], logger=CSVLogger(tmp_path, name="", version=""))
    assert [point["step"] for point in monitor.history] == [0, 3, 4, 8]  # start, end of warm-up, every 4
    expected = plain_curves(module.drafter, held_out)
    for name, value in expected.items():
        got = monitor.history[-1][name]
        assert got == value if value is None else math.isclose(got, value, rel_tol=1e-5), name
    assert expected["val/accept_rate@2"] != expected["val/survival@2"]
    assert module.drafter.training
    assert trainer.callback_metrics["val/streak"].item() == pytest.approx(monitor.history[-1]["val/streak"])
    with open(tmp_path / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["val/streak"]]
    assert steps == [0, 3, 4, 8]
    assert all(row["val/streak"] == "" or row["val/accept_rate@1"] for row in rows)
    assert "nan" not in (tmp_path / "metrics.csv").read_text(encoding="utf-8").lower()
    assert len([row for row in rows if row["train/loss"]]) == 8


def test_streak_monitor_counts_optimizer_steps_under_accumulation(tmp_path):
    monitor = StreakMonitor(every_n_steps=2, batches=[windows(1)], max_batches=1)
    fit(tmp_path, [monitor], max_steps=4, accumulate=2, warmup=1)
    assert [point["step"] for point in monitor.history] == [0, 1, 2, 4]


def test_streak_monitor_without_windows_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="held-out windows"):
        fit(tmp_path, [StreakMonitor(batches=[])])
    with pytest.raises(ConfigError, match="every_n_steps"):
        StreakMonitor(every_n_steps=0)


def test_drafter_export_before_best_last(tmp_path):
    saved = []

    def save(drafter, folder, facts):
        saved.append((folder.name, facts["step"], drafter.table.detach().clone(), facts))

    monitor = StreakMonitor(every_n_steps=1, batches=[windows(0), windows(1)])
    export = DrafterExport(tmp_path / "drafter", save)
    _, module = fit(tmp_path, [monitor, export], max_steps=6)
    assert [(name, step) for name, step, *_ in saved if name != "best"] == [("before", 3), ("last", 6)]
    candidates = [point for point in monitor.history if point["step"] >= 3]
    best = max(candidates, key=lambda point: point["val/streak"])
    _, step, _, facts = [entry for entry in saved if entry[0] == "best"][-1]
    assert step == best["step"] == export.best_step and facts["val/streak"] == best["val/streak"]
    assert min(entry[1] for entry in saved if entry[0] == "best") >= 3
    torch.testing.assert_close(saved[-1][2], module.drafter.table.detach())
    copy = DrafterExport(tmp_path / "drafter", save)
    copy.load_state_dict(export.state_dict())
    assert copy.best_value == export.best_value and copy.state_dict() == export.state_dict()


def test_drafter_export_must_follow_the_monitor(tmp_path):
    monitor = StreakMonitor(batches=[windows(0)])
    with pytest.raises(ConfigError, match="StreakMonitor"):
        fit(tmp_path, [DrafterExport(tmp_path, lambda *_: None), monitor])

    class NoStep(pl.Callback):
        def on_train_batch_start(self, *_):
            raise AssertionError("trained although the metric does not exist")

    with pytest.raises(ConfigError, match="val/typo"):
        fit(tmp_path, [monitor, DrafterExport(tmp_path, lambda *_: None, monitor="val/typo"), NoStep()], max_steps=3)


def test_drafter_export_takes_over_what_the_resumed_run_exported(tmp_path, caplog):
    def save(drafter, folder, facts):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(str(facts["step"]), encoding="utf-8")

    first = DrafterExport(tmp_path / "old", save)
    fit(tmp_path, [StreakMonitor(every_n_steps=1, batches=[windows(0)]), first], max_steps=6)
    best = (tmp_path / "old/best/config.json").read_text(encoding="utf-8")
    state = first.state_dict()
    state["best_value"] = 99.0  # nothing later can be better

    def resumed(folder):
        export = DrafterExport(folder, save)
        export.load_state_dict(state)
        fit(tmp_path, [StreakMonitor(every_n_steps=1, batches=[windows(0)]), export], max_steps=6)
        return export

    assert resumed(tmp_path / "new").exported == {"before", "best", "last"}
    assert (tmp_path / "new/best/config.json").read_text(encoding="utf-8") == best
    assert (tmp_path / "new/before/config.json").read_text(encoding="utf-8") == "3"
    shutil.rmtree(tmp_path / "old")  # then the best from here on is exported, and `before` is missing
    assert resumed(tmp_path / "third").exported == {"best", "last"}
    assert "goes on without it" in caplog.text


def test_drafter_export_keeps_every_nth_step_also_after_a_resume(tmp_path, caplog):
    def save(drafter, folder, facts):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(str(facts["step"]), encoding="utf-8")
        saved.append(folder.name)

    def train(folder, state=None, **options):
        export = DrafterExport(folder, save, keep_every_n_steps=2)
        if state is not None:
            export.load_state_dict(state)
        fit(tmp_path, [StreakMonitor(every_n_steps=1, batches=[windows(0)]), export], **options)
        return export

    saved = []
    first = train(tmp_path / "old", max_steps=5, accumulate=2, warmup=1)  # two batches a step: each is kept once
    assert [name for name in saved if name.startswith("step")] == ["step-2", "step-4"]
    assert (tmp_path / "old/step-4/config.json").read_text(encoding="utf-8") == "4"
    assert exported_names([first]) == ["step-2", "step-4", "before", "best", "last"]
    assert all("=" not in path.name for path in (tmp_path / "old").iterdir())
    state = first.state_dict()
    state["kept"] = ["step-2"]  # as in a checkpoint of step 3
    second = train(tmp_path / "new", state, max_steps=6)
    assert second.exported == {"step-2", "step-4", "step-6", "before", "best", "last"}
    assert second.state_dict()["kept"] == ["step-2", "step-4", "step-6"]
    shutil.rmtree(tmp_path / "old")
    third = train(tmp_path / "third", state, max_steps=3)
    assert "step-2" in third.exported  # trained and exported here
    assert "step-2: not there any more" in caplog.text
    del state["kept"]  # a checkpoint from before the option
    assert train(tmp_path / "fourth", state, max_steps=3).state_dict()["kept"] == ["step-2"]


def test_drafter_export_counts_kept_steps_in_order(tmp_path):
    export = DrafterExport(tmp_path, lambda *_: None, keep_every_n_steps=1)
    fit(tmp_path, [StreakMonitor(batches=[windows(0)]), export], max_steps=11)
    assert exported_names([export])[:11] == [f"step-{step}" for step in range(1, 12)]
    with pytest.raises(ConfigError, match="keep_every_n_steps=0"):
        DrafterExport(tmp_path, lambda *_: None, keep_every_n_steps=0)


class FakeDecoder:
    name = "fake"

    def generate(self, prompt, *, max_new_tokens, rng, stop_strings=(), on_tokens=None):
        rounds = [RoundRecord(3, 2, 3, 4), RoundRecord(3, 0, 1, 4)]
        return Generation([1] * 4, rounds, "length", decode_s=0.5)


def test_decoding_probe_pools_over_prompts(tmp_path):
    seen = []

    def make_decoder(drafter):
        seen.append(drafter.training)
        return FakeDecoder()

    probe = DecodingProbe([[1, 2], [3]], make_decoder, every_n_steps=3, max_new_tokens=4)
    _, module = fit(tmp_path, [probe], max_steps=6)
    point = {"probe/mean_streak": 1.0, "probe/tau": 2.0, "probe/tokens_per_s": 8.0}
    assert probe.history == [{"step": 3, **point}, {"step": 6, **point}]
    assert seen == [False, False] and module.drafter.training
    with pytest.raises(ConfigError, match="prompts"):
        DecodingProbe([], make_decoder)


def test_progress_line_names_stage_and_time_left(tmp_path, capsys):
    fit(tmp_path, [ProgressEta()], max_steps=4)
    shown = capsys.readouterr().err
    assert "4/4" in shown and "streak" in shown and "train/loss" in shown
