"""One line per generation: the only thing tables, plots and reports are built from.

``records.jsonl`` is strict JSON (no NaN), append-only and flushed line by line, so a killed run loses at
most the line it was writing. This module knows no model and computes no statistic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from specdiff2.types import CorruptFileError, RoundRecord

RECORDS_FILE = "records.jsonl"
DIVERGENCES_FILE = "divergences.json"
_SECONDS_DIGITS = 7  # 0.1 microseconds: below the clock's own noise


@dataclass(slots=True)
class Record:
    """One decoded prompt. Seconds are wall-clock; ``decode_s`` excludes ``prefill_s``.

    Attributes:
        seed: the benchmark's seed; the generation's own is ``benchmark.prompt_seed(seed, prompt_index)``.
        rounds: verifier passes after the prefill; each is one forward pass of the verifier. Empty where the decoder
            does not tell them.
        order: place of this method among the methods that decoded this prompt (0 ran first).
        warmup: decoded to warm caches and clocks up; never counted.
        pieces: text of each token, stored for a few samples only.
        runtime: how the verifier's passes ran: eager, packed or compiled; None where the decoder does not tell.
        drafters: names of the several drafters that ``RoundRecord.winners`` counts; None with one drafter or none.
        batch_size: prompts decoded at once; seconds are then the prompt's share of the wall time. None: one by one.
        group: which prompts were decoded in one go, with every method and batch size.
    """

    method: str
    prompt_id: str
    benchmark: str
    seed: int
    temperature: float
    tokens: list[int]
    text: str
    stop_reason: str
    prefill_s: float
    decode_s: float
    rounds: list[RoundRecord]
    gamma: int
    num_drafts: int
    order: int = 0
    prompt_index: int = 0
    prompt_ids: list[int] | None = None
    prompt: str | None = None
    answer: str | None = None
    pieces: list[str] | None = None
    warmup: bool = False
    runtime: str | None = None
    drafters: list[str] | None = None
    batch_size: int | None = None
    group: int | None = None

    def to_json(self) -> str:
        """One line of strict JSON, without the line break. Unset optional keys are left out."""
        row: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        row["rounds"] = [
            [r.num_drafted, r.num_accepted, r.num_committed, r.num_nodes]
            + [round(s, _SECONDS_DIGITS) for s in (r.draft_s, r.verify_s, r.other_s)]
            + ([] if r.winners is None else [r.winners])
            for r in self.rounds
        ]
        row["prefill_s"] = round(self.prefill_s, _SECONDS_DIGITS)
        row["decode_s"] = round(self.decode_s, _SECONDS_DIGITS)
        return json.dumps({k: v for k, v in row.items() if v is not None}, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Record:
        """Inverse of ``to_json``; unknown keys are ignored so that newer files stay readable.

        Raises:
            ValueError, KeyError, TypeError: the row is not a record (``read_records`` names the line).
        """
        values = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        values["rounds"] = [_round(numbers) for numbers in row["rounds"]]
        record = cls(**values)
        winners = {winner for one in record.rounds for winner in one.winners or ()}
        if not winners <= set(range(len(record.drafters or ()))):
            raise ValueError(
                f"rounds won by drafters {sorted(winners)} of {record.drafters!r}: expected indices into it"
            )
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (record.prefill_s, record.decode_s)):
            raise ValueError(f"prefill_s={record.prefill_s!r}, decode_s={record.decode_s!r}: expected seconds >= 0")
        return record


def _round(numbers: list[Any]) -> RoundRecord:
    """Rebuild one round, with its winners where it has an eighth entry, and refuse what contradicts itself."""
    if len(numbers) not in (7, 8):
        raise ValueError(f"a round has {len(numbers)} entries, expected 7 or 8")
    drafted, accepted, committed, nodes = (int(n) for n in numbers[:4])
    if not (0 <= accepted <= drafted and accepted <= committed <= accepted + 1):
        raise ValueError(
            f"a round drafted {drafted}, accepted {accepted}, committed {committed}: expected "
            "0 <= accepted <= drafted and at most one token more committed than accepted"
        )
    winners = [int(winner) for winner in numbers[7]] if len(numbers) == 8 else None
    if winners is not None and bool(winners) != (accepted > 0):
        raise ValueError(f"a round accepted {accepted} and was won by {winners}: expected winners where accepted > 0")
    return RoundRecord(drafted, accepted, committed, nodes, *(float(n) for n in numbers[4:7]), winners)


def read_records(path: Path | str) -> list[Record]:
    """All records of a file; a half-written last line (no line break, not JSON) is left out.

    Raises:
        CorruptFileError: any other line that is not a record; names the line number.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    # split on "\n" only: str.splitlines would also cut at U+2028 inside a string
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(json.loads(line, parse_constant=_refuse_constant)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # no line break after it: the writer was killed here
                break
            raise CorruptFileError(
                f"{path} line {number} is not a generation record ({type(error).__name__}: {error}): expected one "
                "JSON object per line as written by Benchmark; delete the line, or the file to measure again"
            ) from error
    return records


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not strict JSON")


def drop_half_line(path: Path) -> None:
    """Make ``path`` end with a complete line, so that appending is safe."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:])
    except ValueError:
        with path.open("r+b") as file:
            file.truncate(start)
    else:  # only the line break is missing
        with path.open("ab") as file:
            file.write(b"\n")


class RecordWriter:
    """Appends records, each flushed, so that an interrupted run keeps everything it measured."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None

    def __enter__(self) -> RecordWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            drop_half_line(self._path)
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, record: Record) -> None:
        """Write one line and hand it to the operating system."""
        self.extend([record])

    def extend(self, records: Iterable[Record]) -> None:
        """The same for several lines at once."""
        if self._file is None:
            raise RuntimeError("RecordWriter.append outside its with block")
        self._file.write("".join(record.to_json() + "\n" for record in records))
        self._file.flush()
