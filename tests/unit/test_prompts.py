"""Prompt sources: disjoint splits, field mapping, clear errors, no network (case 29, data part)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdiff2.data.fields import get_field, to_answer, to_messages
from specdiff2.data.gsm_symbolic import split_templates
from specdiff2.data.prompts import GsmSymbolicPrompts, HubPrompts, HumanEvalPrompts, JsonlPrompts
from specdiff2.types import ConfigError, CorruptFileError

BENCHMARK_FILES = {
    "gsm8k_test": (1319, dict(prompt_field="question", answer_field="answer")),
    "gsm8k_train": (7473, dict(prompt_field="question", answer_field="answer")),
    "math500_test": (500, dict(prompt_field="problem", answer_field="answer", id_field="unique_id")),
    "humaneval": (164, dict(prompt_field="prompt", id_field="task_id", meta_fields=["entry_point", "test"])),
    "spec_bench": (480, dict(prompt_field="turns", id_field="question_id", meta_fields=["category"])),
    "alpaca_seed": (175, dict(prompt_field="instruction", id_field="id")),
}


def shared_data() -> Path | None:
    """The folder of benchmark files: SPECDIFF2_DATA, or shared/data beside the repository."""
    here = Path(__file__).resolve()
    candidates = [Path(os.environ["SPECDIFF2_DATA"])] if "SPECDIFF2_DATA" in os.environ else []
    candidates += [parent / "shared" / "data" for parent in here.parents[2:4]] + [Path("/work/shared/data")]
    return next((folder for folder in candidates if folder.is_dir()), None)


def questions(source) -> set[str]:
    return {prompt.messages[0]["content"] for prompt in source.load()}


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


# ---------------------------------------------------------------- gsm_symbolic
def test_gsm_symbolic_splits_share_no_question():
    sets = [questions(GsmSymbolicPrompts(split, num_prompts=300)) for split in ("train", "val", "test")]
    sets.append(questions(GsmSymbolicPrompts("test", "held_out", num_prompts=60)))
    # another seed stays inside its split: a test question can not become a training question
    sets.append(questions(GsmSymbolicPrompts("train", num_prompts=300, seed=7)) - sets[0])
    assert [len(s) for s in sets[:4]] == [300, 300, 300, 60]
    for index, one in enumerate(sets):
        for other in sets[index + 1 :]:
            assert not one & other


def test_gsm_symbolic_templates():
    seen = {p.meta["template"] for p in GsmSymbolicPrompts(num_prompts=200).load()}
    held_out = {p.meta["template"] for p in GsmSymbolicPrompts("test", "held_out", num_prompts=200).load()}
    assert len(seen) == 68 and len(held_out) == 17 and not seen & held_out
    both = [p.meta["template"] for p in GsmSymbolicPrompts("val", "all", num_prompts=170).load()]
    assert sorted(both) == sorted([*seen, *held_out] * 2), "templates take turns"


def test_gsm_symbolic_says_when_there_are_no_more_questions(monkeypatch):
    monkeypatch.setattr("specdiff2.data.gsm_symbolic._MAX_TRIES", 2)
    with pytest.raises(ConfigError, match=r"num_prompts=5000.*ask for fewer"):
        GsmSymbolicPrompts("test", "held_out", num_prompts=5000).load()


def test_template_split_never_changes():
    held_out, seen = split_templates(list(range(10)))
    assert (held_out, seen) == split_templates(list(range(9, -1, -1)))
    assert sorted(held_out + seen) == list(range(10)) and len(held_out) == 2


def test_gsm_symbolic_is_the_same_in_every_process():
    code = (
        "from specdiff2.data.prompts import GsmSymbolicPrompts as G; import json;"
        "prompts = G(num_prompts=5, seed=3).load();"
        "print(json.dumps([[p.prompt_id, p.messages[0]['content'], p.answer] for p in prompts]))"
    )
    env = os.environ | {"PYTHONHASHSEED": "123"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    here = [[p.prompt_id, p.messages[0]["content"], p.answer] for p in GsmSymbolicPrompts(num_prompts=5, seed=3).load()]
    assert json.loads(out) == here
    assert all(float(answer) == float(answer) for _, _, answer in here)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        (dict(split="dev"), "split"),
        (dict(templates="some"), "templates"),
        (dict(split="train", templates="held_out"), "templates"),
        (dict(split="train", templates="all"), "templates"),
        (dict(num_prompts=0), "num_prompts"),
        (dict(seed=-1), "seed"),
    ],
)
def test_gsm_symbolic_refuses(kwargs, named):
    with pytest.raises(ConfigError, match=named):
        GsmSymbolicPrompts(**kwargs)


def test_importing_prompts_does_not_import_the_generators():
    code = "import specdiff2.data.prompts, sys; assert not {'reasoning_gym', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- JSONL
@pytest.mark.parametrize("name", BENCHMARK_FILES)
def test_every_benchmark_file_loads(name):
    folder = shared_data()
    if folder is None or not (folder / f"{name}.jsonl").is_file():
        pytest.skip("no ../shared/data")
    num_rows, fields = BENCHMARK_FILES[name]
    prompts = JsonlPrompts(folder / f"{name}.jsonl", **fields).load()
    assert len(prompts) == num_rows == len({p.prompt_id for p in prompts})
    assert all(p.messages[-1]["role"] == "user" and p.messages[-1]["content"].strip() for p in prompts)
    if name.startswith("gsm8k"):
        assert all(p.answer and "####" not in p.answer for p in prompts)
        float(prompts[0].answer)
    if name == "spec_bench":
        assert prompts[0].meta == {"category": "writing"} and prompts[0].messages[0]["content"].startswith("Compose")


def test_limit_skip_and_default_ids(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps({"q": f"question {i}"}) for i in range(5)))
    prompts = JsonlPrompts(path, "q", skip=1, limit=2).load()
    assert [(p.prompt_id, p.messages[0]["content"]) for p in prompts] == [
        ("a/00002", "question 1"),
        ("a/00003", "question 2"),
    ]


def test_line_separator_inside_a_string_and_template(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", '{"q": "one\u2028two \u0085 {x}"}')
    (prompt,) = JsonlPrompts(path, "q", template="Say: {prompt}!").load()
    assert prompt.messages == [{"role": "user", "content": "Say: one\u2028two \u0085 {x}!"}]


def test_errors_name_file_and_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", '{"q": "fine", "id": 1}', '{"other": 1, "id": 2}')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: no field 'q'.*the row has: other, id"):
        JsonlPrompts(path, "q").load()
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the prompt is empty"):
        JsonlPrompts(write_lines(path, '{"q": "fine"}', '{"q": " "}'), "q").load()
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the prompt field is a int"):
        JsonlPrompts(write_lines(path, '{"q": 3}'), "q").load()
    with pytest.raises(CorruptFileError, match=r"a\.jsonl:2: not valid JSON"):
        JsonlPrompts(write_lines(path, '{"q": "fine"}', '{"q": "cut o'), "q").load()
    with pytest.raises(CorruptFileError, match=r"a\.jsonl:1: a JSON list"):
        JsonlPrompts(write_lines(path, "[1]"), "q").load()
    path.write_bytes(b'{"q": "\xff"}\n')
    with pytest.raises(CorruptFileError, match=r"a\.jsonl:1: not UTF-8"):
        JsonlPrompts(path, "q").load()
    with pytest.raises(ConfigError, match="'x' occurs twice"):
        JsonlPrompts(write_lines(path, *['{"q": "a", "id": "x"}'] * 2), "q", id_field="id").load()
    with pytest.raises(ConfigError, match="no prompt"):
        JsonlPrompts(write_lines(path), "q").load()
    with pytest.raises(ConfigError, match=r"nothing\.jsonl.*not found"):
        JsonlPrompts(tmp_path / "nothing.jsonl", "q").load()


def test_field_paths():
    row = {"turns": ["a", "b"], "x": {"y": [{"z": 1}]}, "a.b": "dotted"}
    assert get_field(row, "turns.1", "here") == get_field(row, "turns[1]", "here") == "b"
    assert get_field(row, "x.y[0].z", "here") == 1
    assert get_field(row, "a.b", "here") == "dotted"
    for path, at in (("turns.2", "'2'"), ("x.q", "'q'"), ("x.y.0.z.w", "'w'")):
        with pytest.raises(ConfigError, match=f"no field '{path}'.*stopped at {at}"):
            get_field(row, path, "here")


def test_conversations_stop_at_the_first_question():
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "!"},
    ]
    assert to_messages(chat, "here") == chat[:2]
    assert to_messages([{"from": "human", "value": "Hi"}], "here") == [{"role": "user", "content": "Hi"}]
    for empty in ([], [""], [{"role": "assistant", "content": "x"}]):
        with pytest.raises(ConfigError, match="empty"):
            to_messages(empty, "here")
    with pytest.raises(ConfigError, match="role and content"):
        to_messages([{"text": "x"}], "here")


def test_answers():
    assert to_answer("We add.\n#### 1,234") == "1,234"
    assert [to_answer(value) for value in (None, 7, " x ")] == [None, "7", "x"]


def test_description_follows_content_not_folder(tmp_path):
    (tmp_path / "b").mkdir()
    one, two = (write_lines(tmp_path / name, '{"q": "a"}') for name in ("x.jsonl", "b/x.jsonl"))
    assert JsonlPrompts(one, "q").describe() == JsonlPrompts(two, "q").describe()
    write_lines(two, '{"q": "b"}')
    assert JsonlPrompts(one, "q").describe() != JsonlPrompts(two, "q").describe()


# ---------------------------------------------------------------- HumanEval
def test_humaneval_from_the_package():
    prompts = HumanEvalPrompts().load()
    assert len(prompts) == 164 and prompts[0].prompt_id == "HumanEval/0"
    assert prompts[0].meta["prompt"] in prompts[0].messages[0]["content"]
    assert {"entry_point", "test", "canonical_solution"} <= prompts[0].meta.keys()
    assert [p.prompt_id for p in HumanEvalPrompts(limit=2, skip=1).load()] == ["HumanEval/1", "HumanEval/2"]


# ---------------------------------------------------------------- datasets
def test_hub_source_reads_local_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"q": f"one\u2028two {i}", "a": f"#### {i}"} for i in range(4)]
    path = write_lines(tmp_path / "a.jsonl", *map(json.dumps, rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name, streaming in ((path, False), (tmp_path / "a.parquet", False), (path, True)):
        source = HubPrompts(str(name), prompt_field="q", answer_field="a", limit=2, skip=1, streaming=streaming)
        got = [(p.messages[0]["content"], p.answer) for p in source.load()]
        assert got == [("one\u2028two 1", "1"), ("one\u2028two 2", "2")]
    write_lines(path, '{"q": "fine"}', '{"q": "cut o')
    with pytest.raises(CorruptFileError, match=r"a\.jsonl:2"):
        HubPrompts(str(path), prompt_field="q").load()
    with pytest.raises(ConfigError, match="split 'test'"):
        HubPrompts(str(tmp_path / "a.parquet"), split="test", prompt_field="q").load()
    with pytest.raises(ConfigError, match=r"gone\.jsonl.*no such file"):
        HubPrompts(str(tmp_path / "gone.jsonl"), prompt_field="q").load()


def test_case_29_offline_hub_fails_fast_and_names_it(tmp_path):
    code = (
        "from specdiff2.data.prompts import HubPrompts\n"
        "from specdiff2.types import ConfigError\n"
        "import time; start = time.monotonic()\n"
        "try: HubPrompts('openai/gsm8k', 'main', 'test', 'question').load()\n"
        "except ConfigError as error: print(error)\n"
        "print(time.monotonic() - start)\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert float(out.splitlines()[-1]) < 10
    assert "'openai/gsm8k'" in out and "'main'" in out and "HF_HUB_OFFLINE" in out
