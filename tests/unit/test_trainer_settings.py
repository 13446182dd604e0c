"""Section ``trainer`` and ``load_verifier``: the files of conf/trainer without a GPU, and what is refused."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from specdiff2 import launch
from specdiff2.launch import is_first_rank, own_rank
from specdiff2.models.drafter_files import check_belongs
from specdiff2.objectives import ObjectiveSchedule, Streak, StreakExpected
from specdiff2.runtime import build, launched, trainer_settings
from specdiff2.runtime.config_schema import TrainConfig
from specdiff2.runtime.teacher import get_verifier
from specdiff2.runtime.trainer_settings import check_placement, check_trainer
from specdiff2.training.fsdp import Fsdp
from specdiff2.training.strategies import DeepSpeed
from specdiff2.types import ConfigError, MismatchError

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path.stem for path in (CONF / "trainer").glob("*.yaml"))
needs_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU refuses")


def compose(*overrides: str) -> dict[str, Any]:
    return build.check(
        build.load_config(CONF, "train", ["verifier.source=/nowhere", "verifier=hf", *overrides]), TrainConfig
    )


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("deepspeed")])
def test_deepspeed_files_name_their_stage(name: str) -> None:
    config = compose(f"trainer={name}", "trainer.num_nodes=4", "trainer.devices=8")
    trainer, strategy = config["trainer"], build.instantiate(config["trainer"]["strategy"])
    assert isinstance(strategy, DeepSpeed) and trainer["num_nodes"] == 4 and trainer["devices"] == 8
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == int(name.removesuffix("_offload")[-1])
    assert ("offload_optimizer" in zero) == name.endswith("offload")
    assert ("offload_param" in zero) == (name == "deepspeed_zero3_offload")
    assert strategy._timeout.total_seconds() == 30 * 60


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_cpu_processes_is_accepted(stage: int) -> None:
    trainer = compose(f"trainer=deepspeed_zero{stage}", "trainer.accelerator=ds_cpu", "trainer.devices=2")["trainer"]
    check_trainer(trainer)
    built = trainer_settings.build(trainer)
    assert isinstance(built.strategy, DeepSpeed) and built.world_size == 2
    assert [str(device) for device in built.strategy.parallel_devices] == ["cpu:0", "cpu:1"]


def test_ddp_and_cpu_are_accepted_with_the_timeout_that_is_set() -> None:
    check_trainer(compose("trainer=cpu")["trainer"])
    trainer = compose(
        "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.strategy.timeout_minutes=5"
    )
    check_trainer(trainer["trainer"])
    built = trainer_settings.build(trainer["trainer"])
    assert isinstance(built.strategy, DDPStrategy) and built.strategy._timeout.total_seconds() == 300
    assert compose("trainer=ddp", "trainer.accelerator=cpu")["trainer"]["devices"] == 1  # auto


def test_fsdp_on_cpu_processes_is_accepted() -> None:
    trainer = compose("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2")["trainer"]
    check_trainer(trainer)
    assert isinstance(trainer_settings.build(trainer).strategy, Fsdp)


@needs_cpu_only
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer=deepspeed_zero2", "trainer.accelerator=cpu"], "set trainer.accelerator=ds_cpu"),
        (["trainer=deepspeed_zero2"], "set trainer.accelerator=ds_cpu"),  # auto is the CPU here
        (["trainer=deepspeed_zero3", "trainer.accelerator=gpu"], "no CUDA device"),
        (["trainer=gpu"], "trainer=cpu"),
        (["trainer=ddp", "trainer.accelerator=ds_cpu"], "is for DeepSpeed"),
        (["trainer=deepspeed_zero3_offload", "trainer.accelerator=ds_cpu"], "without offload"),
        (
            ["trainer=deepspeed_zero2", "trainer.accelerator=ds_cpu", "+trainer.strategy.offload_parameters=true"],
            "stage 3",
        ),
        (["trainer=deepspeed_zero2", "trainer.accelerator=ds_cpu", "trainer.strategy.stage=4"], "expected 1, 2 or 3"),
        (["trainer=deepspeed_zero2", "trainer.accelerator=ds_cpu", "trainer.precision=16-mixed"], "bf16-mixed"),
        (["trainer.strategy=deepspeed_stage_2"], "trainer=deepspeed_zero2"),
        (["trainer.strategy=fsdp"], "trainer=fsdp"),
        (["trainer=cpu", "trainer.strategy={_target_: lightning.pytorch.strategies.FSDPStrategy}"], "trainer=fsdp"),
        (
            ["trainer=cpu", "trainer.strategy={_target_: lightning.pytorch.strategies.DeepSpeedStrategy}"],
            "trainer=deepspeed_zero2",
        ),
        (["trainer=fsdp", "trainer.accelerator=cpu", "trainer.precision=16-mixed"], "bf16-mixed"),
        (["trainer.strategy=dpp"], "dpp"),
        (["trainer.devices=0", "trainer.accelerator=cpu"], "trainer"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_trainer(compose(*overrides)["trainer"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else find(name, *more)
    )
    with pytest.raises(ConfigError, match=r"pip install 'specdiff2\[deepspeed\]'"):
        check_trainer(compose("trainer=deepspeed_zero3", "trainer.accelerator=ds_cpu")["trainer"])


def test_one_verifier_spread_over_all_gpus_is_for_one_process() -> None:
    check_placement(compose("verifier.device_map=auto", "trainer=cpu"))
    with pytest.raises(ConfigError, match="load_verifier=false"):
        check_placement(compose("verifier.device_map=auto", "trainer=ddp", "trainer.devices=8"))


def test_which_process_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launched.LEFT_BEHIND, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert is_first_rank()
    monkeypatch.setenv("LOCAL_RANK", "1")  # started by Lightning
    assert not is_first_rank()
    monkeypatch.setenv("RANK", "0")  # torchrun
    assert is_first_rank()
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of the second machine
    assert not is_first_rank()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    for name, value in (("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0")):
        monkeypatch.setenv(name, value)
    assert own_rank() == 1 and launch.launched() == (1, 2)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")  # a batch script
    assert is_first_rank() and launch.launched() is None
    monkeypatch.setenv("NODE_RANK", "1")  # Lightning's, on the second machine
    assert not is_first_rank()


# ---------------------------------------------------------------- load_verifier
def test_why_a_verifier_is_loaded() -> None:
    """Named one by one; a block drafter with the defaults has several reasons."""
    config = compose("load_verifier=false", "data.online=true")
    with pytest.raises(ConfigError) as refused:
        get_verifier(config, ObjectiveSchedule.single(StreakExpected()))
    for reason in (
        "objective streak_expected",
        "embedding and head",
        "data.online=true",
        "decoding_probe",
        "data.folder",
    ):
        assert reason in str(refused.value), reason
    masked = ["model=masked_lm", "model.source=/nowhere", "callbacks.decoding_probe=null", "data.folder=/nowhere"]
    with pytest.raises(ConfigError, match=r"/nowhere/train holds no rollouts") as refused:
        get_verifier(compose("load_verifier=false", *masked), ObjectiveSchedule.single(Streak()))
    assert "embedding" not in str(refused.value) and "objective" not in str(refused.value)


def test_weights_that_only_a_server_has_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(
        verifier_name="v",
        verifier_fingerprint="served:v",
        tokenizer_fingerprint="none",
        vocab_size=9,
        other_tokenizer=False,
    )
    verifier: Any = SimpleNamespace(name="v", fingerprint="abc", tokenizer=None, vocab_size=9)
    with caplog.at_level(logging.WARNING):
        check_belongs(config, verifier, Path("d"))
    assert "weights could not be compared" in caplog.text
    config.vocab_size = 8
    with pytest.raises(MismatchError, match="vocabulary size"):
        check_belongs(config, verifier, Path("d"))
