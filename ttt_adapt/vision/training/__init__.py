"""Train vision models and see how well they classify.

The names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.vision.training.building import load_model, settings_of
    from ttt_adapt.vision.training.evaluation import Classification, classify
    from ttt_adapt.vision.training.loop import VisionTrainResult, plan_training, train
    from ttt_adapt.vision.training.optimizer import WeightAverage, build_optimizer
    from ttt_adapt.vision.training.settings import VisionTrainSettings

_MODULE_OF = {
    "Classification": "evaluation",
    "VisionTrainResult": "loop",
    "VisionTrainSettings": "settings",
    "WeightAverage": "optimizer",
    "build_optimizer": "optimizer",
    "classify": "evaluation",
    "load_model": "building",
    "plan_training": "loop",
    "settings_of": "building",
    "train": "loop",
}

__all__ = [
    "Classification",
    "VisionTrainResult",
    "VisionTrainSettings",
    "WeightAverage",
    "build_optimizer",
    "classify",
    "load_model",
    "plan_training",
    "settings_of",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
