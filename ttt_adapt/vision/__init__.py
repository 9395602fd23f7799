"""Vision models on one inner loop: MTTT, Vision-TTT, and attention to compare them with.

    from ttt_adapt.vision import create_model

    model = create_model("vision_ttt_tiny", num_classes=10, image_size=64)
    logits_BK = model(images_BCHW)

The names below load on first use: ``import ttt_adapt.vision`` itself loads no torch.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".costs": ("cost_table", "count_macs"),
        ".jax_weights": ("load_jax_checkpoint",),
        ".mixers": ("mttt",),
        ".models": (
            "DESIGN_ROUTE",
            "VisionModel",
            "VisionTransformer",
            "VisionTTT",
            "create_model",
            "list_models",
            "record_inner_loops",
            "register_in_timm",
        ),
    },
)
