"""The model of a run, and models that runs left."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.runtime import derived_seed
from ttt_adapt.settings import load_settings
from ttt_adapt.vision.training.settings import VisionTrainSettings

if TYPE_CHECKING:
    from ttt_adapt.vision.models import VisionModel


def build_model(
    settings: VisionTrainSettings, num_classes: int, *, load: bool = True
) -> "VisionModel":
    """The model, its weights drawn by the seed, or read from ``initial_model``.

    Args:
        load: whether ``initial_model`` is read.

    Raises:
        ModelError: no such model, arguments it does not know, or weights that do not fit.
    """
    from ttt_adapt.vision.models import create_model

    torch.manual_seed(derived_seed(settings.seed, "weights"))
    model = create_model(
        settings.model,
        image_size=settings.data.image_size,
        in_channels=settings.data.in_channels,
        num_classes=num_classes,
        **settings.overrides,
    )
    if settings.gradient_checkpointing:
        model.set_grad_checkpointing(True)
    if load and settings.initial_model is not None:
        copy_weights(load_model(Path(settings.initial_model)), model)
    return model


def copy_weights(source: "VisionModel", target: "VisionModel") -> None:
    """Take every weight of ``source``; a head of another number of classes stays as it is, and learned
    positions of another grid are interpolated.

    Raises:
        ModelError: other weights are missing or of another shape.
    """
    source.set_input_size(target.settings.image_size)
    given, wanted = dict(source.named_parameters()), dict(target.named_parameters())
    problems = []
    for name, parameter in wanted.items():
        if name in given and given[name].shape == parameter.shape:
            with torch.no_grad():
                parameter.copy_(given[name])
        elif not name.startswith("head."):
            found = list(given[name].shape) if name in given else "nothing"
            problems.append(f"{name}: expected {list(parameter.shape)}, found {found}")
    if problems:
        raise ModelError(
            f"initial_model: {len(problems)} of {len(wanted)} weights don't fit: {problems[0]}; "
            "start from a model of the same kind and size"
        )


def load_model(folder: Path) -> "VisionModel":
    """A model that training or ``save_pretrained`` wrote.

    Raises:
        ModelError: there is none.
    """
    from ttt_adapt.vision.models import VisionModel

    return VisionModel.from_pretrained(folder)


def settings_of(folder: Path) -> VisionTrainSettings | None:
    """Settings of the run that left this model, or its average; ``None`` where it was none of ours."""
    for place in (folder, folder.parent):
        path = place / "train.toml"
        if path.is_file():
            try:
                return load_settings(VisionTrainSettings, path)
            except SettingsError:
                return None
    return None
