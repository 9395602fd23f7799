"""Image data sets of the Hugging Face hub, and local directories that ``datasets`` reads."""

import io
from pathlib import Path
from typing import Any

from PIL import Image

from ttt_adapt.errors import ImageError
from ttt_adapt.vision.data.images import decode_image
from ttt_adapt.vision.data.settings import ImageDataSettings


class HubImages:
    """One split of a data set with a column of images and one of classes.

    Raises:
        ImageError: it cannot be opened, or has no such columns.
    """

    def __init__(self, settings: ImageDataSettings, split: str) -> None:
        import datasets

        where = "/".join(part for part in (settings.path, settings.hub_config, split) if part)
        try:
            rows: Any = datasets.load_dataset(settings.path, settings.hub_config, split=split)
        except Exception as error:
            told = " ".join(str(error).split())
            raise ImageError(
                f"hub data set {where}: cannot be opened: {told:.300}; check its name, "
                "hub_config and split, and the way to the hub"
            ) from error
        features = rows.features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        known = {"image": images, "label": labels or [n for n in features if n == "label"]}
        self._image = _column(where, "image", settings.image_column, known["image"], features)
        self._label = _column(where, "label", settings.label_column, known["label"], features)
        # Decoding is ours, so that a file that cannot be read is named.
        if isinstance(features[self._image], datasets.Image):
            rows = rows.cast_column(self._image, datasets.Image(decode=False))
        self._rows, self._where = rows, where
        kind = features[self._label]
        self._labels: list[int] = []
        if isinstance(kind, datasets.ClassLabel):
            self.classes: tuple[str, ...] = tuple(kind.names)
            self._labels = [int(value) for value in rows[self._label]]
        else:
            values = list(rows[self._label])
            names = sorted(set(values))
            position = {value: number for number, value in enumerate(names)}
            self.classes = tuple(str(name) for name in names)
            self._labels = [position[value] for value in values]

    def __len__(self) -> int:
        return len(self._labels)

    def image(self, index: int) -> Image.Image:
        value, where = self._rows[index][self._image], f"{self._where}, row {index + 1}"
        if not isinstance(value, dict) or (
            value.get("bytes") is None and value.get("path") is None
        ):
            raise ImageError(f"{where}: expected an image, found none")
        held, path = value["bytes"], value["path"]
        return decode_image(Path(path) if held is None else io.BytesIO(held), where)

    def label(self, index: int) -> int:
        return self._labels[index]


def _column(where: str, role: str, wanted: str | None, found: list[str], features: Any) -> str:
    if wanted is not None:
        if wanted not in features:
            names = ", ".join(features)
            raise ImageError(f"{where}: expected a column {wanted!r}, found {names:.200}")
        return wanted
    if len(found) != 1:
        names = ", ".join(found or features) or "none"
        raise ImageError(
            f"{where}: expected one column of {role}s, found {names:.200}; name it with "
            f"{role}_column"
        )
    return found[0]
