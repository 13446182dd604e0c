"""Grade-school word problems made from templates (GSM-Symbolic, arXiv 2410.05229) by the package reasoning-gym.

The splits are disjoint in two ways. By template: a fixed fifth of the templates is *held out* and never
trained on. By text: every question belongs to exactly one split, decided by a hash of its text, so no choice
of seed or size can leak a test question into training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any, Literal, get_args

from specdiff2.data.prompt import Prompt, check_count
from specdiff2.types import ConfigError

Split = Literal["train", "val", "test"]
Templates = Literal["seen", "held_out", "all"]

_HELD_OUT_SHARE = 0.2
_SHUFFLE_SEED = 2511  # fixed for ever: another value would turn held-out templates into seen ones
_MAX_TRIES = 2000  # misses in a row after which a template counts as used up


class GsmSymbolicPrompts:
    """``num_prompts`` questions, templates in turn, none twice.

    Args:
        split: ``train`` has about 80 % of all question texts, ``val`` and ``test`` 10 % each.
        templates: ``seen`` (68 templates), ``held_out`` (17) or ``all``; training takes ``seen`` only.
        seed: another seed gives other questions of the same split.
    """

    def __init__(
        self, split: Split = "train", templates: Templates = "seen", num_prompts: int = 512, seed: int = 0
    ) -> None:
        if split not in get_args(Split):
            raise ConfigError(f"split={split!r}: expected one of {', '.join(get_args(Split))}")
        if templates not in get_args(Templates):
            raise ConfigError(f"templates={templates!r}: expected one of {', '.join(get_args(Templates))}")
        if split == "train" and templates != "seen":
            raise ConfigError(
                f"templates={templates!r} with split='train': held-out templates are for measuring only; use 'seen'"
            )
        check_count("num_prompts", num_prompts, 1)
        check_count("seed", seed, 0)
        self.split, self.templates, self.num_prompts, self.seed = split, templates, num_prompts, seed

    def describe(self) -> dict[str, Any]:
        return {
            "source": "gsm_symbolic",
            "split": self.split,
            "templates": self.templates,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "reasoning_gym": importlib.metadata.version("reasoning-gym"),
        }

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the templates do not have that many different questions in this split.
        """
        streams = self._streams()
        prompts: list[Prompt] = []
        seen: set[str] = set()
        while streams and len(prompts) < self.num_prompts:
            stream = streams.popleft()
            for prompt in islice(stream, _MAX_TRIES):
                text = " ".join(prompt.messages[0]["content"].split())
                if text not in seen and _split_of(text) == self.split:
                    seen.add(text)
                    prompts.append(prompt)
                    streams.append(stream)
                    break
        if len(prompts) < self.num_prompts:
            raise ConfigError(
                f"num_prompts={self.num_prompts}: gsm_symbolic has only about {len(prompts)} different questions in "
                f"split {self.split!r} of templates {self.templates!r}; ask for fewer"
            )
        return prompts

    def _streams(self) -> deque[Iterator[Prompt]]:
        """Endless questions of each template, in an order that depends on the seed."""
        # imported here: reasoning_gym takes a second to import
        from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import (
            GSMSymbolicDataset,
            GSMSymbolicDatasetConfig,
            tasks_ok,
        )

        held_out, seen = split_templates(tasks_ok)
        chosen = {"seen": seen, "held_out": held_out, "all": sorted(seen + held_out)}[self.templates]
        first_seed = (self.seed * len(get_args(Split)) + get_args(Split).index(self.split)) * 10**9
        random.Random(first_seed).shuffle(chosen)  # a few prompts should not always be those of the first templates

        def stream(template: int) -> Iterator[Prompt]:
            for item_seed in count(first_seed + template * 10**6):
                # the item generator is seeded with dataset seed + row: one row with its template set fixes both
                dataset = GSMSymbolicDataset(GSMSymbolicDatasetConfig(size=1, seed=item_seed))
                dataset.task_indices = [template]
                item = dataset[0]
                yield Prompt(
                    prompt_id=f"gsm_symbolic/{self.split}/t{template:02d}/{item_seed}",
                    messages=[{"role": "user", "content": item["question"]}],
                    answer=str(item["answer"]),
                    meta={"template": template, "held_out": template in held_out},
                )

        return deque(map(stream, chosen))


def split_templates(usable: list[int]) -> tuple[list[int], list[int]]:
    """``(held_out, seen)``, both sorted; always the same for the same list of usable templates."""
    shuffled = sorted(usable)
    random.Random(_SHUFFLE_SEED).shuffle(shuffled)
    num_held_out = round(_HELD_OUT_SHARE * len(shuffled))
    return sorted(shuffled[:num_held_out]), sorted(shuffled[num_held_out:])


def _split_of(text: str) -> Split:
    bucket = hashlib.sha256(text.encode("utf-8")).digest()[0]
    return "val" if bucket < 26 else "test" if bucket < 52 else "train"
