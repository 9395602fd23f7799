"""Vision models as files: ``config.json`` and ``model.safetensors``, whole or not at all."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ttt_adapt.errors import ModelError
from ttt_adapt.settings import make_settings
from ttt_adapt.storage import atomic_path, file_manifest, manifest_problems, write_json

if TYPE_CHECKING:
    from ttt_adapt.vision.models.base import VisionModel

FORMAT = "ttt-adapt-vision"
FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(model: "VisionModel", folder: Path) -> Path:
    """Write a model, in the dtype it has; returns the folder.

    The weights come first, then the configuration with their size and hash: a reader that finds
    both from different calls says so.
    """
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    write_json(
        folder / CONFIG,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "family": model.family,
            "architecture": model.architecture,
            "settings": model.settings.model_dump(mode="json"),
            "files": file_manifest(folder, [WEIGHTS]),
        },
    )
    return folder


def load_model(folder: Path) -> "VisionModel":
    """The model that :func:`save_model` wrote, in evaluation mode, on the CPU, in its dtype.

    Raises:
        ModelError: no such model, another format, or files that are damaged, missing or of
            different calls.
        SettingsError: settings that this version does not know.
    """
    from ttt_adapt.vision.models.registry import FAMILIES

    config = _read_config(folder)
    family = FAMILIES.get(str(config.get("family")))
    if family is None:
        raise ModelError(
            f"{folder}: expected a family of {', '.join(FAMILIES)}, found {config.get('family')!r}"
        )
    manifest = config.get("files")
    if not isinstance(manifest, dict) or WEIGHTS not in manifest:
        raise ModelError(f"{folder}: {CONFIG} does not name {WEIGHTS}; save the model again")
    problems = manifest_problems(folder, manifest, hashes=True)
    if problems:
        raise ModelError(f"{folder}: {'; '.join(problems)}; save the model again")
    settings = make_settings(
        family.settings_kind, config.get("settings", {}), where=str(folder / CONFIG)
    )
    model = family(settings, architecture=str(config.get("architecture", "")))
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / WEIGHTS}: cannot be read: {error}") from None
    try:
        # assign: the weights' own dtypes, without a second copy.
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{folder}: weights do not fit: {' '.join(str(error).split())}") from None
    return model.eval()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: expected a vision model's directory with {CONFIG}, found none; write one "
            "with model.save_pretrained(...)"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ModelError(f"{path}: expected the configuration of a vision model of this package")
    if config.get("format_version") != FORMAT_VERSION:
        raise ModelError(
            f"{path}: expected format version {FORMAT_VERSION}, found "
            f"{config.get('format_version')!r}; save the model with this version"
        )
    return config
