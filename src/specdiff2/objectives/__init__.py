"""Training objectives: pure functions of logits, targets and masks."""

from specdiff2.objectives.ar_distill import ARDistill
from specdiff2.objectives.chain import Chain
from specdiff2.objectives.cross_entropy import CrossEntropy
from specdiff2.objectives.distillspec import DistillSpec
from specdiff2.objectives.dpace import DPace
from specdiff2.objectives.first_error import FirstError
from specdiff2.objectives.matching import AcceptanceLikelihood, TotalVariation
from specdiff2.objectives.mdm import Mdm
from specdiff2.objectives.schedule import ObjectiveSchedule, Stage
from specdiff2.objectives.streak import Streak
from specdiff2.objectives.streak_ce import StreakCE
from specdiff2.objectives.streak_expected import StreakExpected
from specdiff2.objectives.weighted import Part, Weighted, part_names

__all__ = [
    "ARDistill",
    "AcceptanceLikelihood",
    "Chain",
    "CrossEntropy",
    "DPace",
    "DistillSpec",
    "FirstError",
    "Mdm",
    "ObjectiveSchedule",
    "Part",
    "Stage",
    "Streak",
    "StreakCE",
    "StreakExpected",
    "TotalVariation",
    "Weighted",
    "part_names",
]
