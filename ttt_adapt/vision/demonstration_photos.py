"""The part of the demonstration about real images: learn which photograph a part is of, look inside.

The photographs come with scikit-learn and scikit-image. Of each the left two thirds are learned from, in
random crops, and parts of the right third are held out.
"""

from pathlib import Path
from typing import Any

from PIL import Image

from ttt_adapt.configs import config_path
from ttt_adapt.settings import load_settings, override
from ttt_adapt.storage import atomic_path
from ttt_adapt.vision.data.samples import SAMPLES, sample_image
from ttt_adapt.vision.training.settings import VisionTrainSettings

TRAIN_SHARE = 2 / 3
TILE, STRIDE = 128, 32
EXPLAINED = ("chelsea", "astronaut", "china")
EXPLAINED_SIZE = (192, 192)


def learn_photos(folder: Path, *, num_steps: int | None = None) -> dict[str, Any]:
    """Write tiles, train the recipe ``vision_photos`` on them, explain the model.

    Returns:
        ``top1`` of held-out tiles, ``elapsed_s`` of training, ``pictures``.

    Raises:
        MissingDependencyError: scikit-image or matplotlib is not installed.
    """
    from ttt_adapt.vision.data.settings import ImageDataSettings
    from ttt_adapt.vision.explaining import explain
    from ttt_adapt.vision.training import load_model, train

    write_tiles(folder / "tiles")
    settings = override(
        load_settings(VisionTrainSettings, config_path("vision_photos")),
        {"data.path": str(folder / "tiles")} | ({"num_steps": num_steps} if num_steps else {}),
    )
    result = train(settings, folder / "model", device="cpu", report=lambda _: None)
    assert result.validation is not None, "the last step is validated"
    data = override(settings.data, {"image_size": list(EXPLAINED_SIZE)})
    assert isinstance(data, ImageDataSettings)
    found = explain(
        load_model(folder / "model"),
        [sample_image(name) for name in EXPLAINED],
        data,
        folder / "pictures",
        compare_untrained=True,
    )
    return {
        "top1": result.validation.top1,
        "elapsed_s": result.elapsed_s,
        "inner_losses": [],
        "pictures": [str(path) for path in found.files if path.suffix == ".png"],
    }


def write_tiles(folder: Path) -> int:
    """``train/NAME/*.png`` and ``validation/NAME/*.png``; returns how many. Files that are there stay."""
    count = 0
    for name in SAMPLES:
        photo = sample_image(name).convert("L")
        border = round(photo.width * TRAIN_SHARE)
        parts = {
            "train": photo.crop((0, 0, border, photo.height)),
            "validation": photo.crop((border, 0, photo.width, photo.height)),
        }
        for split, part in parts.items():
            for number, tile in enumerate(tiles(part)):
                path = folder / split / name / f"{number:03d}.png"
                count += 1
                if not path.is_file():
                    with atomic_path(path) as temporary:
                        tile.save(temporary, format="PNG")
    return count


def tiles(image: Image.Image) -> list[Image.Image]:
    """Overlapping squares of 128 pixels, row by row."""
    rows = range(0, image.height - TILE + 1, STRIDE)
    columns = range(0, image.width - TILE + 1, STRIDE)
    return [image.crop((x, y, x + TILE, y + TILE)) for y in rows for x in columns]
