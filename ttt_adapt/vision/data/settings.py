"""Settings of image data and its augmentation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ttt_adapt.settings import Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]
Kind = Literal["folder", "hub", "digits", "pair-same"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS_MEAN, DIGITS_STD = (0.305,), (0.376,)


class ImageDataSettings(Settings):
    """Where labelled images come from and how they become tensors."""

    kind: Kind = "folder"
    """``folder``: one folder per class below one per split. ``hub``: a data set of the Hugging Face
    hub or a local directory laid out like one. ``digits``: scikit-learn's 1797 digits of 8×8.
    ``pair-same``: two of those side by side; is it the same digit twice?"""
    path: str = ""
    """Of ``folder`` and ``hub`` (``owner/name`` there)."""
    hub_config: str | None = None
    image_column: str | None = None
    """Of ``hub``; ``None``: the only column of images."""
    label_column: str | None = None
    """Of ``hub``; ``None``: the only column of class labels, else ``label``."""
    train_split: str = "train"
    validation_split: str = "validation"
    image_size: tuple[PositiveInt, PositiveInt] = (224, 224)
    """Height and width of the model's input."""
    in_channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[Annotated[float, Field(gt=0.0)], ...] = IMAGENET_STD
    """A pixel ``x`` of 0 to 255 becomes ``(x / 255 − mean) / std``."""
    crop_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.875
    """In evaluation the image is scaled until ``image_size`` is this share of it, then cut from its
    centre: 224 of 256. 1.0 scales to ``image_size``, without cutting what has its proportions."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    num_pairs: PositiveInt = 64_000
    """Training pairs of ``pair-same`` before they repeat."""
    num_validation_pairs: PositiveInt = 2000
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Which quarter of scikit-learn's digits is held out."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.in_channels:
                raise ValueError(
                    f"{name}: expected a value for each of {self.in_channels} channels, "
                    f"found {len(values)}"
                )
        if self.kind in {"folder", "hub"} and not self.path:
            raise ValueError(f"path: expected the place of the {self.kind} data, found none")
        return self


class AugmentationSettings(Settings):
    """What training does to its images. The defaults do nothing but fit them to the input's size."""

    crop: Literal["none", "random-resized"] = "none"
    """``none``: as in evaluation."""
    crop_area: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Least and greatest share of the image that a random crop takes."""
    crop_ratio: tuple[NonNegative, NonNegative] = (3 / 4, 4 / 3)
    """Least and greatest width / height of a random crop before it is scaled."""
    flip: Fraction = 0.0
    """How often an image is mirrored."""
    rand_augment: Literal["none", "paper", "increasing"] = "none"
    """``paper``: Cubuk et al. 2020 as in the TensorFlow code (16 operations, always applied).
    ``increasing``: as in DeiT (15 operations, each applied half of the time, stronger with
    the magnitude throughout)."""
    rand_augment_ops: PositiveInt = 2
    rand_augment_magnitude: Annotated[float, Field(ge=0.0, le=10.0)] = 9.0
    rand_augment_std: NonNegative = 0.0
    """Of a normal distribution around the magnitude; drawn anew for each operation."""
    erasing: Fraction = 0.0
    """How often a rectangle becomes noise (Zhong et al. 2020)."""
    mixup_alpha: NonNegative = 0.0
    cutmix_alpha: NonNegative = 0.0
    switch: Fraction = 0.5
    """How often CutMix is taken where both are on."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0.0 < low <= high:
                raise ValueError(f"{name}: expected 0 < least <= greatest, found {low}, {high}")
        return self
