"""Settings of ``task=budgeted``: how long the model may think, and how it is asked for its answer.

The paper's figure 6 (arXiv 2511.00606) gives every method the same seconds of thinking. Ending a thought by appended
text is budget forcing (arXiv 2501.19393).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specdiff2.types import ConfigError

ClosingRole = Literal["assistant", "user"]


@dataclass(frozen=True)
class BudgetSection:
    """Section ``budget``.

    Attributes:
        seconds: budgets, ascending; prefill counts, warm-up and the answer do not.
        max_thought_tokens: a thought ends here at the latest: more than anybody reaches in the largest budget.
        answer_tokens: room for the answer.
        closing: what tells the model that time is over.
        closing_role: ``assistant``: the closing continues the thought in the model's own turn, token for token, and the
            model goes on from there; ``user``: the thought becomes a finished turn and the closing a new message
            (templates that drop thinking blocks of earlier turns, as Qwen3's, hide the thought then).

    Raises:
        ConfigError: a value outside its range.
    """

    seconds: Sequence[float]
    max_thought_tokens: int
    answer_tokens: int
    closing: str
    closing_role: ClosingRole

    def __post_init__(self) -> None:
        if not self.seconds or any(not 0.0 < value < math.inf for value in self.seconds):
            raise ConfigError(f"budget.seconds={list(self.seconds)!r}: expected numbers > 0, e.g. [1,2,4,8,15]")
        if sorted(set(self.seconds)) != list(self.seconds):
            raise ConfigError(f"budget.seconds={list(self.seconds)!r}: expected ascending numbers, none twice")
        for name in ("max_thought_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"budget.{name}={getattr(self, name)!r}: expected an integer >= 1")
        if not self.closing.strip():
            raise ConfigError(f"budget.closing={self.closing!r}: expected a text that asks for the answer")
        if self.closing_role not in get_args(ClosingRole):
            raise ConfigError(f"budget.closing_role={self.closing_role!r}: expected one of assistant, user")
