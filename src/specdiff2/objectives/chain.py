"""Chain likelihood: the log-probabilities of all prefixes of the window, added up."""

from __future__ import annotations

from specdiff2.objectives.dpace import DPace


class Chain(DPace):
    """``window loss = - sum_j log prod_{k<=j} q_k(x_k) / gamma``: every prefix of the chain should be likely.

    Exchanging the sums gives block credit ``c_i = (L - i + 1) / gamma`` over the L valid positions: position i is a
    factor of L - i + 1 prefixes. That is D-PACE with ``alpha=1`` exactly, cut windows and undraftable targets
    included, so this class is that objective under the name that says what it maximises. By Jensen's inequality it
    bounds the streak loss on a log scale (``log sum_j S_j >= mean_j log S_j + log L``); the weights never change, so a
    cold drafter learns from it.
    """

    name = "chain"

    def __init__(self) -> None:
        super().__init__(alpha=1.0)
