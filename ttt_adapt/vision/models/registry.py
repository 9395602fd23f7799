"""Models by name: ``create_model("vision_ttt_tiny", num_classes=10)``.

Overrides are the settings of the model's family and, for a ViT, of its mixer, all in one flat list;
what is unknown is an error that suggests what was meant.
"""

import difflib
from dataclasses import dataclass
from typing import Any

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.settings import make_settings
from ttt_adapt.vision.inner_loop.presets import preset as mttt_preset
from ttt_adapt.vision.models.base import VisionModel
from ttt_adapt.vision.models.settings import (
    MIXER_TABLES,
    VisionTTTSettings,
    ViTSettings,
)
from ttt_adapt.vision.models.vision_ttt import VisionTTT
from ttt_adapt.vision.models.vit import VisionTransformer

FAMILIES: dict[str, type[VisionModel]] = {
    family.family: family for family in (VisionTransformer, VisionTTT)
}

_SIZES = {
    "tiny": {"dim": 192, "depth": 12, "num_heads": 3},
    "small": {"dim": 384, "depth": 12, "num_heads": 6},
    "base": {"dim": 768, "depth": 12, "num_heads": 12},
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A registered name.

    Attributes:
        family: of :data:`FAMILIES`.
        values: settings that differ from the family's defaults.
        options: of the mixer, that differ from its defaults.
    """

    family: str
    values: dict[str, Any]
    options: dict[str, Any]


def _architectures() -> dict[str, Architecture]:
    found = {f"vision_ttt_{size}": Architecture("vision_ttt", _SIZES[size], {}) for size in _SIZES}
    mixers: dict[str, tuple[str, dict[str, Any]]] = {
        "attention": ("attention", {}),
        "linear_attention": ("linear_attention", {}),
        "mttt_linear": ("mttt", {"learner": "linear"}),
        "mttt_mlp": ("mttt", {"learner": "mlp"}),
    }
    for size in ("tiny", "small"):
        for name, (mixer, options) in mixers.items():
            values = {**_SIZES[size], "mixer": mixer}
            pixel = {**values, "patch_size": 1, "position": "learned"}
            found[f"vit_{size}_{name}"] = Architecture("vit", values, options)
            found[f"vit_{size}_{name}_pixel"] = Architecture("vit", pixel, options)
    return dict(sorted(found.items()))


ARCHITECTURES = _architectures()


def list_models(family: str | None = None) -> list[str]:
    """Names that :func:`create_model` knows, sorted; of one family (``vit``, ``vision_ttt``) or all.

    Raises:
        ModelError: an unknown family.
    """
    if family is not None and family not in FAMILIES:
        raise ModelError(f"expected a family of {', '.join(FAMILIES)}, found {family!r}")
    return [name for name, entry in ARCHITECTURES.items() if family in (None, entry.family)]


def create_model(name: str, **overrides: Any) -> VisionModel:
    """A model by name, with fresh weights (seed torch for the same ones).

    Args:
        name: one of :func:`list_models`.
        overrides: settings in the place of the name's: ``image_size`` (a number or height and
            width), ``patch_size``, ``num_classes``, ``dim``, ``depth``, ``num_heads``, ``pool``,
            ``mini_batch_size``, …; see :class:`VisionTTTSettings` and :class:`ViTSettings`. For a
            ViT also its mixer's: ``steps``, ``strategy``, ``eta``, … of MTTT (``preset``: ``code`` or
            ``paper``), ``feature_map``, ``normalizer`` of linear attention. ``mixer="none"`` leaves
            mixing out.

    Raises:
        ModelError: an unknown name.
        SettingsError: unknown overrides, or values that do not fit.
    """
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(ARCHITECTURES)}"
        raise ModelError(f"expected the name of a vision model, found {name!r}; {hint}")
    entry = ARCHITECTURES[name]
    values = {**entry.values, **overrides}
    if entry.family == "vision_ttt":
        return VisionTTT(make_settings(VisionTTTSettings, values, where=name), architecture=name)
    return VisionTransformer(_vit_settings(name, entry, values), architecture=name)


def _vit_settings(name: str, entry: Architecture, values: dict[str, Any]) -> ViTSettings:
    """Flat values, the mixer's among them, as nested settings."""
    mixer = str(values.get("mixer", "attention"))
    table = MIXER_TABLES.get(mixer)
    options = dict(entry.options) if mixer == entry.values["mixer"] else {}
    own = [] if table is None else list(table.model_fields)
    if mixer == "mttt":
        own.append("preset")
    known = [field for field in ViTSettings.model_fields if field not in MIXER_TABLES]
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in known:
            flat[key] = value
        elif key in own:
            options[key] = value
        else:
            raise SettingsError(f"{name}: unknown argument {key}{_hint(key, [*known, *own])}")
    if mixer == "mttt":
        flat["mttt"] = mttt_preset(options.pop("preset", "code"), **options)
    elif table is not None:
        flat[mixer] = make_settings(table, options, where=name)
    return make_settings(ViTSettings, flat, where=name)


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
