"""Reinforcement learning on a curriculum. Names load on first use: TRL takes seconds to import."""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.curriculum.training.history import StepRecord, TrainingProgress, read_history
    from ttt_adapt.curriculum.training.schedule import Reselect, within_band
    from ttt_adapt.curriculum.training.session import TrainingResult, train_curriculum
    from ttt_adapt.curriculum.training.settings import GRPOSettings

__all__ = [
    "GRPOSettings",
    "Reselect",
    "StepRecord",
    "TrainingProgress",
    "TrainingResult",
    "read_history",
    "train_curriculum",
    "within_band",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".history": ("StepRecord", "TrainingProgress", "read_history"),
        ".schedule": ("Reselect", "within_band"),
        ".session": ("TrainingResult", "train_curriculum"),
        ".settings": ("GRPOSettings",),
    },
)
