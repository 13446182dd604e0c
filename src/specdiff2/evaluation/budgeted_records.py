"""One line per (method, prompt, budget) of ``task=budgeted``: the only thing its tables and plots are built from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from specdiff2.data.jsonl import read_jsonl
from specdiff2.types import CorruptFileError

BUDGETED_FILE = "budgeted.jsonl"


@dataclass(slots=True)
class BudgetRecord:
    """What one method had thought about one prompt when a budget was over, and what it answered then.

    Attributes:
        budget_s: seconds of thinking, prefill included.
        num_thought_tokens, num_rounds: committed by then.
        thought_s: when the last of these tokens was there; at most ``budget_s``.
        ended: why the thought had ended by itself (eos, stop, length); None: it was cut.
        answer_s: prefill and decoding of the answer, outside the budget.
        score: the scorer's own, 0 .. 1. ``scorer_error``: why it failed on this answer, which counts as wrong.
        thought: the token ids, kept with the largest budget only (the others are its beginnings).
    """

    method: str
    benchmark: str
    prompt_id: str
    prompt_index: int
    order: int
    seed: int
    temperature: float
    gamma: int
    num_drafts: int
    runtime: str | None
    budget_s: float
    num_thought_tokens: int
    num_rounds: int
    thought_s: float
    ended: str | None
    answer: str
    num_answer_tokens: int
    answer_s: float
    correct: bool
    score: float
    scorer_error: str | None = None
    thought: list[int] | None = None

    def to_json(self) -> str:
        """One line of strict JSON, without the line break."""
        return json.dumps(asdict(self), allow_nan=False, ensure_ascii=False)


def read_budget_records(path: Path | str) -> list[BudgetRecord]:
    """Raises:
    ConfigError: there is no such file.
    CorruptFileError: a line is not a record; names it.
    """
    records = []
    for number, row in read_jsonl(path):
        try:
            records.append(BudgetRecord(**row))
        except TypeError as error:
            raise CorruptFileError(
                f"{path}:{number}: not a record of task=budgeted ({error}); delete the file to measure again"
            ) from error
    return records


def whole_groups(records: Iterable[BudgetRecord], num_budgets: int) -> dict[tuple[str, str], list[BudgetRecord]]:
    """Records by (method, prompt id), those only that have all budgets: the others come from a killed run."""
    groups: dict[tuple[str, str], list[BudgetRecord]] = {}
    for record in records:
        groups.setdefault((record.method, record.prompt_id), []).append(record)
    return {key: group for key, group in groups.items() if len(group) == num_budgets}
