"""Everything at once: receptive field, gradient maps, inner losses of a model, as arrays and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ttt_adapt.errors import ImageError
from ttt_adapt.storage import write_json
from ttt_adapt.vision.data.settings import ImageDataSettings
from ttt_adapt.vision.data.transforms import EvaluationTransform, denormalised
from ttt_adapt.vision.explaining import pictures
from ttt_adapt.vision.explaining.inner_loops import (
    TOP_SHARE,
    GradientMap,
    InnerLosses,
    gradient_maps,
    inner_losses,
)
from ttt_adapt.vision.explaining.receptive_field import (
    ReceptiveField,
    effective_receptive_field,
)

TRAINED, FRESH = "trained", "untrained"
FRACTIONS = (0.2, 0.3, 0.5, 0.99)


@dataclass(frozen=True)
class Explanation:
    """What was found, by ``trained`` and, where asked for, ``untrained``.

    Attributes:
        receptive_fields: empty where that was not asked for, as are the others.
        maps: of every block.
        losses: of every inner loop.
        files: pictures and ``explanation.json``.
    """

    receptive_fields: dict[str, ReceptiveField] = field(default_factory=dict)
    maps: dict[str, list[GradientMap]] = field(default_factory=dict)
    losses: dict[str, list[InnerLosses]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def explain(
    model: Any,
    images: Sequence[Image.Image],
    data: ImageDataSettings,
    out: Path,
    *,
    block: int = -1,
    share: float = TOP_SHARE,
    compare_untrained: bool = False,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
) -> Explanation:
    """Look inside ``model`` while it reads ``images``, and draw what is there into ``out``.

    Written are ``receptive-field.png``; of models with inner loops ``inner-losses.png``; of
    Vision-TTT ``gradient-map.png``; and ``explanation.json`` with the numbers.

    Args:
        data: how images become tensors; its ``image_size`` is the size they are looked at in.
        block: whose gradients are drawn, negative from the last.
        share: of the patches marked in the picture.
        compare_untrained: whether a model of the same settings with fresh weights is drawn beside.
        seed: of those.

    Raises:
        ImageError: no images.
        ModelError: the model is of another kind, or has no such block.
        MissingDependencyError: matplotlib is not installed.
    """
    if not images:
        raise ImageError("expected at least one image to explain, found none")
    say = report or (lambda _: None)
    transform = EvaluationTransform(data)
    tensors = torch.stack([transform(image) for image in images])
    models = {TRAINED: model}
    if compare_untrained:
        models = {FRESH: fresh_copy(model, seed), TRAINED: model}
    say("effective receptive field")
    fields = {
        name: effective_receptive_field(each, tensors, batch_size=1)
        for name, each in models.items()
    }
    files = [pictures.receptive_field_picture(fields, out / "receptive-field.png")]
    maps: dict[str, list[GradientMap]] = {}
    losses: dict[str, list[InnerLosses]] = {}
    if has_inner_loops(model):
        say("inner losses")
        losses = {name: inner_losses(each, tensors) for name, each in models.items()}
        files.append(pictures.inner_loss_picture(losses, out / "inner-losses.png"))
    if model.family == "vision_ttt":
        say("gradient magnitude maps")
        maps = {name: gradient_maps(each, tensors) for name, each in models.items()}
        chosen = {name: _of_block(found, block) for name, found in maps.items()}
        shown = denormalised(tensors, data).numpy()
        path = out / "gradient-map.png"
        files.append(pictures.gradient_map_picture(shown, chosen, path, share=share))
    numbers = {
        "image_size": list(data.image_size),
        "num_images": len(images),
        "receptive_field": {
            name: {
                "global": found.is_global(),
                "side_share": {f"{f:g}": found.side_share(f) for f in FRACTIONS},
            }
            for name, found in fields.items()
        },
        "inner_losses": {
            name: [
                {
                    "block": line.block,
                    "direction": line.direction,
                    "kind": line.kind,
                    "losses": [float(f"{value:.5g}") for value in line.losses],
                }
                for line in lines
            ]
            for name, lines in losses.items()
        },
        "gradient_spread": {
            name: [_spread(found) for found in per_block] for name, per_block in maps.items()
        },
    }
    write_json(out / "explanation.json", numbers)
    return Explanation(fields, maps, losses, (*files, out / "explanation.json"))


def fresh_copy(model: Any, seed: int) -> Any:
    """A model of the same settings with fresh weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.settings, architecture=model.architecture).eval()


def has_inner_loops(model: Any) -> bool:
    """Whether there is anything to record."""
    return model.family == "vision_ttt" or getattr(model.settings, "mttt", None) is not None


def _of_block(found: list[GradientMap], block: int) -> Any:
    if not -len(found) <= block < len(found):
        raise ImageError(
            f"block: expected -{len(found)} to {len(found) - 1}, found {block}; the model has "
            f"{len(found)} blocks"
        )
    return found[block].magnitudes_Bhw


def _spread(found: GradientMap) -> float:
    """Standard deviation over mean of an image's magnitudes, averaged over images: 0 where all
    patches matter alike."""
    values = found.magnitudes_Bhw.reshape(len(found.magnitudes_Bhw), -1)
    return float(np.mean(values.std(1) / np.maximum(values.mean(1), 1e-300)))
