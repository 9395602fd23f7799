"""MixUp and CutMix: images of a batch laid over each other, and the labels that belong to that.

Shape legend: B images, C channels, H W pixels, K classes.
"""

import numpy as np
import torch
from torch.nn import functional

from ttt_adapt.vision.data.settings import AugmentationSettings


def smooth_targets(labels_B: torch.Tensor, num_classes: int, smoothing: float) -> torch.Tensor:
    """One-hot rows, ``smoothing`` of each spread over all classes; float32 ``[B, K]``."""
    one_hot = functional.one_hot(labels_B, num_classes).float()
    return one_hot * (1.0 - smoothing) + smoothing / num_classes


def mix(
    images_BCHW: torch.Tensor,
    targets_BK: torch.Tensor,
    settings: AugmentationSettings,
    generator: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each image with its mirror place in the batch: the first with the last, and so on.

    MixUp (Zhang et al. 2018) weighs both with a draw λ from Beta(α, α), the larger part its own;
    CutMix (Yun et al. 2019) pastes a rectangle of share 1 − λ. One λ serves the whole batch. The
    arguments stay as they are; without either, they are returned.
    """
    mixup, cutmix = settings.mixup_alpha > 0, settings.cutmix_alpha > 0
    if not (mixup or cutmix):
        return images_BCHW, targets_BK
    if cutmix and (not mixup or generator.random() < settings.switch):
        share = generator.beta(settings.cutmix_alpha, settings.cutmix_alpha)
        images_BCHW, share = _paste(images_BCHW, share, generator)
    else:
        drawn = generator.beta(settings.mixup_alpha, settings.mixup_alpha)
        share = max(drawn, 1.0 - drawn)
        images_BCHW = images_BCHW * share + images_BCHW.flip(0) * (1.0 - share)
    return images_BCHW, targets_BK * share + targets_BK.flip(0) * (1.0 - share)


def _paste(
    images_BCHW: torch.Tensor, share: float, generator: np.random.Generator
) -> tuple[torch.Tensor, float]:
    """A rectangle around a random pixel, cut at the borders, and the share that is left."""
    height, width = images_BCHW.shape[-2:]
    side = (1.0 - share) ** 0.5
    half_h, half_w = round(height * side / 2), round(width * side / 2)
    y, x = int(generator.integers(height)), int(generator.integers(width))
    top, bottom = max(0, y - half_h), min(height, y + half_h)
    left, right = max(0, x - half_w), min(width, x + half_w)
    mixed = images_BCHW.clone()
    mixed[..., top:bottom, left:right] = images_BCHW.flip(0)[..., top:bottom, left:right]
    return mixed, 1.0 - (bottom - top) * (right - left) / (height * width)
