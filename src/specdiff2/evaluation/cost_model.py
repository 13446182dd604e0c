"""What a round of speculative decoding is expected to cost and to gain. Pure arithmetic: no model, no file, no clock.

The gain of committing ``tau`` tokens a round where the verifier alone commits one a pass:

    speed-up = tau * baseline / (draft + verify + other)          tau = mean streak + 1 (the bonus token)

with ``baseline`` the verifier's pass over one token, ``verify`` its pass over the whole tree, ``draft`` all passes of
the drafter and ``other`` the rest of a round. Held against recorded runs in ``tests/unit/test_cost_model.py``.

Seconds of a pass that nobody has measured come from a roofline (Williams et al. 2009): a pass takes at least the time
to read its weights and keys once and at least the time of its arithmetic. ``pass_seconds`` at full peaks is a lower
bound, with the shares that are reached in practice an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdiff2.types import ConfigError


@dataclass(frozen=True, slots=True)
class Speed:
    """What one device does per second.

    Attributes:
        bandwidth: bytes read from its memory.
        flops: floating-point operations in the dtype of the weights.
        layer_overhead_s: time to launch one layer's operations from Python; hides behind the device's own work.
        all_reduce_s: one exchange between the devices of a tensor-parallel model (two a layer).
    """

    bandwidth: float
    flops: float
    layer_overhead_s: float = 0.0
    all_reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: bytes it reads, its operations, its layers, and over how many devices each layer is split."""

    read_bytes: float
    flops: float
    num_layers: int
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds of one round and of the pass that the verifier alone would need for each token."""

    baseline_s: float
    draft_s: float
    verify_s: float
    other_s: float = 0.0

    @property
    def round_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def speedup(self, tau: float) -> float:
        """Expected speed-up for ``tau`` committed tokens a round, bonus token included.

        Raises:
            ConfigError: ``tau`` below 1 (a round commits at least one token), or a round that takes no time.
        """
        if not (math.isfinite(tau) and tau >= 1.0):
            raise ConfigError(f"tau={tau!r}: expected a number >= 1, the mean streak plus the bonus token")
        if not self.round_s > 0.0:
            raise ConfigError(f"a round of {self.round_s!r} seconds: expected more than 0")
        return tau * self.baseline_s / self.round_s

    @property
    def break_even_streak(self) -> float:
        """The mean streak at which drafting neither gains nor loses; below 0 where it always gains."""
        return self.round_s / self.baseline_s - 1.0


def pass_seconds(forward: Pass, speed: Speed) -> float:
    """Seconds of one pass: the longest of reading, computing and launching, and then the exchanges between devices."""
    reading = forward.read_bytes / (speed.bandwidth * forward.num_shards)
    computing = forward.flops / (speed.flops * forward.num_shards)
    launching = speed.layer_overhead_s * forward.num_layers
    exchanges = 2 * forward.num_layers * speed.all_reduce_s if forward.num_shards > 1 else 0.0
    return max(reading, computing, launching) + exchanges


def standard_streaks(gamma: int) -> list[float]:
    """Mean streaks worth a row for windows of ``gamma``: none, a quarter, half, three quarters, all."""
    return sorted({0.0, gamma / 4, gamma / 2, 3 * gamma / 4, float(gamma)})
