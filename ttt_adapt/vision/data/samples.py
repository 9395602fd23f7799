"""Photographs that come with scikit-learn and scikit-image: real images on every machine."""

from pathlib import Path

import numpy as np
from PIL import Image

from ttt_adapt.errors import ImageError, MissingDependencyError
from ttt_adapt.vision.data.folders import read_image

SAMPLES = {
    "china": "sklearn",
    "flower": "sklearn",
    "astronaut": "skimage",
    "chelsea": "skimage",
    "coffee": "skimage",
    "rocket": "skimage",
}
"""Names, and the package that brings them: 427 × 640, 427 × 640, 512 × 512, 300 × 451 (a cat),
400 × 600, 427 × 640."""


def sample_image(name: str) -> Image.Image:
    """One of :data:`SAMPLES`, RGB.

    Raises:
        ImageError: another name.
        MissingDependencyError: its package is not installed.
    """
    if name not in SAMPLES:
        raise ImageError(f"expected a sample image of {', '.join(SAMPLES)}, found {name!r}")
    package = {"sklearn": "scikit-learn", "skimage": "scikit-image"}[SAMPLES[name]]
    try:
        if SAMPLES[name] == "sklearn":
            from sklearn.datasets import load_sample_image

            pixels = load_sample_image(f"{name}.jpg")
        else:
            import skimage.data

            pixels = getattr(skimage.data, name)()
    except ImportError as error:
        raise MissingDependencyError(
            f"the sample image {name} comes with {package}, which cannot be imported ({error}); "
            "install it with: pip install 'ttt-adapt[vision]'"
        ) from error
    return Image.fromarray(np.asarray(pixels)).convert("RGB")


def named_image(name: str) -> Image.Image:
    """A sample by its name, or an image file by its path.

    Raises:
        ImageError: neither.
    """
    if name in SAMPLES:
        return sample_image(name)
    if not Path(name).exists():
        raise ImageError(
            f"{name}: no such image; expected a file or a sample of {', '.join(SAMPLES)}"
        )
    return read_image(Path(name))
