"""What training does to images: sizes, ranges, seeds, and each operation against its definition."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ttt_adapt.settings import make_settings
from ttt_adapt.vision.data import (
    AugmentationSettings,
    EvaluationTransform,
    ImageDataSettings,
    RandAugment,
    TrainingTransform,
    mix,
    sample_image,
    smooth_targets,
)
from ttt_adapt.vision.data.geometry import centre_crop, random_resized_crop
from ttt_adapt.vision.data.rand_augment import FORMS
from ttt_adapt.vision.data.transforms import denormalised, erase


def data(**changes: Any) -> ImageDataSettings:
    values: dict[str, Any] = {"path": "x", "image_size": (48, 40), **changes}
    return ImageDataSettings(**values)


def ramp(height: int, width: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    red = np.tile(np.linspace(0, 255, width), (height, 1))
    green = np.tile(np.linspace(0, 255, height)[:, None], (1, width))
    pixels = np.stack([red, green, np.zeros_like(red)], axis=2)
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_random_crops_fit_any_image(
    height: int, width: int, size: tuple[int, int], seed: int
) -> None:
    found = random_resized_crop(
        ramp(height, width), size, np.random.default_rng(seed), area=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3), interpolation="bilinear",
    )  # fmt: skip
    assert found.size == (size[1], size[0])


def test_random_crops_have_the_area_and_ratio_asked_for() -> None:
    """A ramp's corners tell which part was taken."""
    image, generator = ramp(400, 400), np.random.default_rng(0)
    shares, ratios = [], []
    for _ in range(400):
        crop = np.asarray(
            random_resized_crop(
                image, (64, 64), generator, area=(0.1, 0.5), ratio=(0.5, 2.0),
                interpolation="bilinear",
            )
        ).astype(float)  # fmt: skip
        width = (crop[:, -1, 0].mean() - crop[:, 0, 0].mean()) / 255 * 64 / 63
        height = (crop[-1, :, 1].mean() - crop[0, :, 1].mean()) / 255 * 64 / 63
        shares.append(width * height)
        ratios.append(width / height)
    assert 0.09 < min(shares) < 0.15 and 0.45 < max(shares) < 0.52
    assert 0.47 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.15
    assert abs(np.mean(shares) - 0.3) < 0.03
    assert abs(np.mean(np.log(ratios))) < 0.1


@given(height=st.integers(1, 120), width=st.integers(1, 120), fraction=st.sampled_from([0.875, 1]))
@settings(max_examples=60)
def test_centre_crops_fit_any_image(height: int, width: int, fraction: float) -> None:
    found = centre_crop(
        ramp(height, width), (24, 30), crop_fraction=fraction, interpolation="bicubic"
    )
    assert found.size == (30, 24)


def test_the_centre_is_the_centre() -> None:
    found = np.asarray(
        centre_crop(ramp(256, 512), (224, 224), crop_fraction=0.875, interpolation="bilinear")
    )
    assert abs(found[..., 0].mean() - 127.5) < 1 and abs(found[..., 1].mean() - 127.5) < 1


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = ramp(8, 8)
    found = centre_crop(image, (8, 8), crop_fraction=1.0, interpolation="bicubic")
    assert np.array_equal(np.asarray(found), np.asarray(image))


def test_normalisation_and_back() -> None:
    image, how = ramp(48, 40), data(crop_fraction=1.0)
    tensor = EvaluationTransform(how)(image)
    assert tensor.shape == (3, 48, 40) and tensor.dtype == torch.float32
    expected = (np.asarray(image) / 255 - how.mean) / how.std
    assert np.allclose(tensor.permute(1, 2, 0), expected, atol=1e-5)
    assert np.array_equal(denormalised(tensor[None], how)[0], np.asarray(image))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_operations_keep_size_and_mode(form: str, in_channels: int) -> None:
    image = sample_image("china").resize((40, 30)).convert("L" if in_channels == 1 else "RGB")
    before = np.asarray(image).copy()
    for name, operation in FORMS[form][0].items():
        for share in (0.0, 0.37, 1.0):
            found = operation(image, share, np.random.default_rng(1))
            assert (found.size, found.mode) == (image.size, image.mode), name
    assert np.array_equal(np.asarray(image), before)


@pytest.mark.parametrize(
    "name", ["rotate", "shear x", "shear y", "translate x", "translate y", "solarize add"]
)
@pytest.mark.parametrize("form", FORMS)
def test_no_magnitude_changes_nothing(form: str, name: str) -> None:
    image = ramp(40, 30)
    found = FORMS[form][0][name](image, 0.0, np.random.default_rng(0))
    assert np.abs(np.asarray(found).astype(int) - np.asarray(image)).max() <= 1


@pytest.mark.parametrize(
    "name",
    ["posterize", "solarize", "color", "contrast", "brightness", "sharpness", "translate x"],
)
def test_increasing_operations_increase(name: str) -> None:
    image = sample_image("chelsea").resize((60, 50))
    changes = []
    for share in (0.0, 0.3, 0.6, 0.9):
        found = FORMS["increasing"][0][name](image, share, np.random.default_rng(0))
        changes.append(np.abs(np.asarray(found).astype(int) - np.asarray(image)).mean())
    rest = changes if name != "posterize" else changes[1:]
    assert rest == sorted(rest) and changes[-1] > changes[0]


