"""Cutting and scaling images: random resized crops to learn from, centre crops to be judged on."""

import math

import numpy as np
from PIL import Image

Size = tuple[int, int]
"""Height and width."""

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
ATTEMPTS = 10


def random_resized_crop(
    image: Image.Image,
    size: Size,
    generator: np.random.Generator,
    *,
    area: tuple[float, float],
    ratio: tuple[float, float],
    interpolation: str,
) -> Image.Image:
    """A random part of the image, scaled to ``size`` (Szegedy et al. 2015).

    The part's share of the image is uniform in ``area``, its width / height log-uniform in
    ``ratio``. Where ten draws don't fit, it is the largest centred part whose proportions do.
    """
    width, height = image.size
    for _ in range(ATTEMPTS):
        target = width * height * generator.uniform(*area)
        proportion = math.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(target * proportion)), round(math.sqrt(target / proportion))
        if 0 < w <= width and 0 < h <= height:
            left = int(generator.integers(0, width - w + 1))
            top = int(generator.integers(0, height - h + 1))
            break
    else:
        proportion = min(max(width / height, ratio[0]), ratio[1])
        w = min(width, max(1, round(height * proportion)))
        h = min(height, max(1, round(width / proportion)))
        left, top = (width - w) // 2, (height - h) // 2
    box = (left, top, left + w, top + h)
    return image.resize((size[1], size[0]), FILTERS[interpolation], box=box)


def centre_crop(
    image: Image.Image, size: Size, *, crop_fraction: float, interpolation: str
) -> Image.Image:
    """The image scaled until it covers ``size / crop_fraction``, and the centre of that."""
    height, width = size
    scale = max(height / crop_fraction / image.height, width / crop_fraction / image.width)
    if (image.height, image.width) == size and crop_fraction == 1.0:
        return image
    scaled = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    if scaled != image.size:
        image = image.resize(scaled, FILTERS[interpolation])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
