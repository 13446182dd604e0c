"""Python function stubs of our own writing, in the form of HumanEval's but none of its problems.

``assets/code_stubs.txt`` holds task specifications: signature, docstrings, a reference and arguments for the
examples. A stub is a specification with one choice of names, wording, threshold and layout; what its examples
show is computed by running the reference, so it is right. The splits share no specification.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from string import Template
from typing import Any

from specdiff2.data.humaneval_prompts import INSTRUCTION
from specdiff2.data.own_texts import OwnSplit, asset_digest, check_enough, check_own_arguments, of_split, read_blocks
from specdiff2.data.prompt import Prompt

_ASSET = "code_stubs.txt"
_VARIANTS = 4
_WIDTH = 92
_TYPING_NAMES = ("Any", "Dict", "List", "Optional", "Tuple")


class CodeStubPrompts:
    """``num_prompts`` stubs, each specification once before any comes a second time.

    Args:
        split: ``train`` has about 90 % of the specifications, ``val`` the others.
        seed: decides the order, and so which stubs are left out.
    """

    def __init__(self, split: OwnSplit = "train", num_prompts: int = 320, seed: int = 0) -> None:
        check_own_arguments(split, num_prompts, seed)
        self.split, self.num_prompts, self.seed = split, num_prompts, seed

    def describe(self) -> dict[str, Any]:
        return {
            "source": "code_stubs",
            "split": self.split,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "sha256": asset_digest(_ASSET),
        }

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the split does not have that many stubs.
        """
        specs = of_split(load_specs(), lambda spec: spec.key, self.split)
        check_enough("code_stubs", self.split, self.num_prompts, len(specs) * _VARIANTS)
        chosen: list[tuple[StubSpec, int]] = []
        for variant in range(_VARIANTS):
            chosen += random.Random(self.seed * _VARIANTS + variant).sample([(s, variant) for s in specs], len(specs))
        return [self._prompt(spec.stub(variant), spec, variant) for spec, variant in chosen[: self.num_prompts]]

    def _prompt(self, stub: Stub, spec: StubSpec, variant: int) -> Prompt:
        return Prompt(
            prompt_id=f"code_stub/{self.split}/{spec.key}/{variant}",
            messages=[{"role": "user", "content": INSTRUCTION.replace("{prompt}", stub.text)}],
            meta={"spec": spec.key, "entry_point": stub.name, "prompt": stub.text, "reference": stub.reference},
        )


@dataclass(frozen=True)
class Stub:
    """``text`` ends after the docstring; ``reference`` is the same function with its body."""

    name: str
    text: str
    reference: str
    examples: tuple[tuple[str, str], ...]  # call and result, both as source text


@dataclass(frozen=True)
class StubSpec:
    """One task; ``$f``, ``$a`` and ``$k`` stand for function name, first argument and threshold."""

    names: list[str]
    arguments: list[str]
    thresholds: list[str]
    signature: str
    docs: list[str]
    body: list[str]
    calls: list[str]

    @property
    def key(self) -> str:
        return self.names[0]

    def stub(self, variant: int) -> Stub:
        """The stub number ``variant`` (0 .. 3): names, wording, threshold and layout take turns."""
        name = self.names[variant % len(self.names)]
        values = {"f": name, "a": self.arguments[(variant + variant // 3) % len(self.arguments)]}
        values["k"] = self.thresholds[variant % len(self.thresholds)] if self.thresholds else ""
        signature = Template(f"def $f{self.signature}:").substitute(values)
        if variant % 2:  # built-in generics need no import
            signature = re.sub(r"\b(List|Dict|Tuple)\[", lambda match: match[0].lower(), signature)
        imports = [word for word in _TYPING_NAMES if re.search(rf"\b{word}\b", signature)]
        header = f"from typing import {', '.join(imports)}\n\n\n{signature}" if imports else signature
        body = "\n".join(Template(line).substitute(values) for line in self.body)
        reference = f"{header}\n{body}\n"
        shown = self.calls[:2] if variant % 2 == 0 else [self.calls[variant // 2 % len(self.calls)]]
        examples = run_examples(name, reference, tuple(f"{name}({call})" for call in shown))
        doc = Template(self.docs[variant % len(self.docs)]).substitute(values)
        docstring = textwrap.indent(_LAYOUTS[variant](doc, examples), "    ")
        return Stub(name, f"{header}\n{docstring}\n", reference, examples)


@lru_cache(maxsize=1)
def load_specs() -> tuple[StubSpec, ...]:
    """All specifications of the package, in the order of the file."""
    return tuple(_parse(heading, lines) for heading, lines in read_blocks(_ASSET, "## "))


def run_examples(name: str, reference: str, calls: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """``(call, result)`` as source text. Runs code of this package's own asset, never a model's output."""
    namespace: dict[str, Any] = {}
    exec(reference, namespace)
    return tuple((call, repr(eval(call, namespace))) for call in calls)


def _parse(heading: str, lines: list[str]) -> StubSpec:
    names, arguments, thresholds = [part.split() for part in (heading + "||").split("|")[:3]]
    signature, *rest = lines
    docs = [line for line in rest if line[0] not in "=> "]
    body = [line.replace("=", "    return", 1) if line[0] == "=" else line for line in rest if line[0] in "= "]
    calls = [line[1:].strip() for line in rest if line[0] == ">"]
    return StubSpec(names, arguments, thresholds, signature, docs, body, calls)


def _wrap(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _doctest(doc: str, examples: tuple[tuple[str, str], ...]) -> str:
    shown = "\n".join(f">>> {call}\n{result}" for call, result in examples)
    return f'""" {_wrap(doc)}\n{shown}\n"""'


def _sentence(doc: str, examples: tuple[tuple[str, str], ...]) -> str:
    shown = "\n".join(f"For example, {call} returns {result}." for call, result in examples)
    return f'"""{_wrap(doc)}\n\n{shown}\n"""'


def _equation(doc: str, examples: tuple[tuple[str, str], ...]) -> str:
    shown = "\n".join(f"{call} == {result}" for call, result in examples)
    return f'"""\n{_wrap(doc)}\n\nExamples:\n{shown}\n"""'


def _arrow(doc: str, examples: tuple[tuple[str, str], ...]) -> str:
    shown = "\n".join(f"    {call} -> {result}" for call, result in examples)
    return f'"""\n{_wrap(doc)}\n\nExample:\n{shown}\n"""'


_LAYOUTS: tuple[Callable[[str, tuple[tuple[str, str], ...]], str], ...] = (_doctest, _sentence, _equation, _arrow)
