"""Every file in conf/ composes and is valid; wrong keys and values are refused before any model loads (case 32)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from specdiff2.objectives import ObjectiveSchedule
from specdiff2.runtime import build
from specdiff2.runtime.command import clear_composition_error
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig, locate
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.grid import all_methods
from specdiff2.runtime.hf_settings import HFSettings
from specdiff2.types import ConfigError, NotLosslessError, SpecDiffError

CONF = Path(__file__).resolve().parents[2] / "conf"
SCHEMAS = {"train": TrainConfig, "eval": EvalConfig}
GROUPS = {
    "train": ["verifier", "model", "data", "objective", "optimizer", "scheduler", "callbacks", "trainer", "logger"],
    "eval": ["verifier", "model", "sampler", "benchmark"],
}
SHARED = {"base"}  # files that others build on
REQUIRED = {  # values that an option leaves to the user, for one script where it says so
    "verifier=hf": ["verifier.source=/nowhere"],
    "model=masked_lm": ["model.source=/nowhere"],
    "data=jsonl": ["data.train_prompts.path=q.jsonl", "data.train_prompts.prompt_field=question"],
    "data=hub": ["data.train_prompts.name=a/b", "data.train_prompts.prompt_field=question"],
    "data=mixed_gsm8k": [f"data.train_prompts.sources.{name}.path=q.jsonl" for name in ("gsm8k", "alpaca")],
    "benchmark=jsonl": ["benchmark.path=q.jsonl", "benchmark.prompt_field=question"],
    "benchmark=hub": ["benchmark.name=a/b", "benchmark.prompt_field=question"],
    "benchmark=suite_gsm8k": ["benchmark.gsm8k.path=q.jsonl"],
    "experiment=tiny": ["verifier.source=/nowhere"],
    "sampler=hf_assisted": ["sampler.assistant=/nowhere"],
    "eval experiment=speed": ["methods.hf_assisted.assistant=/nowhere"],
    "train experiment=drafter_options": ["objective=ce_decay"],
    "train experiment=fig10": ["objective=ce_decay"],
    "benchmark=reasoning_gym": ["benchmark.dataset=chain_sum"],
    "train experiment=objectives": ["objective=streak", "start_from=/nowhere"],
    "experiment=table4": ["verifier.source=/nowhere"],
}
OPTIONS = [
    (script, f"{group}={path.stem}")
    for script, groups in GROUPS.items()
    for group in groups
    for path in sorted((CONF / group).glob("*.yaml"))
    if path.stem not in SHARED
]
EXPERIMENTS = [
    (script, path.stem)
    for script, path in itertools.product(SCHEMAS, sorted((CONF / "experiment").glob("*.yaml")))
    # one that trains nothing may choose what train.py does not know, such as a sampler
    if script == "eval"
    or not (CONF / "experiment/eval" / path.name).exists()
    or (CONF / "experiment/train" / path.name).exists()
]
COMMANDS = [  # what the README and the issue promise
    ("train", ["model=smollm2_block", "verifier=smollm2", "objective=streak", "max_steps=2000"]),
    ("train", ["data.online=true"]),
    ("train", ["objective=dpace"]),
    ("train", ["logger=[csv,wandb,tensorboard]"]),
    ("train", ["resume=true"]),
    ("train", ["model=smollm2_prefix", "model.attention=bidirectional"]),
    ("train", ["resume=outputs/train/2026-01-01/00-00-00"]),
    ("eval", ["sampler.K=8", "sampler.gamma=8"]),
    ("eval", ["sampler=tree", "sampler.num_nodes=auto", "sampler.tree_temperature=0.8"]),
    ("eval", ["prompt='Why is the sky blue?'"]),
    ("eval", ["drafter=some/folder", "benchmark=humaneval"]),
    ("eval", ["benchmark=jsonl", "benchmark.path=../shared/data/gsm8k_test.jsonl", "benchmark.prompt_field=question"]),
    ("eval", ["verifier.temperature=0.7", "sampler=specinfer", "drafter=untrained"]),
    ("eval", ["verifier.temperature=0.7", "sampler=traversal", "drafter=untrained"]),
    ("eval", ["verifier=hf", "verifier.source=/some/folder"]),
    ("eval", ["sampler=drafters", "sampler.drafters=[{drafter: shipped, K: 4, temperature: 1.0}, {drafter: a/best}]"]),
]
WRONG = [  # (script, overrides, what the message must name)
    ("eval", ["+typo=1"], "'typo'"),
    ("eval", ["+sampler.gama=3"], "did you mean 'sampler.gamma'"),
    ("eval", ["sampler.gamma=0"], "sampler.gamma=0"),
    ("eval", ["sampler.K=0"], "sampler.K=0"),
    ("eval", ["sampler.gamma=two"], "sampler.gamma='two': expected an integer"),
    ("eval", ["sampler.K=1.5"], "sampler.K=1.5: expected an integer"),
    ("eval", ["sampler.K=true"], "sampler.K=True"),
    ("eval", ["verifier.temperature=-1"], "verifier.temperature=-1"),
    ("eval", ["verifier.temperature=nan"], "verifier.temperature=nan"),
    ("eval", ["benchmark=jsonl"], "benchmark.path"),
    ("eval", ["sampler=tree", "sampler.num_nodes=all"], "sampler.num_nodes='all'"),
    ("eval", ["sampler=tree", "sampler.max_nodes=auto"], "sampler.max_nodes='auto'"),
    ("eval", ["sampler=drafters", "sampler.drafters=[{drafter: a, K: 0}]"], "sampler.drafters[0].K=0"),
    ("eval", ["sampler=drafters", "sampler.drafters=shipped"], "sampler.drafters='shipped': expected a list"),
    ("eval", ["color=red"], "color='red': expected one of"),
    ("eval", ["sampler._target_=specdiff2.nothing.Here"], "sampler._target_"),
    ("eval", ["+methods={a: {_target_: specdiff2.runtime.factories.SamplerSettings, gama: 3}}"], "methods.a.gama"),
    ("train", ["+typo=1"], "'typo'"),
    ("train", ["model.gamma=0"], "model.gamma=0"),
    ("train", ["model.gamma=two"], "model.gamma='two'"),
    ("train", ["+model.gama=3"], "did you mean 'model.gamma'"),
    ("train", ["max_steps=0"], "max_steps=0"),
    ("train", ["num_probe_prompts=0"], "num_probe_prompts=0"),
    ("train", ["+objective.main.decays=0.5"], "objective.main.decays"),
    ("train", ["+trainer.max_step=3"], "trainer.max_step"),
    ("train", ["data.online=maybe"], "data.online='maybe': expected true or false"),
    ("train", ["+data.extra=1"], "data.extra"),
    ("train", ["+paths.extra=1"], "paths.extra"),
    ("train", ["verifier=hf"], "verifier.source"),
    ("train", ["trainer=default", "trainer.devices=null", "seed=-1"], "seed=-1"),
]


def checked(script: str, overrides: list[str], folder: Path) -> dict:
    return build.check(build.load_config(CONF, script, overrides, folder), SCHEMAS[script])


def required(script: str, option: str) -> list[str]:
    return REQUIRED.get(option, []) + REQUIRED.get(f"{script} {option}", [])


@pytest.mark.parametrize(("script", "option"), OPTIONS)
def test_every_option_composes_and_validates(script: str, option: str, tmp_path: Path) -> None:
    assert checked(script, [option, *required(script, option)], tmp_path)["paths"]["run"] == str(tmp_path)


@pytest.mark.parametrize(("script", "name"), EXPERIMENTS)
def test_every_experiment_composes_and_its_parts_instantiate(script: str, name: str, tmp_path: Path) -> None:
    option = f"experiment={name}"
    config = checked(script, [option, *required(script, option)], tmp_path)
    if script == "train":
        schedule = build.instantiate(config["objective"])
        assert isinstance(schedule, ObjectiveSchedule) and schedule.warmup_steps < config["max_steps"]
        for section in ("train_prompts", "val_prompts", "rollouts", "module"):
            build.instantiate(config["data"][section])
    else:
        for node in all_methods(config).values():
            assert isinstance(build.instantiate(node), SamplerSettings | HFSettings)
        build.instantiate(config["benchmark"])


@pytest.mark.parametrize(("script", "overrides"), COMMANDS)
def test_promised_commands_compose(script: str, overrides: list[str], tmp_path: Path) -> None:
    checked(script, overrides, tmp_path)


@pytest.mark.parametrize(("script", "overrides", "named"), WRONG)
def test_wrong_settings_are_refused_by_name(script: str, overrides: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(script, overrides, tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize(("key", "near"), [("gama", "gamma"), ("sampler.gama", "sampler.gamma"), ("sed", "seed")])
def test_keys_unknown_to_hydra_get_the_nearest_one(key: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        build.load_config(CONF, "eval", [f"{key}=3"], tmp_path)
    message = str(clear_composition_error(caught.value, CONF))
    assert repr(key) in message and near in message


def test_demo_compares_before_and_after_with_the_same_drafts(tmp_path: Path) -> None:
    methods = checked("eval", ["experiment=demo", "sampler.K=3"], tmp_path)["methods"]
    assert list(methods) == ["specdiff", "specdiff_distilled", "specdiff2", "tree_match"]
    assert methods["specdiff"]["drafter"].endswith("smollm2_block/before") and methods["specdiff"]["K"] == 1
    # the two single-draft rows differ in the drafter alone, so their streaks show what training brought
    differing = {k for k, v in methods["specdiff"].items() if methods["specdiff_distilled"][k] != v}
    assert differing == {"name", "drafter"}
    assert methods["specdiff_distilled"]["drafter"] == methods["specdiff2"]["drafter"]
    assert [methods[name]["K"] for name in ("specdiff2", "tree_match")] == [3, 3]
    assert methods["specdiff2"]["drafter"] == methods["tree_match"]["drafter"]


def test_selection_before_a_ratio_rule_is_refused_without_a_model(tmp_path: Path) -> None:
    config = checked("eval", ["sampler.rule=leviathan"], tmp_path)
    with pytest.raises(NotLosslessError):
        build.instantiate(config["sampler"])


def test_precision_follows_the_machine_or_the_user(tmp_path: Path) -> None:
    assert checked("train", [], tmp_path)["trainer"]["precision"] in ("bf16-mixed", "32-true")
    assert checked("train", ["trainer.precision=64-true"], tmp_path)["trainer"]["precision"] == "64-true"


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "gpu"), (False, "cpu")])
def test_training_runs_where_the_verifier_is(
    has_gpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    precision = "trainer.precision=32-true"
    assert checked("train", [precision], tmp_path)["trainer"]["accelerator"] == expected
    assert checked("train", [precision, "trainer.accelerator=cpu"], tmp_path)["trainer"]["accelerator"] == "cpu"


def test_warmup_is_a_share_or_a_number_of_steps(tmp_path: Path) -> None:
    share = checked("train", ["max_steps=10", "objective.warmup_share=0.3"], tmp_path)
    assert build.instantiate(share["objective"]).warmup_steps == 3
    steps = checked("train", ["max_steps=10", "objective.warmup_steps=7"], tmp_path)
    assert build.instantiate(steps["objective"]).warmup_steps == 7
    too_many = checked("train", ["max_steps=10", "objective.warmup_steps=10"], tmp_path)
    with pytest.raises(ConfigError, match=r"warmup_steps=10"):
        build.instantiate(too_many["objective"])


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        (["objective.steps=500"], [500, 1000]),  # the warm-up is half of it all
        (["objective.steps=500", "objective.warmup_steps=20"], [20, 520]),
        (["objective.steps=500", "max_steps=600"], [100, 600]),
        (["objective=ce", "objective.steps=70"], [70]),
    ],
)
def test_distillation_steps_decide_how_long_a_training_is(overrides, stages, tmp_path: Path) -> None:
    config = checked("train", overrides, tmp_path)
    schedule = build.instantiate(config["objective"])
    assert [schedule.warmup_steps] * (len(stages) > 1) + [config["trainer"]["max_steps"]] == stages
    assert config["scheduler"]["num_steps"] == stages[-1]


def test_distillation_steps_beside_other_max_steps_are_refused(tmp_path: Path) -> None:
    config = checked("train", ["objective.steps=601", "max_steps=600"], tmp_path)
    with pytest.raises(ConfigError, match=r"objective\.steps=601 .*max_steps=600: leave max_steps out"):
        build.instantiate(config["objective"])


def test_no_python_in_yaml_and_no_equals_sign_in_names() -> None:
    for path in CONF.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert "!!python" not in text and "eval(" not in text, path
        for line in text.split("\n"):
            code = line.split("#")[0]
            if any(key in code for key in ("filename:", "dirpath:", "subdir:", " dir:")):
                assert "=" not in code, (path, line)


def test_locate_says_what_it_could_not_find() -> None:
    assert locate("torch.optim.AdamW", "optimizer._target_").__name__ == "AdamW"
    with pytest.raises(ConfigError, match="optimizer"):
        locate("torch.optim.AdamV", "optimizer._target_")


def test_constructor_errors_come_through_unwrapped() -> None:
    node = {"_target_": "specdiff2.data.prompts.GsmSymbolicPrompts", "split": "trian"}
    with pytest.raises(SpecDiffError, match="trian"):
        build.instantiate(node)
