"""Labelled images: folders, hub data sets, scikit-learn's digits; augmentation; seeded batches.

The names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.vision.data.batches import TrainingBatches, evaluation_batches, open_images
    from ttt_adapt.vision.data.digits import PairSame, digit_images
    from ttt_adapt.vision.data.folders import FolderImages, read_image
    from ttt_adapt.vision.data.hub import HubImages
    from ttt_adapt.vision.data.images import ArrayImages, LabelledImages
    from ttt_adapt.vision.data.mixing import mix, smooth_targets
    from ttt_adapt.vision.data.rand_augment import RandAugment
    from ttt_adapt.vision.data.samples import SAMPLES, named_image, sample_image
    from ttt_adapt.vision.data.settings import AugmentationSettings, ImageDataSettings
    from ttt_adapt.vision.data.transforms import EvaluationTransform, TrainingTransform

_MODULE_OF = {
    "ArrayImages": "images",
    "AugmentationSettings": "settings",
    "EvaluationTransform": "transforms",
    "FolderImages": "folders",
    "HubImages": "hub",
    "ImageDataSettings": "settings",
    "LabelledImages": "images",
    "PairSame": "digits",
    "RandAugment": "rand_augment",
    "SAMPLES": "samples",
    "TrainingBatches": "batches",
    "TrainingTransform": "transforms",
    "digit_images": "digits",
    "evaluation_batches": "batches",
    "mix": "mixing",
    "named_image": "samples",
    "open_images": "batches",
    "read_image": "folders",
    "sample_image": "samples",
    "smooth_targets": "mixing",
}

__all__ = [
    "SAMPLES",
    "ArrayImages",
    "AugmentationSettings",
    "EvaluationTransform",
    "FolderImages",
    "HubImages",
    "ImageDataSettings",
    "LabelledImages",
    "PairSame",
    "RandAugment",
    "TrainingBatches",
    "TrainingTransform",
    "digit_images",
    "evaluation_batches",
    "mix",
    "named_image",
    "open_images",
    "read_image",
    "sample_image",
    "smooth_targets",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
