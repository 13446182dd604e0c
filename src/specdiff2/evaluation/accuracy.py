"""Grading: whole texts by their final number, and short answers by the scorer that fits their reference.

``is_correct`` follows GSM8K's own convention: the reference ends with ``#### n``; a text counts when its final number
equals the reference's. References that are no single number (fractions, tuples, expressions) are not graded by it.
Lossless methods at temperature 0 must score alike: the score is a check as much as a result. Of a text with a thinking
block (Qwen3) only what follows it is an answer; a block that the length limit cut off leaves none.

``grade`` is for an answer that was asked for alone (``evaluation.budgeted``). Its scorers are those of the data sets:
reasoning-gym's (``data.reasoning_gym_prompts``), the exact letter of a multiple choice, else math-verify
(github.com/huggingface/Math-Verify).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from specdiff2.evaluation.records import Record
from specdiff2.types import ConfigError

# a minus after a digit or a closing bracket subtracts, it is no sign
_NUMBER = re.compile(r"(?:(?<![\d)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_REFERENCE = re.compile(r"-?\s*\$?\s*-?(?:\d[\d,]*(?:\.\d*)?|\.\d+)")
_LETTER = re.compile(r"[A-Z]")
# "answer is B", "B", "(B) because", "B. 3 m"; not the article of "A train"
_CHOSEN = re.compile(r"(?i:\banswer)(?: is)?\W*([A-Z])\b|^\W*([A-Z])(?=\W*$|[).:,])")
_LEAD_IN = re.compile(r"^(?:(?:the|my)\s+)?(?:final\s+)?answer(?:\s+is)?\b\W*", re.IGNORECASE)
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")

Scorer = Callable[[str], float]  # an answer -> 0 .. 1


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####``, else the last number of the text; None without any.

    Thousands separators are dropped and a sentence's full stop is not a decimal point: ``1,234.`` is 1234.
    """
    marked = _MARKED.findall(text)
    candidates = marked or _NUMBER.findall(text)
    if not candidates:
        return None
    try:
        return Decimal(candidates[-1].replace(",", ""))
    except InvalidOperation:  # only separators, e.g. "-,"
        return None


def is_correct(text: str, answer: str) -> bool | None:
    """Whether the final number of ``text`` has the value of ``answer`` (``18`` and ``18.00`` agree).

    None when ``answer`` (what follows its last ``####``, or all of it) is anything but one number: of
    ``\\frac{14}{3}`` or ``(3, 4)`` the last number alone says nothing.
    """
    reference = answer.rpartition("####")[2].strip()
    expected = final_number(reference.replace("$", "").replace(" ", "")) if _REFERENCE.fullmatch(reference) else None
    if expected is None:
        return None
    return final_number(_answer_part(text)) == expected


def _answer_part(text: str) -> str:
    _, closed, answer = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else answer


def accuracy(records: Iterable[Record]) -> dict[str, float | int] | None:
    """``{"graded", "correct", "accuracy"}`` over the records with a numeric reference; None without any."""
    verdicts = [is_correct(record.text, record.answer) for record in records if record.answer is not None]
    graded = [verdict for verdict in verdicts if verdict is not None]
    if not graded:
        return None
    return {"graded": len(graded), "correct": sum(graded), "accuracy": sum(graded) / len(graded)}


@dataclass(frozen=True, slots=True)
class Grade:
    """``score`` is the scorer's own, 0 .. 1; only a full score is correct. ``error``: the scorer failed on the text."""

    score: float
    error: str | None = None

    @property
    def correct(self) -> bool:
        return self.score >= 1.0


def grade(text: str, answer: str | None, scorer: Scorer | None = None) -> Grade:
    """Grade what the model wrote when it was asked for its final answer alone: the first line that says something.

    Args:
        answer: the reference; a single capital letter means multiple choice.
        scorer: the data set's own, text -> 0 .. 1, used where given. It gets the final number of the line where the
            reference is a number, else the line without decoration ("The final answer is **x**." -> "x").

    Raises:
        ConfigError: neither a reference nor a scorer, or math-verify is not installed.
    """
    if answer is None and scorer is None:
        raise ConfigError("a prompt without answer cannot be graded: set answer_field, or choose another benchmark")
    try:
        score = float(_score(_answer_line(text), (answer or "").rpartition("####")[2].strip(), scorer))
    except ConfigError:
        raise
    except Exception as error:  # somebody else's scorer on text that no one foresaw: wrong, and counted apart
        return Grade(0.0, f"{type(error).__name__}: {error}")
    return Grade(score) if math.isfinite(score) else Grade(0.0, f"the scorer gave {score}")


def _score(line: str, answer: str, scorer: Scorer | None) -> float:
    if scorer is not None:
        return scorer(_bare(line, answer))
    if _LETTER.fullmatch(answer):
        chosen = _CHOSEN.search(line)
        return float(chosen is not None and answer in chosen.groups())
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError("grading needs math-verify: pip install 'specdiff2[accuracy]'") from error
    # LaTeX is only found between dollar signs, which references and short answers often lack
    gold = parse(answer if _REFERENCE.fullmatch(answer) else f"${answer.strip('$')}$", raise_on_error=True)
    given = [parse(form, raise_on_error=True) for form in (line, f"${line.strip('$. ')}$")]
    return float(any(verify(gold, one, raise_on_error=True) for one in given))


def _answer_line(text: str) -> str:
    """The first line with content after any thinking block; a line that only announces ("Answer:") is passed over."""
    lines = [line.strip() for line in _answer_part(text).split("\n")]
    return next((line for line in lines if line and not line.endswith(":")), "")


def _bare(line: str, answer: str | None) -> str:
    if answer is not None and _REFERENCE.fullmatch(answer.strip()):
        number = final_number(line)
        return "" if number is None else str(number)
    return _LEAD_IN.sub("", line).strip(" *`$\"'").rstrip(".").strip(" *`$\"'")
