"""Benchmarks by name: every file of conf/benchmark, their forms, local copies, order, and clear refusals."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdiff2.data.benchmark_prompts import MT_BENCH_CATEGORIES, SPEC_BENCH_GROUPS
from specdiff2.data.prompts import BenchmarkPrompts, HumanEvalPrompts, JsonlPrompts, spec_bench
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.evaluation import named_sources
from specdiff2.types import ConfigError, CorruptFileError

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "benchmark").glob("*.yaml"))
REQUIRED = {
    "jsonl": ["benchmark.path=q.jsonl", "benchmark.prompt_field=question"],
    "hub": ["benchmark.name=a/b", "benchmark.prompt_field=question"],
    "suite_gsm8k": ["benchmark.gsm8k.path=q.jsonl"],
    "reasoning_gym": ["benchmark.dataset=chain_sum"],
}
ON_HUB = ["math500", "gsm8k", "gpqa", "livecodebench", "mtbench", "alpaca"]
SHARED = next((p for p in (Path(os.environ.get("SPECDIFF2_DATA", "/nowhere")),
                           Path(__file__).resolve().parents[3] / "shared" / "data") if p.is_dir()), None)  # fmt: skip
REAL_FILES = {  # benchmark: (file, number of prompts, first id)
    "math500": ("math500_test.jsonl", 500, "math500/000"),
    "gsm8k": ("gsm8k_test.jsonl", 1319, "gsm8k/00000"),
    "mtbench": ("spec_bench.jsonl", 80, "81"),
    "alpaca": ("alpaca_seed.jsonl", 175, "seed_task_0"),
    "humaneval": ("humaneval.jsonl", 164, "HumanEval/0"),
}


def node(name: str, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    options = [f"benchmark={name}", *REQUIRED.get(name, []), *overrides]
    return build.check(build.load_config(CONF, "eval", options, tmp_path), EvalConfig)["benchmark"]


def load(name: str, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return named_sources(node(name, tmp_path, *overrides))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text(prompt: Any) -> str:
    return prompt.messages[-1]["content"]


# ---------------------------------------------------------------- configurations
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_composes_and_instantiates(name: str, tmp_path: Path) -> None:
    assert build.instantiate(node(name, tmp_path)) is not None


def test_suites_take_other_parts_and_paths_by_key(tmp_path: Path) -> None:
    rows = write(tmp_path / "q.jsonl", [{"question": f"what is {i}", "answer": f"#### {i}"} for i in range(3)])
    turns = write(tmp_path / "t.jsonl", [{"turns": ["say a", "again"], "question_id": 7, "category": "stem"}])
    given = [f"benchmark.math.path={rows}", f"benchmark.open.path={turns}", "benchmark.code.limit=2"]
    found = load("math_code_open", tmp_path, "benchmark@benchmark.math=gsm8k", *given)
    assert {name: len(prompts) for name, prompts in found.items()} == {"math": 3, "code": 2, "open": 1}
    assert found["open"][0].later_turns == ("again",) and found["math"][2].answer == "2"


def test_three_tasks_need_no_file(tmp_path: Path) -> None:
    found = load("three_tasks", tmp_path)
    assert {name: len(prompts) for name, prompts in found.items()} == {"math": 40, "code": 40, "open": 40}
    assert all(prompt.meta["held_out"] for prompt in found["math"])


@pytest.mark.parametrize("name", REAL_FILES)
def test_the_real_files_load(name: str, tmp_path: Path) -> None:
    file, number, first = REAL_FILES[name]
    if SHARED is None or not (SHARED / file).is_file():
        pytest.skip("no shared data")
    (found,) = load(name, tmp_path, f"benchmark.path={SHARED / file}", "benchmark.limit=null").values()
    assert (len(found), found[0].prompt_id) == (number, first)
    assert sum(len(prompt.later_turns) for prompt in found) == (80 if name == "mtbench" else 0)
    if name == "math500":
        assert found[1].answer == "p - q"


def test_spec_bench_is_six_benchmarks_of_eighty(tmp_path: Path) -> None:
    if SHARED is None:
        pytest.skip("no shared data")
    path = f"benchmark.path={SHARED / 'spec_bench.jsonl'}"
    found = load("specbench", tmp_path, path, "benchmark.limit=null")
    assert {name: len(prompts) for name, prompts in found.items()} == dict.fromkeys(SPEC_BENCH_GROUPS, 80)
    assert {p.meta["category"] for p in found["mt_bench"]} == set(MT_BENCH_CATEGORIES)
    few = load("specbench", tmp_path, path, "benchmark.limit=2", "benchmark.groups=[qa,rag]")
    assert {name: len(prompts) for name, prompts in few.items()} == {"qa": 2, "rag": 2}
    with pytest.raises(ConfigError, match="groups=\\['math'\\]: expected some of mt_bench"):
        spec_bench(groups=["math"])


# ---------------------------------------------------------------- forms
def gpqa_rows(number: int) -> list[dict[str, str]]:
    wrong = {f"Incorrect Answer {k}": f" wrong {k} \n" for k in (1, 2, 3)}
    return [
        {"Record ID": f"r{i}", "Question": f"question {i}?", "Correct Answer": f"right {i}", **wrong}
        for i in range(number)
    ]


def test_choices_are_shuffled_by_the_seed_and_the_letter_is_right(tmp_path: Path) -> None:
    path = tmp_path / "gpqa_diamond.csv"  # the authors' own format
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(gpqa_rows(1)[0]))
        writer.writeheader()
        writer.writerows(gpqa_rows(80))
    options = (f"benchmark.path={path}", "benchmark.limit=null")
    (prompts,) = load("gpqa", tmp_path, *options, "seed=1").values()
    for index, prompt in enumerate(prompts):
        lines = text(prompt).splitlines()
        assert f"{prompt.answer}) right {index}" in lines
        assert sorted(line[3:] for line in lines if line[1:3] == ") ") == [f"right {index}", *(f"wrong {k}" for k in (1, 2, 3))]  # fmt: skip  # noqa: E501
    letters = Counter(prompt.answer for prompt in prompts)
    assert set(letters) == set("ABCD") and max(letters.values()) < 35  # 80 / 4 = 20 expected
    (again,) = load("gpqa", tmp_path, *options, "seed=1").values()
    (other,) = load("gpqa", tmp_path, *options, "seed=2").values()
    assert [p.answer for p in again] == [p.answer for p in prompts] != [p.answer for p in other]
    assert "".join(str(p.answer) for p in prompts[:16]) == "BBCCCBDDDBBBBDDD", "the same in every process"


def test_code_prompts_show_the_starter_code(tmp_path: Path) -> None:
    common = {"question_content": "Add numbers.", "platform": "leetcode", "difficulty": "easy"}
    rows = [{**common, "question_id": "a", "starter_code": "class Solution:\n    def add(self):"},
            {**common, "question_id": "b", "starter_code": ""}]  # fmt: skip
    path = write(tmp_path / "test6.jsonl", rows)
    (found,) = load("livecodebench", tmp_path, f"benchmark.path={path}").values()
    assert "```python\nclass Solution:\n    def add(self):\n```" in text(found[0])
    assert "standard input" in text(found[1]) and "starter" not in text(found[1])
    assert found[0].prompt_id == "a" and found[0].meta == {"platform": "leetcode", "difficulty": "easy"}


def test_inputs_follow_the_instruction_in_both_layouts(tmp_path: Path) -> None:
    rows = [{"instruction": "Sort.", "input": "b a", "output": "a b"}, {"instruction": "Sing.", "input": ""},
            {"id": "seed", "instruction": "Add.", "instances": [{"input": "1 2", "output": "3"}]}]  # fmt: skip
    (found,) = load("alpaca", tmp_path, f"benchmark.path={write(tmp_path / 'a.jsonl', rows)}").values()
    assert [text(p) for p in found] == ["Sort.\n\nb a", "Sing.", "Add.\n\n1 2"]
    assert [p.prompt_id for p in found] == ["alpaca/00000", "alpaca/00001", "seed"]


def test_turns_in_both_layouts(tmp_path: Path) -> None:
    rows = [{"prompt_id": 5, "prompt": ["one", "two", "three"], "category": "math"},
            {"question_id": 6, "turns": ["four", "five"], "category": "coding"},
            {"question_id": 7, "turns": ["left out"], "category": "translation"}]  # fmt: skip
    path = write(tmp_path / "q.jsonl", rows)
    (found,) = load("mtbench", tmp_path, f"benchmark.path={path}").values()
    assert [(p.prompt_id, text(p), p.later_turns) for p in found] == [
        ("5", "one", ("two", "three")), ("6", "four", ("five",))]  # fmt: skip
    with pytest.raises(ConfigError, match=r"benchmark mtbench \(poetry\): no prompt"):
        load("mtbench", tmp_path, f"benchmark.path={path}", "benchmark.categories=[poetry]")
    broken = write(tmp_path / "b.jsonl", [{"turns": ["one", " "], "question_id": 1, "category": "math"}])
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: .*expected texts, none empty"):
        load("mtbench", tmp_path, f"benchmark.path={broken}")


def test_wrong_forms_are_refused() -> None:
    with pytest.raises(ConfigError, match="form='song': expected one of text, input, choices"):
        BenchmarkPrompts("x", "q", form="song")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="answer_field=None with form='choices'"):
        BenchmarkPrompts("x", "q", form="choices")
    for name in ("limit", "skip", "shuffle_seed"):
        with pytest.raises(ConfigError, match=f"{name}=-1"):
            BenchmarkPrompts("x", "q", **{name: -1})  # type: ignore[arg-type]


# ---------------------------------------------------------------- rows: where from, which, in what order
def test_the_same_rows_from_a_file_and_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"what is {i}", "answer": f"so\n#### {i}"} for i in range(9)]
    file = write(tmp_path / "q.jsonl", rows)
    folder = tmp_path / "copy"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "test-00000-of-00001.parquet")
    parquet = folder / "test-00000-of-00001.parquet"
    choice = ("benchmark.skip=1", "benchmark.limit=4", "benchmark.shuffle_seed=3")
    shown = []
    for path in (file, parquet, folder):
        subset = ["benchmark.subset=null"] if path == folder else []
        for streaming in ("false", "true"):
            options = [f"benchmark.path={path}", f"benchmark.streaming={streaming}", *choice, *subset]
            (found,) = load("gsm8k", tmp_path, *options).values()
            shown.append([(p.prompt_id, text(p), p.answer) for p in found])
    assert shown == [shown[0]] * len(shown) and len(shown[0]) == 4
    assert all(prompt_id == f"gsm8k/0000{answer}" and question == f"what is {answer}" for prompt_id, question, answer in shown[0])  # noqa: E501  # fmt: skip
    assert [answer for *_, answer in shown[0]] != sorted(answer for *_, answer in shown[0])


def test_shuffled_rows_are_the_same_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"q": f"row {i}"} for i in range(20)])
    order = [p.prompt_id for p in JsonlPrompts(path, "q", shuffle_seed=1).load()]
    assert sorted(order) == [p.prompt_id for p in JsonlPrompts(path, "q").load()] and order != sorted(order)
    pages = [JsonlPrompts(path, "q", shuffle_seed=1, skip=skip, limit=10).load() for skip in (0, 10)]
    assert [p.prompt_id for page in pages for p in page] == order
    assert "shuffle_seed" not in JsonlPrompts(path, "q").describe(), "older rollout stores keep their fingerprint"
    assert JsonlPrompts(path, "q", shuffle_seed=1).describe()["shuffle_seed"] == 1


def test_humaneval_from_a_local_copy_is_that_of_the_package(tmp_path: Path) -> None:
    package = HumanEvalPrompts(limit=3).load()
    fields = ("entry_point", "test", "canonical_solution", "prompt")
    rows = [{"task_id": p.prompt_id, **{field: p.meta[field] for field in fields}} for p in package]
    local = HumanEvalPrompts(path=str(write(tmp_path / "h.jsonl", rows)))
    assert local.load() == package and local.describe()["local"] == "h.jsonl"
    assert [p.prompt_id for p in HumanEvalPrompts(shuffle_seed=0, limit=5).load()] != [f"HumanEval/{i}" for i in range(5)]  # noqa: E501  # fmt: skip


# ---------------------------------------------------------------- refusals
def test_case_29_benchmarks_that_are_not_there_fail_in_seconds(tmp_path: Path) -> None:
    """Offline by setting, and by a hub that does not answer, where ``datasets`` alone retries for 23 seconds."""
    code = (
        "import sys, time, yaml; from specdiff2.data.prompts import BenchmarkPrompts\n"
        "from specdiff2.types import ConfigError\n"
        "for name in sys.argv[1:]:\n"
        "    values = yaml.safe_load(open(f'conf/benchmark/{name}.yaml')) | {'choice_seed': 0}\n"
        "    del values['_target_']\n"
        "    start = time.monotonic()\n"
        "    try: BenchmarkPrompts(**values).load()\n"
        "    except ConfigError as error: print(f'{time.monotonic() - start:.1f}', str(error).replace(chr(10), ' '))\n"
    )
    for changes, names in (({"HF_HUB_OFFLINE": "1"}, ON_HUB), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ["gsm8k"])):
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"HF_HOME": str(tmp_path)} | changes
        ran = subprocess.run([sys.executable, "-c", code, *names], env=env, cwd=CONF.parent,
                             capture_output=True, text=True, check=True)  # fmt: skip
        lines = ran.stdout.splitlines()
        assert len(lines) == len(names), ran.stdout
        for name, line in zip(names, lines, strict=True):
            seconds, message = line.split(" ", 1)
            assert float(seconds) < 10 and message.startswith(f"benchmark {name}: ")
            assert "benchmark.path=" in message and "hf download " in message and "--repo-type dataset" in message
            assert ("accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa" in message) == (
                name == "gpqa"
            )
            assert ("hf auth login" in message) == (name == "gpqa")


def test_missing_and_damaged_local_copies_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"benchmark math500: path='gone\.jsonl': not found .*hf download Hugging"):
        load("math500", tmp_path, "benchmark.path=gone.jsonl")
    with pytest.raises(
        ConfigError, match=r"spec_bench_mt_bench: it is not on the hub.*curl -LO https.*question\.jsonl"
    ):
        load("specbench", tmp_path)
    path = write(tmp_path / "q.jsonl", [{"text": "one"}])
    with pytest.raises(ConfigError, match=r"q\.jsonl:1: no field 'answer'.*the row has: text$"):
        load("math500", tmp_path, f"benchmark.path={path}")
    path.write_text('{"problem": "x", "ans', encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"q\.jsonl:1"):
        load("math500", tmp_path, f"benchmark.path={path}")
