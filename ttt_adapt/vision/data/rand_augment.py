"""RandAugment (Cubuk et al. 2020) over Pillow, in the two forms that the recipes use.

``paper`` is the form of the authors' TensorFlow code, which MTTT trains with: 16 operations, each
drawn one always applied, at magnitudes 0 to 10 whose strength for colour, contrast, brightness and
sharpness runs through the identity, and for posterize and solarize falls as the magnitude grows.
``increasing`` is the form DeiT trains with: 15 operations, each applied half of the time, every one
of them stronger with the magnitude.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

MAX_LEVEL = 10.0
CUTOUT_HALF, TRANSLATE_PIXELS = 40, 100
TRANSLATE_SHARE = 0.45
GREY = 128

Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]
"""Takes the image, the magnitude as a share of the greatest (0 to 1), and a generator."""


@dataclass(frozen=True)
class RandAugment:
    """``num_ops`` operations drawn with replacement for each image.

    Attributes:
        form: ``paper`` or ``increasing``.
        magnitude: 0 to 10.
        std: of the normal noise on the magnitude, cut to 0 to 10.
    """

    form: str
    num_ops: int
    magnitude: float
    std: float = 0.0

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> Image.Image:
        table, applied = FORMS[self.form]
        names = list(table)
        for _ in range(self.num_ops):
            name = names[int(generator.integers(len(names)))]
            skipped = generator.random() >= applied
            level = self.magnitude + self.std * generator.standard_normal()
            if not skipped:
                share = min(max(level, 0.0), MAX_LEVEL) / MAX_LEVEL
                image = table[name](image, share, generator)
        return image


def _fill(image: Image.Image) -> int | tuple[int, ...]:
    return GREY if image.mode == "L" else (GREY,) * len(image.getbands())


def _affine(
    image: Image.Image, matrix: tuple[float, float, float, float, float, float]
) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        resample=Image.Resampling.BILINEAR,
        fillcolor=_fill(image),
    )


def _signed(value: float, generator: np.random.Generator) -> float:
    return value if generator.random() < 0.5 else -value


def rotate(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    """By up to 30 degrees either way."""
    angle = _signed(30 * share, generator)
    return image.rotate(angle, resample=Image.Resampling.BILINEAR, fillcolor=_fill(image))


def shear_x(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    return _affine(image, (1, _signed(0.3 * share, generator), 0, 0, 1, 0))


def shear_y(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, 0, _signed(0.3 * share, generator), 1, 0))


def translate_pixels_x(
    image: Image.Image, share: float, generator: np.random.Generator
) -> Image.Image:
    return _affine(image, (1, 0, _signed(TRANSLATE_PIXELS * share, generator), 0, 1, 0))


def translate_pixels_y(
    image: Image.Image, share: float, generator: np.random.Generator
) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, _signed(TRANSLATE_PIXELS * share, generator)))


def translate_share_x(
    image: Image.Image, share: float, generator: np.random.Generator
) -> Image.Image:
    pixels = TRANSLATE_SHARE * share * image.width
    return _affine(image, (1, 0, _signed(pixels, generator), 0, 1, 0))


def translate_share_y(
    image: Image.Image, share: float, generator: np.random.Generator
) -> Image.Image:
    pixels = TRANSLATE_SHARE * share * image.height
    return _affine(image, (1, 0, 0, 0, 1, _signed(pixels, generator)))


def auto_contrast(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.equalize(image)


def invert(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.invert(image)


def posterize(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    """To ``4 · share`` bits: at none of them the image is black."""
    return _posterized(image, int(4 * share))


def posterize_increasing(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    """To 4 bits less ``4 · share``."""
    return _posterized(image, 4 - int(4 * share))


def _posterized(image: Image.Image, num_bits: int) -> Image.Image:
    mask = 0 if num_bits == 0 else 0xFF & ~(2 ** (8 - num_bits) - 1)
    return image.point([value & mask for value in range(256)] * len(image.getbands()))


def solarize(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    """Values from ``256 · share`` on become their negatives: stronger at small magnitudes."""
    return ImageOps.solarize(image, int(256 * share))


def solarize_increasing(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(image, 256 - int(256 * share))


def solarize_add(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
    """Values below 128 grow by ``110 · share``."""
    added = int(110 * share)
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> tuple[Operation, Operation]:
    """Factor 0.1 to 1.9 over the magnitudes; and 1 ± 0.9 · share."""

    def through(image: Image.Image, share: float, _: np.random.Generator) -> Image.Image:
        return kind(image).enhance(0.1 + 1.8 * share)

    def away(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
        return kind(image).enhance(max(0.1, 1.0 + _signed(0.9 * share, generator)))

    return through, away


def cutout(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    """A grey square of side ``2 · 40 · share`` around a random pixel."""
    half = int(CUTOUT_HALF * share)
    x, y = int(generator.integers(image.width)), int(generator.integers(image.height))
    image = image.copy()
    if half:
        ImageDraw.Draw(image).rectangle(
            (x - half, y - half, x + half - 1, y + half - 1), fill=_fill(image)
        )
    return image


_color, _color_increasing = _enhanced(ImageEnhance.Color)
_contrast, _contrast_increasing = _enhanced(ImageEnhance.Contrast)
_brightness, _brightness_increasing = _enhanced(ImageEnhance.Brightness)
_sharpness, _sharpness_increasing = _enhanced(ImageEnhance.Sharpness)
_SHARED: dict[str, Operation] = {
    "auto contrast": auto_contrast,
    "equalize": equalize,
    "invert": invert,
    "rotate": rotate,
    "shear x": shear_x,
    "shear y": shear_y,
    "solarize add": solarize_add,
}
FORMS: dict[str, tuple[dict[str, Operation], float]] = {
    "paper": (
        {
            **_SHARED,
            "posterize": posterize,
            "solarize": solarize,
            "color": _color,
            "contrast": _contrast,
            "brightness": _brightness,
            "sharpness": _sharpness,
            "translate x": translate_pixels_x,
            "translate y": translate_pixels_y,
            "cutout": cutout,
        },
        1.0,
    ),
    "increasing": (
        {
            **_SHARED,
            "posterize": posterize_increasing,
            "solarize": solarize_increasing,
            "color": _color_increasing,
            "contrast": _contrast_increasing,
            "brightness": _brightness_increasing,
            "sharpness": _sharpness_increasing,
            "translate x": translate_share_x,
            "translate y": translate_share_y,
        },
        0.5,
    ),
}
"""Operations by name, and how often a drawn one is applied."""
