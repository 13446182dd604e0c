"""Every experiment of conf/experiment runs on a tiny pair: two training steps, one prompt decoded by each method."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from entry_runs import ROOT, Options, evaluate_here, strict_json, train_here

from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.grid import all_methods

CONF = ROOT / "conf"
OTHER_TASKS = {"fig6", "speed_law"}  # not decoded by a benchmark
MEASURED = sorted({path.stem for path in (CONF / "experiment/eval").glob("*.yaml")} - {"tiny"} - OTHER_TASKS)
# in the order in which one starts from what another has published
TRAINED = [
    ("align_base", ["objective=mdm"]),
    *[("align", [f"objective={name}"]) for name in ("mdm", "ar_distill", "distillspec", "streak")],
    ("align_ar", ["model=smollm2_ar", "objective=ce"]),
    ("align_eagle", ["model=smollm2_eagle", "objective=ce"]),
    ("fig7", ["objective=streak", "callbacks.drafter_export.keep_every_n_steps=1"]),
    ("fig10", ["objective=ce_decay"]),
    ("table4", []),
    ("objectives", ["objective=dpace", "start_from=outputs/drafters/smollm2_block_base/last"]),
    ("drafter_options", ["objective=ce_decay", "publish=true"]),
    ("rollout_temperature", ["model_name=rollouts_t0"]),
    ("demo", ["~data.train_prompts.num_prompts", "~data.val_prompts.num_prompts"]),  # those of other prompts
]
LAYERS = {"smollm2_ar": 2, "smollm2_eagle": 1}  # the tiny verifier has two


@pytest.fixture(scope="module")
def options(tiny_options: Options) -> Options:
    """The tiny pair without ``experiment=tiny``."""
    short = ["data.rollouts.max_new_tokens=24", "data.rollouts.batch_size=8", "data.module.batch_size=2",
             "data.module.windows_per_rollout=3", "data.module.val_windows_per_rollout=2", "max_steps=2",
             "objective.warmup_steps=0", "scheduler.warmup_steps=0", "num_probe_prompts=1"]  # fmt: skip
    verifier = ["verifier=hf", *tiny_options["eval"][1:3]]
    prompts = [option for option in tiny_options["train"] if option.startswith("data")]
    benchmark = [option for option in tiny_options["eval"] if option.startswith("benchmark")][:-1]
    return {
        "train": [*verifier, *prompts, *short],
        "eval": [*verifier, *benchmark, "benchmark.limit=1", "max_new_tokens=6", "num_warmup=0"],
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, options: Options) -> Path:
    """A folder in which every training has run."""
    folder = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, (name, extra) in enumerate(TRAINED):
            model = next((text.partition("=")[2] for text in extra if text.startswith("model=")), "smollm2_block")
            layers = f"model.num_layers={LAYERS.get(model, 2)}"
            train_here(options, folder / "runs" / str(number), f"experiment={name}", layers, *extra)
    return folder


def test_every_training_is_listed() -> None:
    assert {name for name, _ in TRAINED} | {"tiny"} == {p.stem for p in (CONF / "experiment/train").glob("*.yaml")}


def test_trainings_publish_what_the_evaluations_name(work: Path) -> None:
    published = work / "outputs/drafters"
    for name in ("base", "mdm", "ar_distill", "distillspec", "streak", "gamma32"):
        assert (published / f"smollm2_block_{name}/best/config.json").is_file(), name
    for name in ("smollm2_ar/best", "smollm2_eagle/best", "smollm2_block_steps/step-1", "same_size/best"):
        assert (published / name / "config.json").is_file(), name


@pytest.mark.parametrize("name", MEASURED)
def test_every_method_of_an_experiment_decodes(
    name: str, work: Path, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    overrides = [f"experiment={name}", "drafter=outputs/drafters/smollm2_block_streak/best"]
    if name == "speed":
        overrides.append("methods.hf_assisted.assistant=outputs/drafters/smollm2_ar/best")
    if name in ("demo", "fig9", "fig10"):  # these name the drafter themselves
        overrides.pop(1)
    if name in ("demo", "rollout_temperature"):
        overrides += ["~benchmark.num_prompts", *(["~benchmark.num_held_out_prompts"] if name == "demo" else [])]
    cfg = build.load_config(CONF, "eval", [*options["eval"], *overrides], tmp_path / "look")
    config = build.check(cfg, EvalConfig)
    methods = all_methods(config)
    for folder in {Path(str(node.get("drafter"))) for node in methods.values()}:
        if not folder.exists() and folder.parts[0] in ("outputs", "."):  # of an experiment that is trained otherwise
            shutil.copytree("outputs/drafters/smollm2_block_streak/best", folder)
    run = evaluate_here(options, tmp_path / "run", *overrides)
    rows = strict_json(run / "summary.json")["rows"]
    assert [row["method"] for row in rows] == ["autoregressive", *methods]
    if config["verifier"]["temperature"] == 0:  # token for token, in float32
        assert all(row["lossless_check"]["identical"] == 1 for row in rows[1:])
