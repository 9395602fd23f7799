"""scikit-learn's handwritten digits, and a task on pairs of them that no bag of patches can solve.

The digits (Alpaydin and Kaynak 1998, the test part of the UCI set) come with scikit-learn: 1797
pictures of 8×8 with 17 grey levels. A quarter is held out, the same for every seed of a run.

**pair-same.** Two digits side by side, 8×16: is it the same digit twice? Half of the pairs are. A
model that never lets tokens meet before it averages them scores chance, however good its features
of a patch: the answer depends on products of features of both halves. So this measures mixing
where digits themselves, which a bag of patches mostly solves, do not.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ttt_adapt.errors import ImageError, MissingDependencyError
from ttt_adapt.runtime import derived_seed
from ttt_adapt.vision.data.images import ArrayImages

LEVELS = 16
HELD_OUT = 0.25
DIGIT_SIZE = (8, 8)
PAIR_SIZE = (8, 16)


def digit_images(split: str, *, split_seed: int = 0) -> ArrayImages:
    """The digits of one split, ``train`` or ``validation``, balanced over the ten classes.

    Raises:
        ImageError: another split was asked for.
        MissingDependencyError: scikit-learn is not installed.
    """
    if split not in {"train", "validation"}:
        raise ImageError(f"digits: expected the split train or validation, found {split!r}")
    pixels, labels = _all_digits()
    generator = np.random.default_rng(split_seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        places = generator.permutation(np.flatnonzero(labels == digit))
        held_out[places[: round(len(places) * HELD_OUT)]] = True
    wanted = held_out if split == "validation" else ~held_out
    return ArrayImages(pixels[wanted], labels[wanted], tuple("0123456789"))


@dataclass(frozen=True)
class PairSame:
    """Pairs of digits drawn from a split; pair ``i`` depends on the seed and ``i`` alone.

    Attributes:
        digits: where the halves come from.
        num_pairs: how many there are.
        seed: of the draw.
    """

    digits: ArrayImages
    num_pairs: int
    seed: int
    classes: tuple[str, ...] = ("different", "same")
    _left: NDArray[np.int64] = field(init=False, repr=False)
    _right: NDArray[np.int64] = field(init=False, repr=False)
    _same: NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(derived_seed(self.seed, "pair-same"))
        labels, total = self.digits.labels_N, len(self.digits)
        same = np.arange(self.num_pairs) % 2 == 1
        left = generator.integers(total, size=self.num_pairs)
        # A class, then one of its digits: the right half's class is as frequent either way.
        shift = generator.integers(1, 10, size=self.num_pairs)
        wanted = (labels[left] + np.where(same, 0, shift)) % 10
        places = [np.flatnonzero(labels == digit) for digit in range(10)]
        draw = generator.random(self.num_pairs)
        right = np.empty(self.num_pairs, dtype=np.int64)
        for digit, members in enumerate(places):
            chosen = wanted == digit
            right[chosen] = members[(draw[chosen] * len(members)).astype(np.int64)]
        for name, value in (("_left", left), ("_right", right), ("_same", same)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self.num_pairs

    def image(self, index: int) -> Image.Image:
        pixels = self.digits.pixels_NHW
        return Image.fromarray(np.hstack([pixels[self._left[index]], pixels[self._right[index]]]))

    def label(self, index: int) -> int:
        return int(self._same[index])


@cache
def _all_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            f"digits come with scikit-learn, which cannot be imported ({error}); install it with: "
            "pip install 'ttt-adapt[vision]'"
        ) from error
    found = load_digits()
    pixels = np.rint(found.images * (255 / LEVELS)).astype(np.uint8)
    return pixels, found.target.astype(np.int64)
