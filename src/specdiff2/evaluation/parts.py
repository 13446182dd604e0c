"""The part of a benchmark that one of several processes decodes, and what its parts have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def prompts_digest(prompts: Iterable[tuple[str, Any]]) -> str:
    """Digest of (prompt id, token ids or another plain content) in order."""
    content = json.dumps([list(pair) for pair in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several processes decodes of a benchmark.

    Attributes:
        indices: place of each of its prompts in the whole benchmark; seeds follow it, never the part.
        whole: ``num_prompts`` and ``prompts_sha256`` of all prompts as their source has them.
    """

    indices: Sequence[int]
    whole: Mapping[str, Any]
