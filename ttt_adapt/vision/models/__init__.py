"""Vision models: plain transformers with exchangeable mixers, and Vision-TTT."""

from ttt_adapt.vision.models.base import VisionModel
from ttt_adapt.vision.models.layout import TokenLayout
from ttt_adapt.vision.models.recording import (
    Recording,
    StepLosses,
    TokenLosses,
    record_inner_loops,
)
from ttt_adapt.vision.models.registry import create_model, list_models
from ttt_adapt.vision.models.settings import (
    VisionModelSettings,
    VisionTTTSettings,
    ViTSettings,
)
from ttt_adapt.vision.models.timm_registration import register_in_timm
from ttt_adapt.vision.models.vision_ttt import DESIGN_ROUTE, VisionTTT
from ttt_adapt.vision.models.vit import VisionTransformer

__all__ = [
    "DESIGN_ROUTE",
    "Recording",
    "StepLosses",
    "TokenLayout",
    "TokenLosses",
    "ViTSettings",
    "VisionModel",
    "VisionModelSettings",
    "VisionTTT",
    "VisionTTTSettings",
    "VisionTransformer",
    "create_model",
    "list_models",
    "record_inner_loops",
    "register_in_timm",
]
