"""How rows of benchmarks that are more than one text become prompts: choices, starter code, inputs, several turns.

Rows are read by field mapping (``data.fields``); a form adds what a mapping cannot say. Nothing here reads files.
Field names, as the data sets have them: GPQA ``Question``, ``Correct Answer``, ``Incorrect Answer 1..3``, ``Record ID``
(UKGovernmentBEIS/inspect_ai, benchmarks/gpqa.py; arXiv 2311.12022). LiveCodeBench ``question_content``,
``starter_code`` (LiveCodeBench/LiveCodeBench, lcb_runner/benchmarks/code_generation.py; arXiv 2403.07974). Alpaca
``instruction``, ``input``; the seed tasks ``instances[0].input``. MT-Bench ``prompt``, a list of turns
(HuggingFaceH4/mt_bench_prompts), Spec-Bench ``turns``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from specdiff2.data.fields import FieldMapping, FieldNames, first_field, get_field, has_field
from specdiff2.data.prompt import Prompt
from specdiff2.types import ConfigError

Form = Literal["text", "input", "choices", "code", "turns"]
LETTERS = "ABCD"
_INPUT_FIELDS = ("input", "instances.0.input")
_WRONG_FIELDS = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_CODE_ENDS = (  # with and without starter code; wording of our own
    "Complete the starter code below and answer with the whole program in one Python code block.\n\n```python\n{}\n```",
    "Write a Python program that reads its input from standard input and prints the answer. Answer with the whole "
    "program in one Python code block.",
)


class BenchmarkMapping(FieldMapping):
    """A field mapping with a form.

    Args:
        form: ``text`` (as the mapping says), ``input`` (the row's input below the prompt), ``choices`` (four of them,
            shuffled; the answer is the letter of the right one, from ``answer_field``), ``code`` (with starter code),
            ``turns`` (all texts of the prompt field, one user turn each).
        choice_seed: decides, with the question, the order of its choices.
    """

    def __init__(
        self,
        prompt_field: FieldNames,
        answer_field: str | None,
        id_field: FieldNames | None,
        template: str | None,
        meta_fields: Sequence[str],
        form: Form,
        choice_seed: int = 0,
    ) -> None:
        super().__init__(prompt_field, answer_field, id_field, template, tuple(meta_fields))
        if form not in get_args(Form):
            raise ConfigError(f"form={form!r}: expected one of {', '.join(get_args(Form))}")
        if form == "choices" and answer_field is None:
            raise ConfigError("answer_field=None with form='choices': expected the field of the right choice")
        self.form, self.choice_seed = form, choice_seed

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"form": self.form, "choice_seed": self.choice_seed}

    def to_prompt(self, row: Mapping[str, Any], *, where: str, default_id: str) -> Prompt:
        prompt = super().to_prompt(row, where=where, default_id=default_id)
        if self.form != "text":
            _FORMS[self.form](self, row, where, prompt)
        return prompt

    def prompt_id(self, row: Mapping[str, Any], where: str, default_id: str) -> str:
        """Copies of a data set often leave its ids out: ``default_id`` then."""
        paths = [self.id_field] if isinstance(self.id_field, str) else self.id_field or []
        return next((str(get_field(row, path, where)) for path in paths if has_field(row, path)), default_id)


def _add_input(mapping: BenchmarkMapping, row: Mapping[str, Any], where: str, prompt: Prompt) -> None:
    given = next((str(get_field(row, path, where)) for path in _INPUT_FIELDS if has_field(row, path)), "")
    if given.strip():
        prompt.messages[-1]["content"] += f"\n\n{given}"


def _add_choices(mapping: BenchmarkMapping, row: Mapping[str, Any], where: str, prompt: Prompt) -> None:
    right = str(get_field(row, str(mapping.answer_field), where)).strip()
    choices = [right, *(str(get_field(row, path, where)).strip() for path in _WRONG_FIELDS)]
    question = str(first_field(row, mapping.prompt_field, where))
    order = list(range(len(choices)))
    random.Random(f"{mapping.choice_seed}:{question}").shuffle(order)  # text seeds are the same in every process
    shown = "\n".join(f"{letter}) {choices[index]}" for letter, index in zip(LETTERS, order, strict=True))
    prompt.messages[-1]["content"] += f"\n\n{shown}\n\nEnd your answer with the letter of the right choice."
    prompt.answer = LETTERS[order.index(0)]


def _add_code(mapping: BenchmarkMapping, row: Mapping[str, Any], where: str, prompt: Prompt) -> None:
    starter = str(get_field(row, "starter_code", where)).strip() if has_field(row, "starter_code") else ""
    prompt.messages[-1]["content"] += "\n\n" + (_CODE_ENDS[0].format(starter) if starter else _CODE_ENDS[1])


def _add_turns(mapping: BenchmarkMapping, row: Mapping[str, Any], where: str, prompt: Prompt) -> None:
    found = first_field(row, mapping.prompt_field, where)
    turns = [found] if isinstance(found, str) else list(found)
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{where}: {mapping.prompt_field!r} holds {turns!r}; expected texts, none empty")
    prompt.later_turns = tuple(turns[1:])


_FORMS: dict[str, Callable[[BenchmarkMapping, Mapping[str, Any], str, Prompt], None]] = {
    "input": _add_input,
    "choices": _add_choices,
    "code": _add_code,
    "turns": _add_turns,
}
