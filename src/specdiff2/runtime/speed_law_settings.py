"""Section ``speed_law`` of ``eval.yaml``: which runs are explained, and for which hardware is extrapolated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class SpeedLawSection:
    """See ``conf/speed_law/default.yaml``.

    Attributes:
        runs: run folders of evaluations, or patterns of them.
        tolerance: relative error that counts as predicted.
        hardware: sections like ``conf/hardware``, by name; empty: no extrapolation.
        num_devices: over how many devices each verifier layer is split.
        verifier, drafter: names of ``models.published_shapes`` or of folders.
        attention: of the drafter: as published, or with an exact cache of the prefix.
        gamma: positions of a window. num_drafts: chains a round. context: tokens in the cache.
    """

    runs: Sequence[str]
    tolerance: float
    hardware: Mapping[str, Any]
    num_devices: Sequence[int]
    verifier: str
    drafter: str
    attention: Sequence[str]
    gamma: int
    num_drafts: Sequence[int]
    context: int
