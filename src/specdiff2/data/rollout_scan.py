"""What stands in the shards of a store, read once and then followed while others go on writing.

Memory: 8 bytes a rollout for its id, and a few numbers a shard. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdiff2.data.id_digests import IdDigests
from specdiff2.data.rollout_files import REMEDY, decode_rollout, last_shards, list_shards, shard_lines
from specdiff2.types import CorruptFileError, Rollout

COUNTED = ("finish_reason", "tokens", "seam")  # parts of ``Rollout.meta`` that the manifest sums up


@dataclass
class ShardFacts:
    """The complete lines of one shard: bytes, rollouts, sampled tokens, and how often each value of ``COUNTED``."""

    num_bytes: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    counts: Counter[tuple[str, Any]] = field(default_factory=Counter)


class StoreScan:
    """The ids of a store and the facts of its shards, as of the last ``refresh``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids = IdDigests()
        self.shards: dict[str, ShardFacts] = {}

    def refresh(self) -> None:
        """Read what was appended since.

        Raises:
            CorruptFileError: a complete line that is no rollout, an id for the second time, or a line cut off.
        """
        shards = list_shards(self.folder)
        known = {name: facts.num_bytes for name, facts in self.shards.items()}
        if any(known.get(shard.name, 0) > shard.stat().st_size for shard in shards) or known.keys() - {
            shard.name for shard in shards
        }:  # a writer took a batch back that it could not sync, or a user deleted something
            self.ids, self.shards = IdDigests(), {}
        for _ in self.new_rollouts(shards):
            pass

    def new_rollouts(self, shards: list[Path]) -> Iterator[Rollout]:
        """What these shards hold beyond what was read, in order. Raises as ``refresh``."""
        last = last_shards(shards)
        for shard in shards:
            facts = self.shards.setdefault(shard.name, ShardFacts())
            if shard in last and shard.stat().st_size == facts.num_bytes:
                continue
            lines = shard_lines(shard, offset=facts.num_bytes, number=facts.num_rollouts, last=shard in last)
            for number, _, line in lines:
                rollout = decode_rollout(line, f"{shard}:{number}")
                if not self.ids.add(rollout.rollout_id):
                    raise CorruptFileError(f"{shard}:{number}: rollout {rollout.rollout_id!r} is there twice; {REMEDY}")
                facts.num_bytes += len(line) + 1
                facts.num_rollouts += 1
                facts.num_tokens += len(rollout.completion_ids)
                facts.counts.update((key, rollout.meta[key]) for key in COUNTED if key in rollout.meta)
                yield rollout

    def summary(self) -> dict[str, Any]:
        """Rollouts, tokens and counts, in all and by shard; JSON-ready."""
        counts = sum((facts.counts for facts in self.shards.values()), Counter())
        meta: dict[str, dict[str, int]] = {}
        for (key, value), count in sorted(counts.items(), key=str):
            meta.setdefault(key, {})[str(value)] = count
        return {
            "num_rollouts": sum(facts.num_rollouts for facts in self.shards.values()),
            "num_tokens": sum(facts.num_tokens for facts in self.shards.values()),
            "shards": {
                name: {"bytes": facts.num_bytes, "num_rollouts": facts.num_rollouts, "num_tokens": facts.num_tokens}
                for name, facts in sorted(self.shards.items())
            },
            **({"meta": meta} if meta else {}),
        }


def read_shards(folder: Path) -> Iterator[Rollout]:
    """Every complete rollout of a store, shard by shard. Raises as ``StoreScan.refresh``."""
    return StoreScan(folder).new_rollouts(list_shards(folder))
