"""Our models in timm's registry, for those who have timm; nothing here imports it unless asked.

from ttt_adapt.vision import register_in_timm
register_in_timm()
model = timm.create_model("vision_ttt_tiny", num_classes=10)
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ttt_adapt.errors import MissingDependencyError, ModelError
from ttt_adapt.vision.models.base import VisionModel
from ttt_adapt.vision.models.registry import create_model, list_models

_TIMM_NAMES = {"img_size": "image_size", "in_chans": "in_channels", "drop_path_rate": "drop_path",
               "global_pool": "pool"}  # fmt: skip
_TIMM_POOLS = {"avg": "mean", "token": "head_token"}
_TIMM_ONLY = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def register_in_timm() -> list[str]:
    """Register every model of :func:`list_models` with timm; returns the names.

    timm's own names of arguments are understood: ``img_size``, ``in_chans``, ``drop_path_rate``,
    ``global_pool`` (``avg`` is our ``mean``, ``token`` our ``head_token``). There are no pretrained weights to fetch: ``pretrained=True`` is an error.

    Raises:
        MissingDependencyError: timm, or the torchvision it needs, does not import.
    """
    try:
        register_model = import_module("timm.models").register_model
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"expected timm (and torchvision, which it imports), found: {error}; "
            "pip install timm torchvision, matching the torch that is installed"
        ) from None
    names = list_models()
    for name in names:
        register_model(_entry_point(name))
    return names


def _entry_point(name: str) -> Callable[..., VisionModel]:
    def make(pretrained: bool = False, **options: Any) -> VisionModel:
        if pretrained:
            raise ModelError(
                f"{name}: expected pretrained=False, for no weights are published; load your own "
                "with VisionModel.from_pretrained"
            )
        kept = {
            _TIMM_NAMES.get(key, key): value
            for key, value in options.items()
            if key not in _TIMM_ONLY
        }
        if "pool" in kept:
            kept["pool"] = _TIMM_POOLS.get(kept["pool"], kept["pool"])
        return create_model(name, **kept)

    make.__name__ = make.__qualname__ = name
    make.__module__ = __name__
    make.__doc__ = f"``{name}`` of ttt_adapt.vision."
    return make