def test_operations_by_definition() -> None:
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    values, generator = np.arange(256).reshape(16, 16), np.random.default_rng(0)
    paper, increasing = FORMS["paper"][0], FORMS["increasing"][0]
    for name, table, share, expected in (
        ("posterize", paper, 0.5, values & 0b11000000),
        ("posterize", paper, 0.0, values * 0),
        ("posterize", increasing, 0.5, values & 0b11000000),
        ("posterize", increasing, 0.0, values & 0b11110000),
        ("solarize", paper, 0.5, np.where(values < 128, values, 255 - values)),
        ("solarize", increasing, 0.0, values),
        ("solarize", increasing, 0.25, np.where(values < 192, values, 255 - values)),
        ("invert", paper, 1.0, 255 - values),
        ("solarize add", paper, 1.0, np.where(values < 128, values + 110, values)),
    ):
        found = table[name](image, share, generator)
        assert np.array_equal(np.asarray(found), expected), (name, share)


def test_cutout_covers_a_square() -> None:
    image = Image.new("RGB", (200, 200), "white")
    found = np.asarray(FORMS["paper"][0]["cutout"](image, 0.5, np.random.default_rng(2)))
    grey = (found == 128).all(axis=2)
    assert grey.sum() == 40 * 40  # far enough from the border with this seed
    assert (np.asarray(image) == 255).all()


def test_rand_augment_follows_its_generator() -> None:
    image = sample_image("flower").resize((64, 48))
    augment = RandAugment("increasing", 2, 9.0, 0.5)

    def run(seed: int) -> Any:
        return np.asarray(augment(image, np.random.default_rng(seed)))

    assert np.array_equal(run(1), run(1))
    assert len({run(seed).tobytes() for seed in range(20)}) > 8


def test_half_of_deits_operations_are_skipped() -> None:
    image = sample_image("flower").resize((32, 24))
    augment = RandAugment("increasing", 1, 9.0)
    same = [
        np.array_equal(np.asarray(augment(image, np.random.default_rng(s))), np.asarray(image))
        for s in range(200)
    ]
    assert 0.4 < np.mean(same) < 0.6


def test_erasing_fills_one_rectangle_with_noise() -> None:
    for seed in range(20):
        tensor = torch.full((3, 40, 50), 9.0)
        erase(tensor, np.random.default_rng(seed))
        changed = (tensor != 9.0).all(0)
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        box = changed[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all() and 0.015 < box.numel() / 2000 < 0.36
        assert abs(float(tensor[:, changed].mean())) < 0.5


def test_the_training_transform_is_seeded_and_fits() -> None:
    augmentation = AugmentationSettings(
        crop="random-resized", flip=0.5, rand_augment="increasing", rand_augment_std=0.5,
        erasing=1.0,
    )  # fmt: skip
    transform, image = TrainingTransform(data(), augmentation), sample_image("china")
    assert transform.is_random
    one, two, other = (transform(image, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.shape == (3, 48, 40)
    quiet = TrainingTransform(data(), AugmentationSettings())
    assert not quiet.is_random
    assert torch.equal(quiet(image, np.random.default_rng(0)), EvaluationTransform(data())(image))


def test_targets_sum_to_one() -> None:
    found = smooth_targets(torch.tensor([0, 2]), 4, 0.1)
    assert torch.allclose(found.sum(1), torch.ones(2))
    assert torch.allclose(found[0], torch.tensor([0.925, 0.025, 0.025, 0.025]))


@given(
    mixup=st.sampled_from([0.0, 0.2, 0.8]),
    cutmix=st.sampled_from([0.0, 1.0]),
    count=st.integers(1, 6),
    seed=st.integers(0, 200),
)
@settings(max_examples=60)
def test_mixing_keeps_labels_in_step_with_pixels(
    mixup: float, cutmix: float, count: int, seed: int
) -> None:
    """Images of one constant each, one-hot in their channels: the mean pixel is the mixed label."""
    labels = torch.arange(count) % 3
    targets = smooth_targets(labels, 3, 0.0)
    images = targets[:, :, None, None].expand(count, 3, 12, 10).clone()
    before = images.clone()
    how = AugmentationSettings(mixup_alpha=mixup, cutmix_alpha=cutmix)
    mixed, found = mix(images, targets, how, np.random.default_rng(seed))
    assert torch.equal(images, before)
    assert torch.allclose(found.sum(1), torch.ones(count), atol=1e-6)
    assert torch.allclose(mixed.mean((2, 3)), found, atol=1e-5)
    if not mixup and not cutmix:
        assert mixed is images


def test_mixup_keeps_the_larger_part_its_own() -> None:
    how = AugmentationSettings(mixup_alpha=0.2)
    targets = torch.eye(2)
    for seed in range(30):
        _, found = mix(torch.zeros(2, 1, 2, 2), targets, how, np.random.default_rng(seed))
        assert float(found[0, 0]) >= 0.5 - 1e-6


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"crop_area": [0.5, 0.2]}, "crop_area: expected 0 < least <= greatest"),
        ({"crop_ratio": [0.0, 1.0]}, "crop_ratio: expected 0 < least"),
        ({"rand_augment_magnitude": 11.0}, "less than or equal to 10"),
        ({"mixup": 0.2}, "did you mean mixup_alpha"),
    ],
)
def test_augmentation_settings_that_do_not_fit(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make_settings(AugmentationSettings, values)


def test_ratio_limits_are_symmetric_by_default() -> None:
    low, high = AugmentationSettings().crop_ratio
    assert math.isclose(low * high, 1.0)
