"""Grading of arithmetic word problems (gsm_symbolic, GSM8K) by their final number.

GSM8K's own convention: the reference ends with ``#### n``; an answer counts when its final number equals
the reference's. References that are no single number (fractions, tuples, expressions) are not graded.
Lossless methods at temperature 0 must score alike: the score is a check as much as a result. Of a text with a thinking
block (Qwen3) only what follows it is an answer; a block that the length limit cut off leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from specdiff2.evaluation.records import Record

# a minus after a digit or a closing bracket subtracts, it is no sign
_NUMBER = re.compile(r"(?:(?<![\d)\]])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_REFERENCE = re.compile(r"-?\s*\$?\s*-?(?:\d[\d,]*(?:\.\d*)?|\.\d+)")
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


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
