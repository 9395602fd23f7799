"""Labelled images: what every source of them offers, and images that lie in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ttt_adapt.errors import ImageError

Mode = Literal["L", "RGB"]


class LabelledImages(Protocol):
    """Images with a class each, by number. Safe to hand to another process."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; a label is a position here."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """The image, decoded, in whatever mode and size it has.

        Raises:
            ImageError: it cannot be read.
        """

    def label(self, index: int) -> int: ...


@dataclass(frozen=True)
class ArrayImages:
    """Images of one size in memory.

    Attributes:
        pixels_NHW: uint8, grey.
        labels_N: int64.
    """

    pixels_NHW: NDArray[np.uint8]
    labels_N: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels_N)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels_NHW[index])

    def label(self, index: int) -> int:
        return int(self.labels_N[index])


def decode_image(source: Path | IO[bytes], where: str) -> Image.Image:
    """An image file, decoded, turned as its EXIF orientation says.

    Args:
        where: what to call it in errors.

    Raises:
        ImageError: no such file, or no image that Pillow reads.
    """
    try:
        with Image.open(source) as image:
            image.load()
            return ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise ImageError(f"{where}: no such image") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ImageError(f"{where}: cannot be read as an image: {error}") from None


def with_channels(image: Image.Image, in_channels: int) -> Image.Image:
    """The image as grey or RGB; transparency is laid over white, 16 bits are scaled to 8."""
    mode: Mode = "L" if in_channels == 1 else "RGB"
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert(mode)
