"""Language models: found by name, loaded from safetensors only, identified by hash, and asked."""

from ttt_adapt.models.checkpoints import bundled_models, resolve_model
from ttt_adapt.models.generation import generate
from ttt_adapt.models.language_model import LanguageModel, beginning_token, wrap_language_model
from ttt_adapt.models.loading import load_language_model

__all__ = [
    "LanguageModel",
    "beginning_token",
    "bundled_models",
    "generate",
    "load_language_model",
    "resolve_model",
    "wrap_language_model",
]
