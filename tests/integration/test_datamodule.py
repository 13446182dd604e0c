"""The data module inside a Lightning trainer: exact resume (case 27, loader part), two ranks (case 24), online mode."""

from __future__ import annotations

import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
from helpers import char_tokenizer

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.online import OnlineRollouts
from specdiff2.data.prompts import Prompt
from specdiff2.data.rollouts import RolloutStore
from specdiff2.types import ConfigError, MismatchError, Rollout


def rollout(index: int, completion: int = 12) -> Rollout:
    return Rollout(f"r{index}", [index + 1, 1, 2], [index % 7 + 3] * completion, 1.0)


ROWS = [rollout(index, completion=5 + index) for index in range(9)]


class Dice:
    max_length = 512

    def sample_batch(self, prompts, sampling, max_new_tokens, generator):
        return torch.randint(0, 60, (len(prompts), max_new_tokens), generator=generator).tolist()


class Recorder(pl.LightningModule):
    """Trains one number and remembers every batch."""

    def __init__(self, refresh=None, refresh_every: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple] = []
        self.refresh, self.refresh_every = refresh, refresh_every

    def training_step(self, batch, batch_idx):
        self.seen.append(
            (
                batch.input_ids[:, 0].tolist(),
                batch.anchor.tolist(),
                batch.revealed.int().tolist(),
                batch.targets.tolist(),
            )
        )
        return self.weight * batch.num_windows

    def on_train_batch_end(self, *args) -> None:
        if self.refresh_every and self.global_step % self.refresh_every == 0:
            self.refresh(self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def datamodule(rows=ROWS, **changes) -> RolloutDataModule:
    settings = dict(gamma=4, batch_size=2, windows_per_rollout=3, masking="random", seed=5)
    return RolloutDataModule(rows, **(settings | changes))


def trainer(tmp_path, max_steps: int, **changes) -> pl.Trainer:
    settings = dict(
        max_steps=max_steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    return pl.Trainer(**(settings | changes))


def fit(tmp_path, max_steps: int, *, ckpt=None, data=None, module=None, **changes):
    data, module = data or datamodule(), module or Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = trainer(tmp_path, max_steps, **changes)
        runner.fit(module, datamodule=data, ckpt_path=ckpt, **({"weights_only": True} if ckpt else {}))
    return runner, module


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("steps_per_epoch", [None, 4, 100])
def test_case_27_twelve_steps_equal_five_resume_seven(tmp_path, steps_per_epoch, accumulate):
    """Within an epoch and across its end; the checkpoint loads weights-only."""
    data = lambda: datamodule(steps_per_epoch=steps_per_epoch)  # noqa: E731
    kwargs = dict(accumulate_grad_batches=accumulate)
    _, straight = fit(tmp_path, 12, data=data(), **kwargs)
    runner, five = fit(tmp_path, 5, data=data(), **kwargs)
    runner.save_checkpoint(tmp_path / "five.ckpt")
    _, seven = fit(tmp_path, 12, data=data(), ckpt=tmp_path / "five.ckpt", **kwargs)
    assert len(straight.seen) == 12 * accumulate and len(five.seen) == 5 * accumulate
    assert straight.seen == five.seen + seven.seen
    assert straight.weight.item() == seven.weight.item()
    assert len({str(batch) for batch in straight.seen}) == len(straight.seen), "masks differ by step"


def test_case_27_resume_with_other_settings_is_refused(tmp_path):
    runner, _ = fit(tmp_path, 5)
    runner.save_checkpoint(tmp_path / "five.ckpt")
    with pytest.raises(MismatchError, match="gamma was 4 in the checkpoint, now it is 6"):
        fit(tmp_path, 12, ckpt=tmp_path / "five.ckpt", data=datamodule(gamma=6))
    with pytest.raises(MismatchError, match="num_rollouts was 9"):
        fit(tmp_path, 12, ckpt=tmp_path / "five.ckpt", data=datamodule(ROWS[:8]))


def test_whole_accumulation_groups_per_epoch(tmp_path):
    """9 rows, batch 2: 5 steps a pass. With groups of 2 an epoch has 6, so no group is cut at its end."""
    data = datamodule()
    runner, module = fit(tmp_path, 3, data=data, accumulate_grad_batches=2)
    assert len(data.train_dataloader()) == 6
    assert runner.global_step == 3 and len(module.seen) == 6


def test_store_folder_and_list_give_the_same_batches(tmp_path):
    store = RolloutStore(tmp_path / "store", {"verifier": "v1"})
    store.append(ROWS)
    store.close()
    seen = [
        fit(tmp_path, 3, data=datamodule(source))[1].seen for source in (ROWS, store, store.folder, str(store.folder))
    ]
    assert all(one == seen[0] for one in seen)
    datamodule(store.folder, expected={"verifier": "v1"}).setup()
    with pytest.raises(MismatchError, match="verifier was 'v1', now it is 'v2'"):
        datamodule(store.folder, expected={"verifier": "v2"}).setup()
    with pytest.raises(ConfigError, match="no rollouts there"):
        datamodule(tmp_path / "gone").setup()


def test_case_23_unusable_rollouts_are_counted_or_all_refused(caplog):
    data = datamodule([*ROWS, rollout(20, completion=0), rollout(21, completion=90)], max_length=50, val=ROWS[:3])
    with caplog.at_level(logging.WARNING):
        data.setup()
    assert len(data.train_rollouts) == 9
    assert "2 dropped (1 without a completion token, 1 longer than max_length=50)" in caplog.text
    for source in ([], [rollout(0, completion=0)] * 3):
        with pytest.raises(ConfigError, match="no rollout to train on"):
            datamodule(source).setup()
    with pytest.raises(ConfigError, match="no rollout to train on"):
        datamodule(val=[rollout(0, completion=0)]).setup()


def test_validation_windows_are_full_and_fixed():
    data = datamodule(val=ROWS[:5])
    data.setup("fit")
    one, other = list(data.val_dataloader()), list(data.val_dataloader())
    assert len(one) == 3 and all(torch.equal(a.anchor, b.anchor) for a, b in zip(one, other, strict=True))
    assert not any(batch.revealed.any() for batch in one)
    assert list(datamodule().val_dataloader()) == []


# ---------------------------------------------------------------- online
def online_data() -> RolloutDataModule:
    prompts = [Prompt(f"p{index}", [{"role": "user", "content": "x" * (index + 1)}]) for index in range(6)]
    encoder = ChatEncoder(char_tokenizer())
    online = OnlineRollouts(Dice(), encoder, prompts, prompts_per_round=4, batch_size=2, max_new_tokens=9)
    return datamodule(online=online)


def test_online_rollouts_replace_the_training_rows_and_survive_resume(tmp_path):
    def train(max_steps, ckpt=None):
        data = online_data()
        return fit(tmp_path, max_steps, data=data, module=Recorder(data.refresh, 3), ckpt=ckpt)

    _, straight = train(12)
    runner, five = train(5)
    runner.save_checkpoint(tmp_path / "five.ckpt")
    _, seven = train(12, ckpt=tmp_path / "five.ckpt")
    assert straight.seen == five.seen + seven.seen
    firsts = [step[0] for step in straight.seen]
    assert all(set(step) <= set(range(1, 10)) for step in firsts[:3]), "the stored rollouts first"
    bos = char_tokenizer().bos_token_id
    assert all(set(step) == {bos} for step in firsts[3:]), "then fresh ones"


def test_refresh_without_a_source_is_an_error():
    with pytest.raises(ConfigError, match="OnlineRollouts"):
        datamodule().refresh(1)
    with pytest.raises(ConfigError, match="no rollout to train on"):
        datamodule().set_rollouts([])


# ---------------------------------------------------------------- two ranks
class TwoRanks(Recorder):
    """Gathers what both ranks saw at the end of training."""

    def on_train_end(self) -> None:
        both: list = [None, None]
        torch.distributed.all_gather_object(both, self.seen)
        if self.global_rank == 0:
            torch.save(both, f"{self.trainer.default_root_dir}/seen.pt")


def test_case_24_two_ddp_ranks_both_finish(tmp_path):
    """Odd number of rows, half of them unusable, online refresh in between; Lightning's own DDP over gloo."""
    data = online_data()
    data._train_source = [*ROWS[:3], *(rollout(30 + index, completion=0) for index in range(4))]
    module = TwoRanks(data.refresh, 3)
    fit(tmp_path, 5, data=data, module=module, devices=2, strategy="ddp_fork", accumulate_grad_batches=1)
    zero, one = torch.load(tmp_path / "seen.pt", weights_only=True)
    assert len(zero) == len(one) == 5
    assert all(a[1:3] != b[1:3] for a, b in zip(zero, one, strict=True)), "windows and masks differ by rank"
    assert len({str(step[1:3]) for step in zero}) == 5, "and by step"
