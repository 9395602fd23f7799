"""Train vision models and see how well they classify.

The names below load on first use.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.vision.training.building import load_model, settings_of
    from ttt_adapt.vision.training.evaluation import Classification, classify
    from ttt_adapt.vision.training.loop import VisionTrainResult, train
    from ttt_adapt.vision.training.optimizer import WeightAverage, build_optimizer
    from ttt_adapt.vision.training.planning import plan_training
    from ttt_adapt.vision.training.settings import VisionTrainSettings

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".building": ("load_model", "settings_of"),
        ".evaluation": ("Classification", "classify"),
        ".loop": ("VisionTrainResult", "train"),
        ".optimizer": ("WeightAverage", "build_optimizer"),
        ".planning": ("plan_training",),
        ".settings": ("VisionTrainSettings",),
    },
)
