"""Open questions and instructions of our own writing: explanations, letters, lists, stories, summaries, advice.

``assets/open_questions.txt`` holds kinds of tasks, each with templates and topics that fit them. A prompt is one
topic in one template. The splits share no topic.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specdiff2.data.own_texts import OwnSplit, asset_digest, check_enough, check_own_arguments, of_split, read_blocks
from specdiff2.data.prompt import Prompt

_ASSET = "open_questions.txt"


class OpenQuestionPrompts:
    """``num_prompts`` questions, each topic once before any comes a second time in another template.

    Args:
        split: ``train`` has about 90 % of the topics, ``val`` the others.
        seed: decides the order of topics and which template each topic meets first.
    """

    def __init__(self, split: OwnSplit = "train", num_prompts: int = 240, seed: int = 0) -> None:
        check_own_arguments(split, num_prompts, seed)
        self.split, self.num_prompts, self.seed = split, num_prompts, seed

    def describe(self) -> dict[str, Any]:
        return {
            "source": "open_questions",
            "split": self.split,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "sha256": asset_digest(_ASSET),
        }

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the split does not have that many questions.
        """
        topics = of_split(load_topics(), lambda topic: topic.text, self.split)
        check_enough("open_questions", self.split, self.num_prompts, sum(len(topic.templates) for topic in topics))
        rng = random.Random(self.seed)
        first = {topic.key: rng.randrange(len(topic.templates)) for topic in topics}
        prompts: list[Prompt] = []
        for turn in range(max(len(topic.templates) for topic in topics)):
            for topic in rng.sample(topics, len(topics)):
                if turn < len(topic.templates):
                    prompts.append(self._prompt(topic, (first[topic.key] + turn) % len(topic.templates)))
        return prompts[: self.num_prompts]

    def _prompt(self, topic: Topic, template: int) -> Prompt:
        return Prompt(
            prompt_id=f"open/{self.split}/{topic.key}/{template}",
            messages=[{"role": "user", "content": topic.question(template)}],
            meta={"kind": topic.kind, "topic": topic.text},
        )


@dataclass(frozen=True)
class Topic:
    """What a question is about, with the templates of its kind; ``{x}`` stands for the topic."""

    kind: str
    text: str
    templates: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.text.encode('utf-8')).hexdigest()[:8]}"

    def question(self, template: int) -> str:
        capital = self.text[0].upper() + self.text[1:]
        return self.templates[template].replace("{x}", self.text).replace("{X}", capital)


@lru_cache(maxsize=1)
def load_topics() -> tuple[Topic, ...]:
    """All topics of the package, in the order of the file."""
    topics: list[Topic] = []
    for kind, lines in read_blocks(_ASSET, "# "):
        templates = tuple(line[2:] for line in lines if line.startswith("- "))
        topics += [Topic(kind, line, templates) for line in lines if not line.startswith("- ")]
    return tuple(topics)
