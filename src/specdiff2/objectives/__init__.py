"""Training objectives: pure functions of logits, targets and masks."""

from specdiff2.objectives.cross_entropy import CrossEntropy
from specdiff2.objectives.dpace import DPace
from specdiff2.objectives.mdm import Mdm
from specdiff2.objectives.schedule import ObjectiveSchedule, Stage
from specdiff2.objectives.streak import Streak
from specdiff2.objectives.streak_ce import StreakCE
from specdiff2.objectives.streak_expected import StreakExpected

__all__ = ["CrossEntropy", "DPace", "Mdm", "ObjectiveSchedule", "Stage", "Streak", "StreakCE", "StreakExpected"]
