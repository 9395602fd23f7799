"""Images in folders, as ImageNet is commonly laid out: ``root/split/class/any/where/name.jpeg``."""

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ttt_adapt.errors import ImageError
from ttt_adapt.vision.data.images import decode_image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
# What other tools call the held-out split; tried in this order when it is not there by name.
_SYNONYMS = {"validation": ("val", "valid", "test"), "val": ("validation", "valid", "test")}


class FolderImages:
    """One split: a folder for each class. Classes are sorted by name, files by path.

    Raises:
        ImageError: the folder is missing, holds no class folders or no images.
    """

    def __init__(self, root: Path, split: str, *, classes: Sequence[str] | None = None) -> None:
        self.folder = _split_folder(root, split)
        found = sorted(entry.name for entry in self.folder.iterdir() if entry.is_dir())
        if not found:
            raise ImageError(f"{self.folder}: expected a folder for each class, found none")
        self.classes: tuple[str, ...] = tuple(found if classes is None else classes)
        position = {name: number for number, name in enumerate(self.classes)}
        unknown = [name for name in found if name not in position]
        if unknown:
            raise ImageError(
                f"{self.folder}: expected the {len(self.classes)} classes of the other split, "
                f"found {unknown[0]!r} beside them"
            )
        self._paths: list[str] = []
        self._labels: list[int] = []
        for name in found:
            for path in _image_files(self.folder / name):
                self._paths.append(path)
                self._labels.append(position[name])
        if not self._paths:
            kinds = ", ".join(SUFFIXES)
            raise ImageError(f"{self.folder}: expected images ({kinds}), found none")

    def __len__(self) -> int:
        return len(self._paths)

    def image(self, index: int) -> Image.Image:
        return read_image(self.folder / self._paths[index])

    def label(self, index: int) -> int:
        return self._labels[index]


def read_image(path: Path) -> Image.Image:
    """An image file, decoded, turned as its EXIF orientation says.

    Raises:
        ImageError: no such file, or no image that Pillow reads.
    """
    return decode_image(path, str(path))


def _split_folder(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise ImageError(f"{root}: no such folder of images")
    names: tuple[str, ...] = (split, *_SYNONYMS.get(split, ()))
    for name in names:
        if (root / name).is_dir():
            return root / name
    held = ", ".join(sorted(entry.name for entry in root.iterdir() if entry.is_dir())) or "none"
    raise ImageError(f"{root}: expected a folder {split!r}, found {held:.200}")


def _image_files(folder: Path) -> list[str]:
    """Paths relative to the split's folder: a million short strings are cheaper than paths."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        inside = Path(place).relative_to(folder.parent)
        found += [str(inside / n) for n in names if n.lower().endswith(SUFFIXES)]
    return sorted(found)
