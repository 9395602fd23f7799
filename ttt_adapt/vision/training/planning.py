"""What a run would do, and what makes it the same run."""

from typing import Any

import torch

from ttt_adapt.storage import stable_hash
from ttt_adapt.vision.data.batches import open_images
from ttt_adapt.vision.training.building import build_model
from ttt_adapt.vision.training.settings import VisionTrainSettings

# What may change between a checkpoint and its continuation: how often, not what.
EXTENSIBLE = ("name", "validate_every", "log_every", "checkpoint_every", "num_workers")


def plan_training(settings: VisionTrainSettings) -> dict[str, Any]:
    """What a run would do, without training: images, steps, parameters, memory.

    Raises:
        ImageError: the images are not there.
        ModelError: no such model.
    """
    images = open_images(settings.data, training=True, seed=settings.seed)
    with torch.device("meta"):
        model = build_model(settings, len(images.classes), load=False)
    num_parameters = sum(p.numel() for p in model.parameters())
    copies = 4 + (settings.ema_decay is not None)
    return {
        "num_parameters": num_parameters,
        "num_images": len(images),
        "num_classes": len(images.classes),
        "num_steps": num_steps(settings, max(1, len(images) // settings.batch_size)),
        "images_per_step": settings.batch_size,
        # Weights, gradients, two moments and the average; what layers keep for backward comes on top.
        "state_bytes": 4 * copies * num_parameters,
    }


def num_steps(settings: VisionTrainSettings, steps_per_epoch: int) -> int:
    """Outer steps of a run."""
    return settings.num_steps or (settings.epochs or 1) * steps_per_epoch


def run_key(settings: VisionTrainSettings, classes: tuple[str, ...], num_images: int) -> str:
    """What a checkpoint and the run that continues it must agree on."""
    values = settings.model_dump(mode="json", exclude=set(EXTENSIBLE))
    # The place of the images may change, the images not.
    values["data"].pop("path")
    return stable_hash({"settings": values, "classes": list(classes), "num_images": num_images})
