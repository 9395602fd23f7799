"""Language models: found by name, loaded from safetensors only, identified by hash, and asked.

Those of TTT layers (:mod:`ttt_adapt.models.ttt`) load on first use, for they need transformers.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports
from ttt_adapt.models.checkpoints import bundled_models, resolve_model
from ttt_adapt.models.generation import generate
from ttt_adapt.models.language_model import LanguageModel, beginning_token, wrap_language_model
from ttt_adapt.models.loading import load_language_model

if TYPE_CHECKING:
    from ttt_adapt.models.ttt import (
        TTTCache,
        TTTConfig,
        TTTForCausalLM,
        load_reference_state_dict,
    )

__all__ = [
    "LanguageModel",
    "TTTCache",
    "TTTConfig",
    "TTTForCausalLM",
    "beginning_token",
    "bundled_models",
    "generate",
    "load_language_model",
    "load_reference_state_dict",
    "resolve_model",
    "wrap_language_model",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".ttt": ("TTTCache", "TTTConfig", "TTTForCausalLM", "load_reference_state_dict"),
    },
)
