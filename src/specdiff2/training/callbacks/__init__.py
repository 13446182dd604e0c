"""Lightning callbacks: held-out streaks, real decoding, exports, progress."""

from specdiff2.training.callbacks.decoding_probe import DecodingProbe
from specdiff2.training.callbacks.drafter_export import DrafterExport
from specdiff2.training.callbacks.preemption import Preempted, Preemption
from specdiff2.training.callbacks.progress_eta import ProgressEta
from specdiff2.training.callbacks.rank_watch import RankWatch
from specdiff2.training.callbacks.streak_monitor import StreakMonitor

__all__ = ["DecodingProbe", "DrafterExport", "Preempted", "Preemption", "ProgressEta", "RankWatch", "StreakMonitor"]
