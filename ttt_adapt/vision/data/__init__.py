"""Labelled images: folders, hub data sets, scikit-learn's digits; augmentation; seeded batches.

The names below load on first use.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".batches": ("TrainingBatches", "evaluation_batches", "open_images"),
        ".digits": ("PairSame", "digit_images"),
        ".folders": ("FolderImages", "read_image"),
        ".hub": ("HubImages",),
        ".images": ("ArrayImages", "LabelledImages"),
        ".mixing": ("mix", "smooth_targets"),
        ".rand_augment": ("RandAugment",),
        ".samples": ("SAMPLES", "named_image", "sample_image"),
        ".settings": ("AugmentationSettings", "ImageDataSettings"),
        ".transforms": ("EvaluationTransform", "TrainingTransform"),
    },
)
