"""Softmax attention of a pretrained model replaced by test-time training, layer by layer.

    from ttt_adapt.models.conversion import convert_model

    model = convert_model(model, ConversionSettings(layers="last-4", to="ttt-linear"))

Importing this registers converted models with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from ttt_adapt.models.conversion.attention import (
    TTTAttention,
    converted_layers,
    layers_in_role,
    trained_parameters,
)
from ttt_adapt.models.conversion.families import FAMILIES
from ttt_adapt.models.conversion.layers import choose_layers
from ttt_adapt.models.conversion.model import (
    ConvertedConfig,
    ConvertedForCausalLM,
    convert_model,
)

__all__ = [
    "FAMILIES",
    "ConvertedConfig",
    "ConvertedForCausalLM",
    "TTTAttention",
    "choose_layers",
    "convert_model",
    "converted_layers",
    "layers_in_role",
    "trained_parameters",
]

AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig, exist_ok=True)
AutoModelForCausalLM.register(ConvertedConfig, ConvertedForCausalLM, exist_ok=True)
