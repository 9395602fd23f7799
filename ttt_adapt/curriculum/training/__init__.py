"""Reinforcement learning on a curriculum. Names load on first use: TRL takes seconds to import."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.training.history import StepRecord, TrainingProgress, read_history
    from ttt_adapt.curriculum.training.schedule import Reselect, within_band
    from ttt_adapt.curriculum.training.session import TrainingResult, train_curriculum
    from ttt_adapt.curriculum.training.settings import GRPOSettings

_MODULES = {
    "ttt_adapt.curriculum.training.history": ("StepRecord", "TrainingProgress", "read_history"),
    "ttt_adapt.curriculum.training.schedule": ("Reselect", "within_band"),
    "ttt_adapt.curriculum.training.session": ("TrainingResult", "train_curriculum"),
    "ttt_adapt.curriculum.training.settings": ("GRPOSettings",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
