"""TTT sequence layers as modules: TTT-Linear and TTT-MLP over the operators of the kernels."""

from ttt_adapt.layers.diagnostics import Diagnosis, LayerDiagnosis, diagnose
from ttt_adapt.layers.linear_attention import FeatureMap, LinearAttention, LinearAttentionState
from ttt_adapt.layers.plain import TTTPlainLinear
from ttt_adapt.layers.rotary import rotary_angles, rotate_pairs
from ttt_adapt.layers.short_convolution import ShortConvolution, convolution_tail
from ttt_adapt.layers.state import TTTState
from ttt_adapt.layers.ttt_layer import TTTMLP, InnerTokens, TTTLayer, TTTLinear

__all__ = [
    "TTTMLP",
    "Diagnosis",
    "FeatureMap",
    "InnerTokens",
    "LayerDiagnosis",
    "LinearAttention",
    "LinearAttentionState",
    "ShortConvolution",
    "TTTLayer",
    "TTTLinear",
    "TTTPlainLinear",
    "TTTState",
    "convolution_tail",
    "diagnose",
    "rotary_angles",
    "rotate_pairs",
]
