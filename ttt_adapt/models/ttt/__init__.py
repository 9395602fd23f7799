"""Language models of TTT layers for transformers; importing this registers them with Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ttt_adapt.models.ttt.cache import BlockState, TTTCache
from ttt_adapt.models.ttt.configuration import MODEL_TYPE, LayerType, TTTConfig
from ttt_adapt.models.ttt.modeling import TTTForCausalLM, TTTModel
from ttt_adapt.models.ttt.reference_import import load_reference_state_dict

__all__ = [
    "BlockState",
    "LayerType",
    "TTTCache",
    "TTTConfig",
    "TTTForCausalLM",
    "TTTModel",
    "load_reference_state_dict",
]

AutoConfig.register(MODEL_TYPE, TTTConfig, exist_ok=True)
AutoModel.register(TTTConfig, TTTModel, exist_ok=True)
AutoModelForCausalLM.register(TTTConfig, TTTForCausalLM, exist_ok=True)
