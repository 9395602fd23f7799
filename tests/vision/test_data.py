"""Images from folders, data sets and scikit-learn; batches that start anywhere."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ttt_adapt.errors import ImageError
from ttt_adapt.settings import make_settings
from ttt_adapt.vision.data import (
    AugmentationSettings,
    FolderImages,
    HubImages,
    ImageDataSettings,
    PairSame,
    TrainingBatches,
    digit_images,
    evaluation_batches,
    open_images,
)
from ttt_adapt.vision.data.images import with_channels
from ttt_adapt.vision.data.samples import SAMPLES, named_image, sample_image


def pixels(seed: int, size: tuple[int, int] = (20, 24)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train`` and ``val`` with two classes; one image is grey, one lies deeper."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            place = root / split / name
            (place / "deeper").mkdir(parents=True)
            for number in range(count):
                where = place / "deeper" if number == 0 else place
                image = pixels(100 * label + number)
                image = image.convert("L") if number == 1 else image
                image.save(where / f"{number}.png")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    return root


def folder_settings(folder: Path, **changes: Any) -> ImageDataSettings:
    return ImageDataSettings(path=str(folder), image_size=(16, 16), **changes)


def digit_settings(**changes: Any) -> ImageDataSettings:
    values: dict[str, Any] = {
        "kind": "digits",
        "image_size": (8, 8),
        "in_channels": 1,
        "mean": (0.3,),
        "std": (0.4,),
        "crop_fraction": 1.0,
        **changes,
    }
    return ImageDataSettings(**values)


def test_a_folder_of_classes_is_read(folder: Path) -> None:
    images = FolderImages(folder, "train")
    assert images.classes == ("cat", "dog") and len(images) == 12
    assert [images.label(i) for i in range(12)] == [0] * 6 + [1] * 6
    assert np.array_equal(
        np.asarray(images.image(5)), np.asarray(pixels(0))
    )  # deeper/0.png is last


def test_the_validation_split_goes_by_other_names(folder: Path) -> None:
    assert len(open_images(folder_settings(folder))) == 6


def test_labels_agree_where_a_split_lacks_a_class(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "validation" / "dog").mkdir(parents=True)
    pixels(1).save(tmp_path / "validation" / "dog" / "a.png")
    (tmp_path / "train").symlink_to(folder / "train")
    assert open_images(folder_settings(tmp_path)).label(0) == 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda root: None, "expected a folder 'train', found none"),
        (lambda root: (root / "train").mkdir(), "expected a folder for each class, found none"),
        (lambda root: (root / "train" / "cat").mkdir(parents=True), "expected images (.jpg"),
    ],
)
def test_folders_of_another_layout(tmp_path: Path, make: Any, expected: str) -> None:
    make(tmp_path)
    with pytest.raises(ImageError) as error:
        FolderImages(tmp_path, "train")
    assert expected in str(error.value)


def test_a_class_of_the_other_split_alone(tmp_path: Path) -> None:
    for name in ("train/cat", "val/cat", "val/cow"):
        (tmp_path / name).mkdir(parents=True)
        pixels(0).save(tmp_path / name / "0.png")
    with pytest.raises(ImageError, match="found 'cow' beside them"):
        open_images(folder_settings(tmp_path))


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "bad.png").write_bytes(b"\x89PNG, not really")
    with pytest.raises(ImageError, match="bad.png: cannot be read as an image"):
        FolderImages(tmp_path, "train").image(0)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "I;16", "1", "CMYK"])
@pytest.mark.parametrize("in_channels", [1, 3])
def test_every_mode_becomes_grey_or_rgb(mode: str, in_channels: int) -> None:
    white: Any = {"I;16": 65535, "CMYK": (0, 0, 0, 0)}.get(mode, "white")
    image = Image.new(mode, (4, 3), white)
    found = np.asarray(with_channels(image, in_channels))
    assert found.shape == ((3, 4) if in_channels == 1 else (3, 4, 3)) and found.min() == 255


def test_transparency_lies_over_white() -> None:
    assert with_channels(Image.new("RGBA", (1, 1), (0, 0, 0, 0)), 3).getpixel((0, 0)) == (255,) * 3


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local data set with images and labels, and one whose labels are words."""
    import datasets

    root = tmp_path_factory.mktemp("hub")
    rows = {"image": [pixels(seed) for seed in range(4)], "kind": [1, 0, 1, 1]}
    features = datasets.Features(
        {"image": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    (root / "labels").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        root / "labels" / "train-00000.parquet"
    )
    words = {"photo": rows["image"], "label": ["b", "a", "b", "c"], "other": [1, 2, 3, 4]}
    (root / "words").mkdir()
    datasets.Dataset.from_dict(
        words,
        features=datasets.Features(
            {
                "photo": datasets.Image(),
                "label": datasets.Value("string"),
                "other": datasets.Value("int64"),
            }
        ),
    ).to_parquet(root / "words" / "train-00000.parquet")
    return root


def hub_settings(path: Path, **changes: Any) -> ImageDataSettings:
    return ImageDataSettings(kind="hub", path=str(path), **changes)


def test_hub_images_with_class_labels(hub_folder: Path) -> None:
    images = HubImages(hub_settings(hub_folder / "labels"), "train")
    assert images.classes == ("cat", "dog")
    assert [images.label(i) for i in range(len(images))] == [1, 0, 1, 1]
    assert np.array_equal(np.asarray(images.image(2)), np.asarray(pixels(2)))


def test_hub_images_that_are_turned_damaged_or_absent(tmp_path: Path) -> None:
    import datasets

    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (6, 4)).save(turned, "JPEG", exif=exif)
    rows = [
        {"image": {"bytes": turned.getvalue(), "path": None}, "label": "a"},
        {"image": {"bytes": b"not an image", "path": None}, "label": "a"},
        {"image": None, "label": "a"},
    ]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "train-00000.parquet")
    images = HubImages(hub_settings(tmp_path), "train")
    assert images.image(0).size == (4, 6)
    with pytest.raises(ImageError, match="row 2: cannot be read as an image"):
        images.image(1)
    with pytest.raises(ImageError, match="row 3: expected an image, found none"):
        images.image(2)


