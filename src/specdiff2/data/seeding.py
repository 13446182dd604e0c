"""Seeds derived from names and counters, the same on every machine and in every process.

Python's ``hash`` is salted per process, so it cannot seed anything that has to be repeated on resume.
"""

from __future__ import annotations

import hashlib
import json

import torch


def stable_seed(*parts: str | int | float) -> int:
    """A 63-bit seed that depends on every part and its type (``1`` and ``"1"`` differ)."""
    digest = hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stable_generator(*parts: str | int | float) -> torch.Generator:
    """A CPU generator seeded with :func:`stable_seed`."""
    return torch.Generator(device="cpu").manual_seed(stable_seed(*parts))
