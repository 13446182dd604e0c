"""The paper's qualitative claims: what it says, where, and which kind of test on which quantity decides it.

The kinds of tests are described, and carried out, in ``claims``; quantities are those of ``compare``. Source: figures
and tables of SpecDiff-2 (arXiv 2511.00606), by number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """``roles`` names the arms, in the order the kind of test reads them; None takes them as the spec orders them."""

    id: str
    sentence: str
    source: str
    kind: str
    metric: str
    roles: tuple[str, ...] | None = None
    positions: tuple[int, ...] | None = None


CLAIMS = {
    claim.id: claim
    for claim in (
        Claim("streak_order", "Streak-distillation accepts more than position-wise distillation (DistillSpec), "
              "and that more than none.", "Figure 12", "order", "mean_streak", ("streak", "distillspec", "base")),
        Claim("later_positions", "Streak-distillation gains at the later positions of the window.", "Figure 2",
              "positions", "survival", ("streak", "base")),
        Claim("later_positions_ar", "At later positions it gains over distillation of the first position only.",
              "Figure 2", "positions", "survival", ("streak", "ar_distill")),
        Claim("more_drafts", "More drafts give a longer streak.", "Figure 5", "order", "mean_streak", ("many", "one")),
        Claim("drafts_help_when_hot", "More drafts help more at a high drafter temperature than at a low one.",
              "Figures 5 and 8", "interaction", "mean_streak", ("hot_many", "hot_one", "cold_many", "cold_one")),
        Claim("distillation_steps", "More distillation steps give a longer streak.", "Figure 7", "order", "mean_streak",
              ("late", "early")),
        Claim("one_denoising_step", "One denoising step is fastest.", "Figure 9", "lead", "speedup"),
        Claim("optimal_gamma", "There is an optimum window length.", "Figure 10", "interior", "speedup"),
        Claim("alignments_add_up", "Alignment in training and at test time add up.", "Table 3", "add_up", "mean_streak",
              ("both", "training", "selection", "neither")),
        Claim("faster_than_verifier", "SpecDiff-2 is faster than the verifier alone.", "Table 2", "order", "speedup",
              ("specdiff2", "autoregressive")),
        Claim("aligned_beats_unaligned", "SpecDiff-2 is faster than the unaligned diffusion drafter.", "Table 2",
              "order", "speedup", ("specdiff2", "specdiff")),
        Claim("diffusion_beats_autoregressive", "A diffusion drafter is faster than an autoregressive drafter of the "
              "same size and training time.", "Table 2", "order", "speedup", ("specdiff2", "sps")),
        Claim("beats_eagle2", "SpecDiff-2 is faster than EAGLE-2.", "Table 2", "order", "speedup",
              ("specdiff2", "eagle2")),
    )
}  # fmt: skip