def test_hub_labels_that_are_words(hub_folder: Path) -> None:
    images = HubImages(hub_settings(hub_folder / "words"), "train")
    assert images.classes == ("a", "b", "c") and [images.label(i) for i in range(4)] == [1, 0, 1, 2]
    other = HubImages(hub_settings(hub_folder / "words", label_column="other"), "train")
    assert len(other.classes) == 4


@pytest.mark.parametrize(
    ("changes", "split", "expected"),
    [
        ({"label_column": "lable"}, "train", "expected a column 'lable', found photo, label"),
        ({}, "nowhere", "cannot be opened"),
    ],
)
def test_hub_mistakes(hub_folder: Path, changes: Any, split: str, expected: str) -> None:
    with pytest.raises(ImageError, match=expected):
        HubImages(hub_settings(hub_folder / "words", **changes), split)


def test_digits_are_split_without_overlap_and_keep_their_levels() -> None:
    train, held = digit_images("train"), digit_images("validation")
    assert len(train) + len(held) == 1797 and 0.24 < len(held) / 1797 < 0.26
    assert len(np.unique(train.pixels_NHW)) == 17
    both = {image.tobytes() for image in train.pixels_NHW}
    assert not any(image.tobytes() in both for image in held.pixels_NHW)
    assert set(held.labels_N.tolist()) == set(range(10))
    assert np.array_equal(digit_images("train").pixels_NHW, train.pixels_NHW)
    with pytest.raises(ImageError, match="train or validation, found 'test'"):
        digit_images("test")


def test_pairs_are_what_they_say() -> None:
    held = digit_images("validation")
    pairs = PairSame(held, 400, seed=3)
    by_pixels = {image.tobytes(): int(k) for image, k in zip(*arrays(held), strict=True)}
    for index in range(400):
        halves = np.split(np.asarray(pairs.image(index)), 2, axis=1)
        left, right = (by_pixels[np.ascontiguousarray(half).tobytes()] for half in halves)
        assert (left == right) == bool(pairs.label(index))
    assert sum(pairs.label(i) for i in range(400)) == 200
    again = PairSame(held, 400, seed=3)
    assert np.array_equal(np.asarray(pairs.image(7)), np.asarray(again.image(7)))
    other = PairSame(held, 400, seed=4)
    assert any(np.any(np.asarray(pairs.image(i)) != np.asarray(other.image(i))) for i in range(9))


