"""Position-wise distillation: the mean acceptance of the positions, each for itself."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from specdiff2.objectives.base import PathObjective


class DistillSpec(PathObjective):
    """``window loss = - (1/gamma) sum_j q_j(x_j)``, x drawn from the verifier; in [-1, 0].

    ``streak`` without the products: every position is accepted or not for itself, whether or not those before it are.
    ``q_j(x_j)`` is the one-sample estimate of the overlap of the two laws, exact for greedy rollouts, so this is
    DistillSpec's total-variation member on the verifier's own texts (``tv`` is the same with whole laws). Where q is
    near 0 its gradient is too; start from a drafter warmed with ``ce`` or ``mdm``.

    Source: DistillSpec (arXiv 2310.08461); the baseline of SpecDiff-2 (arXiv 2511.00606).
    """

    name = "distillspec"

    def path_loss(
        self,
        log_probs: Float[Tensor, "window gamma"],
        valid: Bool[Tensor, "window gamma"],
        trainable: Bool[Tensor, "window gamma"],
    ) -> Float[Tensor, ""]:
        """Minus the probabilities of the teacher's tokens over gamma, summed; what cannot be drafted counts as 0."""
        return -log_probs.exp().masked_fill(~trainable, 0.0).sum() / log_probs.shape[-1]
