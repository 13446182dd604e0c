"""Any task of the package reasoning-gym (github.com/open-thought/reasoning-gym), graded by that task's own scorer.

A prompt carries ``meta["score_answer"]``: answer text -> 0 .. 1, the data set's ``score_answer`` with the entry it was
made from. Knows neither which tasks a model can do nor how an answer is found in a text.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from specdiff2.data.fields import to_messages
from specdiff2.data.prompt import Prompt, check_count
from specdiff2.types import ConfigError

_SEED_STRIDE = 10**6  # entry i of a data set is seeded with its seed + i: neighbouring seeds would share entries
_TRIES_PER_PROMPT = 20  # small tasks repeat questions


class ReasoningGymPrompts:
    """``num_prompts`` questions of one task, none twice.

    Args:
        dataset: name of the task, e.g. ``chain_sum``.
        config: its own settings, e.g. ``{min_terms: 4, max_terms: 4}``; ``size`` and ``seed`` are set by the other two.
        examples: ``{question, answer}`` each, shown before the question as finished turns: how to think.
        template: wraps the question; ``{prompt}`` is replaced.

    Raises:
        ConfigError: a bad number, or an example without question and answer.
    """

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        num_prompts: int = 40,
        seed: int = 0,
        examples: Sequence[Mapping[str, str]] = (),
        template: str | None = None,
    ) -> None:
        check_count("num_prompts", num_prompts, 1)
        check_count("seed", seed, 0)
        if any(set(example) != {"question", "answer"} for example in examples):
            raise ConfigError(f"examples={list(examples)!r}: expected question and answer in each")
        self.dataset, self.config, self.num_prompts, self.seed = dataset, dict(config or {}), num_prompts, seed
        self.examples, self.template = [dict(example) for example in examples], template

    def describe(self) -> dict[str, Any]:
        return {
            "source": "reasoning_gym",
            "name": self.dataset,
            "config": self.config,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "examples": self.examples,
            "template": self.template,
            "reasoning_gym": importlib.metadata.version("reasoning-gym"),
        }

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: no such task, a setting that it refuses, or fewer different questions.
        """
        data = self._create()
        found: dict[str, Prompt] = {}
        for index in range(_TRIES_PER_PROMPT * self.num_prompts):
            entry = data[index]
            if entry["question"] not in found:
                found[entry["question"]] = self._prompt(data, entry, index)
            if len(found) == self.num_prompts:
                return list(found.values())
        raise ConfigError(
            f"num_prompts={self.num_prompts}: {self.dataset} with config={self.config!r} gave only {len(found)} "
            f"different questions in {_TRIES_PER_PROMPT * self.num_prompts} tries; ask for fewer"
        )

    def _prompt(self, data: Any, entry: dict[str, Any], index: int) -> Prompt:
        where = f"{self.dataset} entry {index}"
        shown = [
            {"role": role, "content": example[key]}
            for example in self.examples
            for role, key in (("user", "question"), ("assistant", "answer"))
        ]
        return Prompt(
            prompt_id=f"{self.dataset}/{self.seed}/{index}",
            messages=[*shown, *to_messages(entry["question"], where, self.template)],
            answer=None if entry["answer"] is None else str(entry["answer"]),
            meta={"entry": entry, "score_answer": lambda text: data.score_answer(text, entry)},
        )

    def _create(self) -> Any:
        # imported here: reasoning_gym takes a second to import
        from reasoning_gym.factory import DATASETS, create_dataset

        if self.dataset not in DATASETS:
            near = difflib.get_close_matches(self.dataset, DATASETS, n=3)
            raise ConfigError(
                f"dataset={self.dataset!r}: no such task in reasoning-gym; near: {', '.join(near) or '-'}"
            )
        given = {"size", "seed"} & self.config.keys()
        if given:
            raise ConfigError(f"config.{given.pop()}: use num_prompts and seed instead")
        size = _TRIES_PER_PROMPT * self.num_prompts
        try:
            return create_dataset(self.dataset, size=size, seed=self.seed * _SEED_STRIDE, **self.config)
        except (AssertionError, TypeError, ValueError) as error:  # how its settings are checked
            raise ConfigError(f"dataset={self.dataset!r} refuses config={self.config!r}: {error}") from error
