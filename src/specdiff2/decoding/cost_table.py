"""What a round costs on this machine: seconds of a draft, of one verifier pass over n nodes, and of the rest.

A table belongs to one machine, verifier, drafter, dtype, number of threads and runtime mode (``CostKey``). It is kept
as a JSON file; a file that belongs to anything else, or that cannot be read, is measured again and the log says why.
It does not know how to measure (``decoding.cost_measure``) nor what the costs are used for.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.types import CorruptFileError

log = logging.getLogger(__name__)
NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # where a verifier pass is measured
FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostKey:
    """Everything the costs depend on.

    Attributes:
        machine: processor or GPU, and number of cores.
        verifier, drafter: digests; the drafter's covers its shape and gamma, not its weights, which cost no time.
        dtype, threads, runtime: number format, CPU threads, and mode (eager, packed, compiled).
    """

    machine: str
    verifier: str
    drafter: str
    dtype: str
    threads: int
    runtime: str

    @property
    def file_name(self) -> str:
        """What users switch between on purpose is in the name; the machine is not: a copied cache is noticed."""
        return f"{self.verifier[:12]}-{self.drafter[:12]}-{self.dtype}-{self.threads}threads-{self.runtime}.json"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a round.

    Attributes:
        key: what they were measured on.
        draft_s: one draft.
        other_s: a round outside the two models' passes.
        verify_s: one verifier pass over ``node_counts`` nodes (root included), never falling.
    """

    key: CostKey
    draft_s: float
    other_s: float
    node_counts: tuple[int, ...]
    verify_s: tuple[float, ...]

    @classmethod
    def from_medians(cls, key: CostKey, *, draft_s: float, other_s: float, verify_s: dict[int, float]) -> CostTable:
        """From one median per node count; timings that fall with more nodes are noise and are levelled out."""
        counts = sorted(verify_s)
        return cls(key, draft_s, other_s, tuple(counts), tuple(isotonic([verify_s[n] for n in counts])))

    def verify_seconds(self, num_nodes: int) -> float:
        """One verifier pass over ``num_nodes`` >= 1 nodes: linear between measured counts, and beyond the last."""
        points = list(zip(self.node_counts, self.verify_s, strict=True))
        segments = list(pairwise(points))
        (n0, s0), (n1, s1) = next((pair for pair in segments if num_nodes <= pair[1][0]), segments[-1])
        return s0 + (s1 - s0) * (num_nodes - n0) / (n1 - n0)

    def round_s(self, max_nodes: int) -> Float[Tensor, " count"]:
        """Seconds of a whole round with 0 .. ``max_nodes`` drafted nodes (the root is scored too), float64."""
        seconds = [self.draft_s + self.verify_seconds(1 + n) + self.other_s for n in range(max_nodes + 1)]
        return torch.tensor(seconds, dtype=torch.float64)

    def save(self, path: Path) -> None:
        """Write ``path`` in one step: a reader never sees half a file, and of two writers the last one wins."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.name, suffix=".partial", delete=False
        ) as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, allow_nan=False, indent=1)
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """The table in ``path``.

        Raises:
            CorruptFileError: it holds no cost table.
            OSError: it cannot be read.
        """
        try:
            table = _parse(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFileError(
                f"{path}: no cost table ({type(error).__name__}: {error}); expected a file of CostTable.save; delete it"
            ) from error
        return table


def load_or_measure(folder: Path | None, key: CostKey, measure: Callable[[], CostTable]) -> CostTable:
    """The saved table of ``key``, else a measured one, which is then saved.

    A file of another machine, pair, dtype, number of threads or runtime mode, and a damaged one, are replaced, with a
    warning that says what is wrong with them. A folder that cannot be written costs a warning, not the run.

    Args:
        folder: where tables are kept; None measures and keeps nothing.
    """
    if folder is None:
        return measure()
    path = folder / key.file_name
    if path.exists():
        try:
            table = CostTable.load(path)
        except CorruptFileError as error:
            log.warning("%s. Measuring again.", error)
        else:
            differing = differences(table.key, key)
            if not differing:
                return table
            log.warning("%s was measured with another %s. Measuring again.", path, "; ".join(differing))
    table = measure()
    try:
        table.save(path)
    except OSError as error:
        log.warning("cannot keep the cost table in %s (%s): it will be measured again next time", path, error)
    return table


def differences(saved: CostKey, current: CostKey) -> list[str]:
    """What tells two keys apart, in words: ``machine (saved 'a', here 'b')``."""
    pairs = [(field.name, getattr(saved, field.name), getattr(current, field.name)) for field in fields(CostKey)]
    return [f"{name} (saved {old!r}, here {new!r})" for name, old, new in pairs if old != new]


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in squares: neighbours out of order share their mean.

    Source: pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []  # (mean, number of values)
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _parse(value: Any) -> CostTable:
    """Raises ValueError, TypeError or KeyError for anything ``save`` would not have written."""
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    key = CostKey(**value["key"])
    if not all(isinstance(getattr(key, field.name), int if field.name == "threads" else str) for field in fields(key)):
        raise ValueError(f"key {value['key']!r}")
    counts, seconds = value["node_counts"], [float(second) for second in value["verify_s"]]
    draft_s, other_s = float(value["draft_s"]), float(value["other_s"])
    increasing = all(type(n) is int for n in counts) and all(a < b for a, b in pairwise(counts))
    if len(counts) != len(seconds) or len(counts) < 2 or counts[0] != 1 or not increasing:
        raise ValueError(f"node_counts {counts!r}")
    if not all(math.isfinite(s) and s > 0 for s in seconds) or any(a > b for a, b in pairwise(seconds)):
        raise ValueError(f"verify_s {seconds!r}")
    if not all(math.isfinite(s) and s >= 0 for s in (draft_s, other_s)):
        raise ValueError(f"draft_s {draft_s!r}, other_s {other_s!r}")
    return CostTable(key, draft_s, other_s, tuple(counts), tuple(seconds))
