"""Vision models on one inner loop: MTTT, Vision-TTT, and attention to compare them with.

    from ttt_adapt.vision import create_model

    model = create_model("vision_ttt_tiny", num_classes=10, image_size=64)
    logits_BK = model(images_BCHW)

The names below load on first use: ``import ttt_adapt.vision`` itself loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.vision.costs import cost_table, count_macs
    from ttt_adapt.vision.jax_weights import load_jax_checkpoint
    from ttt_adapt.vision.mixers import mttt
    from ttt_adapt.vision.models import (
        DESIGN_ROUTE,
        VisionModel,
        VisionTransformer,
        VisionTTT,
        create_model,
        list_models,
        record_inner_loops,
        register_in_timm,
    )

_ROOM_OF = {
    "DESIGN_ROUTE": "models",
    "VisionModel": "models",
    "VisionTTT": "models",
    "VisionTransformer": "models",
    "cost_table": "costs",
    "count_macs": "costs",
    "create_model": "models",
    "list_models": "models",
    "load_jax_checkpoint": "jax_weights",
    "mttt": "mixers",
    "record_inner_loops": "models",
    "register_in_timm": "models",
}

__all__ = [
    "DESIGN_ROUTE",
    "VisionModel",
    "VisionTTT",
    "VisionTransformer",
    "cost_table",
    "count_macs",
    "create_model",
    "list_models",
    "load_jax_checkpoint",
    "mttt",
    "record_inner_loops",
    "register_in_timm",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
