"""The wall between training and evaluation prompts: what counts as the same, speed, files, and the real data."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import byte_tokenizer, tiny_verifier

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.generate import generate_rollouts
from specdiff2.data.overlap import MIN_SHARE, check_no_overlap, explain, find_overlaps, without
from specdiff2.data.prompt import Prompt
from specdiff2.data.prompts import (
    BenchmarkPrompts,
    CodeStubPrompts,
    GsmSymbolicPrompts,
    HumanEvalPrompts,
    JsonlPrompts,
    MixedPrompts,
    OpenQuestionPrompts,
    spec_bench,
)
from specdiff2.data.rollout_prompts import store_signatures
from specdiff2.data.rollouts import RolloutStore, read_manifest
from specdiff2.data.signatures import SIGNATURES_FILE, fold, read_signatures, sign_prompts, sign_texts
from specdiff2.runtime.prompts import LoadedPrompts, keep_apart, load_prompts, never_prompts
from specdiff2.runtime.rollouts import ensure_rollouts, note_rollouts
from specdiff2.runtime.seen_prompts import trained_on, unseen_prompts
from specdiff2.types import ConfigError, CorruptFileError

SHARED = next((p for p in (Path(os.environ.get("SPECDIFF2_DATA", "/nowhere")),
                           Path(__file__).resolve().parents[3] / "shared" / "data") if p.is_dir()), None)  # fmt: skip
LONG = "A plane flies from Oslo to Rome in three hours. How many hours does it take there and back, with one stop?"


def prompt(prompt_id: str, text: str, *later: str) -> Prompt:
    return Prompt(prompt_id, [{"role": "user", "content": text}], later_turns=later)


def words(rng: random.Random, number: int) -> str:
    return " ".join(f"w{rng.randrange(20_000)}" for _ in range(number))


def overlap(train: str, evaluation: str) -> tuple[bool, float] | None:
    found = find_overlaps([prompt("t", train)], [prompt("e", evaluation)])
    return (found[0].exact, found[0].share) if found else None


# ---------------------------------------------------------------- what is the same
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 + 2?", "what  is 2 + 2"),
        ("Say “hello”, please.", "say hello please"),
        ("Well-known  words!", "well known words"),
        ("\uff21\uff22 full width", "ab FULL WIDTH"),
        ("a_b", "a b"),
    ],
)
def test_case_space_and_punctuation_are_folded(one: str, other: str) -> None:
    assert overlap(one, other) == (True, 1.0)


@pytest.mark.parametrize(("one", "other"), [("What is 7 - 2?", "What is 7 + 2?"), ("2 * 3 = ?", "2 / 3 = ?"),
                                            ("x -1", "x 1"), ("Say a", "Say b"), ("???", "!!!")])  # fmt: skip
def test_arithmetic_signs_and_words_are_not(one: str, other: str) -> None:
    assert overlap(one, other) is None
    assert fold("x - 1") == fold("x -1") == ["x", "-", "1"]


def test_half_of_the_grams_of_the_shorter_text() -> None:
    rng = random.Random(0)
    text = words(rng, 27).split()  # 20 grams of 8
    assert overlap(" ".join(text), " ".join(text[:17] + words(rng, 10).split())) == (False, 0.5)
    assert overlap(" ".join(text), " ".join(text[:16] + words(rng, 11).split())) is None
    # contained, in either direction, is the same question with something around it
    wrapped = f"{words(rng, 40)} {' '.join(text)} {words(rng, 40)}"
    assert overlap(" ".join(text), wrapped) == overlap(wrapped, " ".join(text)) == (False, 1.0)
    # nine words have two grams: too few to tell a quotation from a phrase
    assert overlap(" ".join(text[:9]), wrapped) is None and overlap(" ".join(text[:10]), wrapped) == (False, 1.0)
    assert overlap(LONG, LONG.replace("Oslo", "Bergen")) == (False, pytest.approx(0.6, abs=0.1))


def test_a_text_around_every_prompt_is_not_content() -> None:
    rng = random.Random(1)
    frame = words(rng, 30)
    train = [prompt(f"t{i}", f"{frame} {words(rng, 14)}") for i in range(20)]
    evaluation = [prompt(f"e{i}", f"{frame} {words(rng, 14)}") for i in range(20)]
    assert not find_overlaps(train, evaluation)
    leaked = prompt("leak", f"{frame} {train[3].messages[0]['content'].removeprefix(frame)} indeed")
    (found,) = find_overlaps(train, [*evaluation, leaked])
    assert (found.evaluation_id, found.train_id, found.exact) == ("leak", "t3", False)


def test_turns_are_compared_one_by_one() -> None:
    conversation = prompt("c", "Hello there, my friend", LONG)
    assert find_overlaps([prompt("t", LONG)], [conversation])[0].evaluation_id == "c"
    assert find_overlaps([conversation], [prompt("t", LONG.upper())])[0].exact
    shown = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "six"}]
    history = Prompt("h", [*shown, {"role": "user", "content": "short"}])
    assert not find_overlaps([prompt("t", LONG)], [history]), "worked examples are not what is asked"


def test_generated_prompts_overlap_only_as_whole_texts() -> None:
    one = prompt("gsm_symbolic/train/t01/5", LONG)
    assert not find_overlaps([one], [prompt("gsm_symbolic/test/t01/9", LONG.replace("one stop", "two stops"))])
    assert find_overlaps([one], [prompt("gsm_symbolic/test/t01/9", LONG)])[0].exact
    # another source's near copy of a template is an overlap: GSM-Symbolic was made from GSM8K
    assert find_overlaps([one], [prompt("gsm8k/00001", LONG.replace("one stop", "two stops"))])


def test_our_own_sources_have_no_overlap() -> None:
    sources = [GsmSymbolicPrompts("train", num_prompts=136), CodeStubPrompts("train", 320),
               OpenQuestionPrompts("train", 240)]  # fmt: skip
    train = MixedPrompts(sources).load()
    for source in (GsmSymbolicPrompts("test", num_prompts=68), GsmSymbolicPrompts("test", "held_out", 34),
                   HumanEvalPrompts(), OpenQuestionPrompts("val", 40), CodeStubPrompts("val", 20)):  # fmt: skip
        assert not find_overlaps(train, source.load())


def test_ten_thousand_against_ten_thousand_in_seconds() -> None:
    rng = random.Random(2)
    train = [prompt(f"t{i}", words(rng, 60)) for i in range(10_000)]
    evaluation = [prompt(f"e{i}", words(rng, 60)) for i in range(10_000)]
    planted = {f"e{i}": f"t{9_999 - i}" for i in range(0, 10_000, 500)}
    for position, trained in planted.items():
        text = train[int(trained[1:])].messages[0]["content"].split()
        evaluation[int(position[1:])] = prompt(position, " ".join(text[:50] + words(rng, 20).split()))
    start = time.process_time()
    signed = sign_prompts(train), sign_prompts(evaluation)
    found = find_overlaps(*signed)
    assert time.process_time() - start < 30  # 4 s on a free core
    assert {one.evaluation_id: one.train_id for one in found} == planted
    assert all(one.share >= MIN_SHARE and not one.exact for one in found)


# ---------------------------------------------------------------- the check and its message
def test_the_message_names_both_sides_and_the_remedy() -> None:
    train = {"rollouts x": [prompt("a/1", "something else entirely"), prompt("a/2", LONG)]}
    evaluation = [prompt("b/1", "unseen"), prompt("b/2", f"{LONG} Please.")]
    check_no_overlap(train, {"benchmark math": evaluation[:1]}, "do this")
    with pytest.raises(ConfigError) as caught:
        check_no_overlap(train, {"benchmark math": evaluation}, "do this")
    message = str(caught.value)
    for part in ("benchmark math: 1 of 2 prompts", "rollouts x", "'b/2', there 'a/2'", "100% of its word 8-grams",
                 "(0 the same, 1 nearly", "'A plane flies from Oslo", "; do this"):  # fmt: skip
        assert part in message
    found = find_overlaps(train["rollouts x"], evaluation)
    assert [one.prompt_id for one in without(evaluation, found)] == ["b/1"]
    assert "the same text" in explain(find_overlaps([prompt("t", "Hi!")], [prompt("e", "hi")]), "x", "y", [prompt("e", "hi")])  # noqa: E501  # fmt: skip


# ---------------------------------------------------------------- files
def test_signatures_survive_a_file(tmp_path: Path) -> None:
    signed = sign_texts([("a", LONG), ("b/\u2028é", "short"), ("c", "")])
    signed.save(tmp_path / SIGNATURES_FILE)
    read = read_signatures(tmp_path / SIGNATURES_FILE)
    assert read.ids == signed.ids == ["a", "b/\u2028é", "c"]
    for name in ("whole", "grams", "owners"):
        assert np.array_equal(getattr(read, name), getattr(signed, name))
    assert find_overlaps(read, [prompt("e", LONG)])[0].exact
    # the same in every process and on every machine
    assert int(sign_texts([("a", "one two three four five six seven eight")]).grams[0]) == 1126802247
    (tmp_path / SIGNATURES_FILE).write_bytes((tmp_path / SIGNATURES_FILE).read_bytes()[:200])
    with pytest.raises(CorruptFileError, match=r"prompts\.npz: not a file of prompt signatures"):
        read_signatures(tmp_path / SIGNATURES_FILE)


def tiny_store(folder: Path, source: Any) -> tuple[RolloutStore, LoadedPrompts, Any]:
    verifier = tiny_verifier(300, tokenizer=byte_tokenizer(), max_position_embeddings=512)
    loaded = load_prompts(source)
    generate = partial(generate_rollouts, max_new_tokens=2, progress=False)
    return ensure_rollouts(verifier, loaded, generate, folder, named=True), loaded, verifier


def two_sources(tmp_path: Path) -> MixedPrompts:
    paths = []
    for name, texts in (("a", [LONG, "What is two and two?"]), ("b", ["Sing a song of six pence and a pocket of rye"])):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"question": text}) + "\n" for text in texts), encoding="utf-8")
    return MixedPrompts([JsonlPrompts(path, "question") for path in paths])


def test_a_store_lists_its_sources_and_keeps_signatures(tmp_path: Path) -> None:
    store, loaded, verifier = tiny_store(tmp_path / "store", two_sources(tmp_path))
    manifest = json.loads((store.folder / "manifest.json").read_text(encoding="utf-8"))
    assert [(one["file"], one["num_prompts"]) for one in manifest["sources"]] == [("a.jsonl", 2), ("b.jsonl", 1)]
    assert read_manifest(store.folder) == store.fingerprint and "sources" not in store.fingerprint
    kept = store_signatures(store.folder, ChatEncoder.of(verifier))
    assert kept.ids == [one.prompt_id for one in loaded.prompts]
    assert np.array_equal(kept.whole, sign_prompts(loaded.prompts).whole)


def test_older_stores_are_read_from_their_rollouts_and_completed(tmp_path: Path) -> None:
    source = two_sources(tmp_path)
    store, loaded, verifier = tiny_store(tmp_path / "store", source)
    path = store.folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["sources"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    (store.folder / SIGNATURES_FILE).unlink()
    decoded = store_signatures(store.folder, ChatEncoder.of(verifier))
    assert dict(zip(decoded.ids, decoded.whole, strict=True)) == dict(
        zip([one.prompt_id for one in loaded.prompts], sign_prompts(loaded.prompts).whole, strict=True)
    ), "the chat template around them is taken off"
    again, *_ = tiny_store(tmp_path / "store", source)
    assert len(again) == 3 and (store.folder / SIGNATURES_FILE).is_file()
    assert len(json.loads(path.read_text(encoding="utf-8"))["sources"]) == 2


# ---------------------------------------------------------------- training
def test_training_keeps_apart_from_never(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = load_prompts(two_sources(tmp_path))
    assert keep_apart(train, {"never": None}) is train and keep_apart(train, {}) is train
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps({"turns": ["Hello", LONG.lower()]}) + "\n", encoding="utf-8")
    node = {"_target_": "specdiff2.data.prompts.BenchmarkPrompts", "name": "x", "prompt_field": "turns",
            "form": "turns", "path": str(file)}  # fmt: skip
    suite = {"_target_": "specdiff2.runtime.factories.suite", "part": node}
    for never, name in ([str(file)], "bench"), ({"mine": node}, "mine"), ({"s": suite}, r"s\.part"), ([node], "0"):
        with pytest.raises(
            ConfigError, match=rf"data\.train_prompts: 1 of 3 .*data\.never: {name} .*data\.drop_overlap"
        ):
            keep_apart(train, {"never": never, "drop_overlap": False})
    kept = keep_apart(train, {"never": [str(file)], "drop_overlap": True})
    assert [one.prompt_id for one in kept.prompts] == [one.prompt_id for one in train.prompts][1:]
    assert kept.origin != train.origin, "other prompts have rollouts of their own"
    assert [one["num_prompts"] for one in kept.sources] == [1, 1] and "left out" in caplog.text
    assert list(never_prompts({"s": suite})) == ["s.part"]
    file.write_text("".join(json.dumps({"text": p.messages[0]["content"]}) + "\n" for p in train.prompts), "utf-8")
    with pytest.raises(ConfigError, match="no training prompt is left"):
        keep_apart(train, {"never": [str(file)], "drop_overlap": True})


# ---------------------------------------------------------------- evaluation
def trained_drafter(tmp_path: Path, name: str, store: RolloutStore, start_from: str | None = None) -> str:
    """The files of a run and of the drafter it has published, as far as the wall reads them."""
    run, folder = tmp_path / "runs" / name, tmp_path / "drafters" / name
    for path in (run, folder):
        path.mkdir(parents=True)
    config = {"objective": {}, "start_from": start_from, "verifier": {"source": "v"}, "model_name": "m",
              "data": {"folder": None, "name": "none", "rollouts": {}},
              "paths": {"rollouts": str(tmp_path)}}  # fmt: skip
    (run / "run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    note_rollouts(run, [store, store])
    record = {"format": "specdiff2-block-drafter", "format_version": 2, "training": {"run": str(run)}}
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    return str(folder)


def test_evaluation_meets_no_prompt_of_a_drafters_whole_past(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = two_sources(tmp_path)
    first, _, verifier = tiny_store(tmp_path / "first", source.sources[0])
    second, *_ = tiny_store(tmp_path / "second", source.sources[1])
    old = trained_drafter(tmp_path, "old", first)
    new = trained_drafter(tmp_path, "new", second, start_from=old)
    assert list(trained_on(new, verifier.fingerprint)) == [second.folder, first.folder]
    benchmarks = {"math": [prompt("1", f"{LONG} So?"), prompt("2", "Never seen")], "other": [prompt("3", "Nor this")]}
    for drafter in (old, new):  # what it started from counts too
        with pytest.raises(
            ConfigError, match=r"benchmark math: 1 of 2 .*rollouts .*first \(drafter .*drop_overlap=true"
        ):
            unseen_prompts(benchmarks, [drafter], verifier, drop=False)
    kept = unseen_prompts(benchmarks, [old, new, "untrained"], verifier, drop=True)
    assert {name: [one.prompt_id for one in prompts] for name, prompts in kept.items()} == {
        "math": ["2"],
        "other": ["3"],
    }
    assert caplog.text.count("left out: benchmark math: 1 of 2") == 1, "every store is read once"
    with pytest.raises(ConfigError, match="no prompt of benchmark math is left"):
        unseen_prompts({"math": benchmarks["math"][:1]}, [old], verifier, drop=True)


def test_what_is_not_on_this_machine_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, _, verifier = tiny_store(tmp_path / "store", two_sources(tmp_path))
    drafter = trained_drafter(tmp_path, "d", store)
    benchmark = {"math": [prompt("1", LONG)]}
    signatures = (store.folder / SIGNATURES_FILE).read_bytes()
    (tmp_path / "runs" / "d" / "run.json").unlink()
    assert unseen_prompts(benchmark, [drafter], verifier, drop=False) == benchmark
    assert "only sources can be compared" in caplog.text
    (Path(drafter) / SIGNATURES_FILE).write_bytes(signatures)  # a drafter that travels with its signatures
    with pytest.raises(ConfigError, match=r"among those of drafter .*drafters/d"):
        unseen_prompts(benchmark, [drafter], verifier, drop=False)


def test_runs_without_a_note_are_looked_up_by_their_settings(tmp_path: Path) -> None:
    store, _, verifier = tiny_store(tmp_path / "none" / "train-12345678", two_sources(tmp_path))
    drafter = trained_drafter(tmp_path, "d", store)
    (tmp_path / "runs" / "d" / "rollouts.json").unlink()
    assert list(trained_on(drafter, verifier.fingerprint)) == [store.folder]
    assert trained_on(drafter, "another verifier") == {}


# ---------------------------------------------------------------- the real data
needs_data = pytest.mark.skipif(SHARED is None, reason="no shared data")


def rows(file: str, field: str, **options: Any) -> list[Prompt]:
    assert SHARED is not None
    return JsonlPrompts(SHARED / f"{file}.jsonl", field, **options).load()


@needs_data
def test_gsm8k_train_and_test_share_one_near_duplicate() -> None:
    (found,) = find_overlaps(rows("gsm8k_train", "question"), rows("gsm8k_test", "question"))
    assert (found.evaluation_id, found.train_id, found.exact) == ("gsm8k_test/00603", "gsm8k_train/01315", False)


@needs_data
def test_spec_benchs_math_is_gsm8k_test() -> None:
    (math,) = spec_bench(str(SHARED / "spec_bench.jsonl"), groups=["math_reasoning"]).values()  # type: ignore[operator]
    found = find_overlaps(rows("gsm8k_test", "question"), math.load())
    assert len(found) == sum(one.exact for one in found) == 80
    assert not find_overlaps(rows("gsm8k_train", "question"), math.load())


@needs_data
def test_gsm_symbolic_was_made_from_gsm8k_test() -> None:
    train = GsmSymbolicPrompts("train", num_prompts=768).load()
    found = find_overlaps(train, rows("gsm8k_test", "question"))
    assert len(found) == 8 and not any(one.exact for one in found)
    assert not find_overlaps(train, rows("gsm8k_test", "question", limit=40))  # the rows measured in the README


@needs_data
def test_the_alpaca_seed_tasks_are_themselves() -> None:
    tasks = rows("alpaca_seed", "instruction", id_field="id")
    assert len(find_overlaps(tasks, tasks)) == 175
    with_inputs = BenchmarkPrompts("alpaca", "instruction", path=str(SHARED / "alpaca_seed.jsonl"), form="input")  # type: ignore[operator]
    assert len(find_overlaps(tasks, with_inputs.load())) > 100


def test_only_a_verifiers_tokenizer_is_needed(tmp_path: Path) -> None:
    """``unseen_prompts`` runs before drafters load and asks the verifier for no pass."""
    stand_in = SimpleNamespace(tokenizer=byte_tokenizer(), thinking=None, fingerprint="f")
    benchmark = {"math": [prompt("1", "x")]}
    assert unseen_prompts(benchmark, ["untrained"], stand_in, drop=False) == benchmark  # type: ignore[arg-type]
