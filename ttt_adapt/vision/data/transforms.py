"""From a decoded image to the tensor a model reads.

Shape legend: C channels, H W height and width of the input.
"""

import math

import numpy as np
import torch
from PIL import Image

from ttt_adapt.vision.data.geometry import centre_crop, random_resized_crop
from ttt_adapt.vision.data.images import with_channels
from ttt_adapt.vision.data.rand_augment import RandAugment
from ttt_adapt.vision.data.settings import AugmentationSettings, ImageDataSettings

ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


class EvaluationTransform:
    """Scale, cut the centre, normalise: the same every time."""

    def __init__(self, data: ImageDataSettings) -> None:
        self.data = data

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """float32 ``[C, H, W]``."""
        return normalised(fitted(image, self.data), self.data)


class TrainingTransform:
    """Random crop, mirror, RandAugment, normalise, erase: as the generator says."""

    def __init__(self, data: ImageDataSettings, augmentation: AugmentationSettings) -> None:
        self.data, self.augmentation = data, augmentation
        self.rand_augment: RandAugment | None = None
        if augmentation.rand_augment != "none":
            self.rand_augment = RandAugment(
                augmentation.rand_augment,
                augmentation.rand_augment_ops,
                augmentation.rand_augment_magnitude,
                augmentation.rand_augment_std,
            )
        self.is_random = (
            augmentation.crop != "none"
            or augmentation.flip > 0
            or augmentation.erasing > 0
            or self.rand_augment is not None
        )
        """Whether it asks the generator anything."""

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> torch.Tensor:
        """float32 ``[C, H, W]``."""
        data, wanted = self.data, self.augmentation
        if wanted.crop == "random-resized":
            image = random_resized_crop(
                with_channels(image, data.in_channels),
                data.image_size,
                generator,
                area=wanted.crop_area,
                ratio=wanted.crop_ratio,
                interpolation=data.interpolation,
            )
        else:
            image = fitted(image, data)
        if wanted.flip and generator.random() < wanted.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.rand_augment is not None:
            image = self.rand_augment(image, generator)
        tensor = normalised(image, data)
        if wanted.erasing and generator.random() < wanted.erasing:
            erase(tensor, generator)
        return tensor


def fitted(image: Image.Image, data: ImageDataSettings) -> Image.Image:
    """The image in the model's channels and size."""
    return centre_crop(
        with_channels(image, data.in_channels),
        data.image_size,
        crop_fraction=data.crop_fraction,
        interpolation=data.interpolation,
    )


def normalised(image: Image.Image, data: ImageDataSettings) -> torch.Tensor:
    """``(x / 255 − mean) / std`` by channel, float32 ``[C, H, W]``."""
    pixels = np.asarray(image, dtype=np.float32)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    mean, std = (255 * np.asarray(v, dtype=np.float32) for v in (data.mean, data.std))
    return torch.from_numpy(np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1)))


def denormalised(images_BCHW: torch.Tensor, data: ImageDataSettings) -> torch.Tensor:
    """What :func:`normalised` took, uint8 ``[B, H, W, C]``."""
    mean, std = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (data.mean, data.std))
    pixels = (images_BCHW.detach().float().cpu() * std + mean) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def erase(tensor_CHW: torch.Tensor, generator: np.random.Generator) -> None:
    """Fill one rectangle with standard normal noise, in place (Zhong et al. 2020)."""
    channels, height, width = tensor_CHW.shape
    for _ in range(10):
        area = height * width * generator.uniform(*ERASED_AREA)
        ratio = math.exp(generator.uniform(*np.log(ERASED_RATIO)))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top = int(generator.integers(0, height - h + 1))
            left = int(generator.integers(0, width - w + 1))
            noise = generator.standard_normal((channels, h, w), dtype=np.float32)
            tensor_CHW[:, top : top + h, left : left + w] = torch.from_numpy(noise)
            return