def test_no_half_of_a_pair_tells_the_answer() -> None:
    """Right halves are as often of each class whether the pair is the same or not."""
    train = digit_images("train")
    pairs = PairSame(train, 20_000, seed=0)
    right = train.labels_N[pairs._right]
    for same in (False, True):
        share = np.bincount(right[pairs._same == same], minlength=10) / 10_000
        assert np.abs(share - 0.1).max() < 0.015


def arrays(images: Any) -> tuple[Any, Any]:
    return images.pixels_NHW, images.labels_N


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(batches, count))


@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_batches_start_anywhere(flip: float) -> None:
    settings, augmentation = digit_settings(), AugmentationSettings(flip=flip)
    make = TrainingBatches(digit_images("train"), settings, augmentation, batch_size=64, seed=1)
    per_epoch = make.steps_per_epoch
    whole = take(make.starting_at(0), per_epoch + 3)
    late = take(make.starting_at(per_epoch - 1), 4)
    for (images, labels), (images_again, labels_again) in zip(whole[-4:], late, strict=True):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)
    assert not torch.equal(whole[0][0], whole[per_epoch][0])


def test_a_pass_shows_every_image_at_most_once() -> None:
    train = digit_images("train")
    make = TrainingBatches(train, digit_settings(), AugmentationSettings(), batch_size=50, seed=0)
    seen = torch.cat([images for images, _ in take(make.starting_at(0), make.steps_per_epoch)])
    assert len({image.numpy().tobytes() for image in seen}) == len(seen) == 50 * (len(train) // 50)


@given(num_processes=st.sampled_from([1, 2, 3, 4]), step=st.integers(0, 30))
def test_processes_share_a_batch(num_processes: int, step: int) -> None:
    train, settings = digit_images("train"), digit_settings()

    def batch(rank: int, count: int) -> Any:
        make = TrainingBatches(
            train, settings, AugmentationSettings(), batch_size=12, seed=0, rank=rank,
            num_processes=count,
        )  # fmt: skip
        return next(make.starting_at(step))

    whole = batch(0, 1)
    for rank in range(num_processes):
        images, labels = batch(rank, num_processes)
        assert torch.equal(images, whole[0][rank::num_processes])
        assert torch.equal(labels, whole[1][rank::num_processes])


def test_worker_processes_change_nothing(folder: Path) -> None:
    settings, augmentation = (
        folder_settings(folder),
        AugmentationSettings(crop="random-resized", flip=0.5),
    )
    images = open_images(settings, training=True)
    found = []
    for num_workers in (0, 1):
        make = TrainingBatches(
            images, settings, augmentation, batch_size=4, seed=0, num_workers=num_workers
        )
        found.append(take(make.starting_at(2), 2))
    for here, there in zip(*found, strict=True):
        assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])


def test_evaluation_sees_each_image_once() -> None:
    held, settings = digit_images("validation"), digit_settings()
    parts = [
        torch.cat(
            [
                labels
                for _, labels in evaluation_batches(
                    held, settings, batch_size=32, rank=rank, num_processes=2
                )
            ]
        )
        for rank in (0, 1)
    ]
    assert torch.equal(parts[0], torch.from_numpy(held.labels_N[0::2]))
    assert torch.equal(parts[1], torch.from_numpy(held.labels_N[1::2]))


def test_too_few_images_for_a_batch() -> None:
    with pytest.raises(ImageError, match="at least one batch of 5000 training images, found 13"):
        TrainingBatches(
            digit_images("train"), digit_settings(), AugmentationSettings(), batch_size=5000, seed=0
        )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "folder"}, "expected the place of the folder data"),
        ({"kind": "digits", "in_channels": 1}, "mean: expected a value for each of 1 channels"),
        ({"kind": "digits", "image_sice": [8, 8]}, "did you mean image_size?"),
    ],
)
def test_settings_that_do_not_fit(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected.replace("?", r"\?")):
        make_settings(ImageDataSettings, values)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_photographs(name: str) -> None:
    image = sample_image(name)
    assert image.mode == "RGB" and min(image.size) >= 300


def test_named_images(tmp_path: Path) -> None:
    pixels(0).save(tmp_path / "a.png")
    assert np.array_equal(np.asarray(named_image(str(tmp_path / "a.png"))), np.asarray(pixels(0)))
    with pytest.raises(ImageError, match="no such image; expected a file or a sample of china"):
        named_image("chinna")
    with pytest.raises(ImageError, match="found 'dog'"):
        sample_image("dog")
