"""What mixes tokens in a block, made as the configuration says."""

from typing import Any

from torch import nn

from ttt_adapt.layers import TTTMLP, LinearAttention, TTTLinear, TTTPlainLinear
from ttt_adapt.models.ttt.attention import CausalAttention
from ttt_adapt.models.ttt.configuration import TTTConfig


def make_mixer(config: TTTConfig, layer_type: str) -> nn.Module:
    """A layer with the contract of :meth:`ttt_adapt.layers.TTTLayer.forward`."""
    sizes = (config.hidden_size, config.num_attention_heads)
    if layer_type == "attention":
        return CausalAttention(config)
    if layer_type == "linear_attention":
        feature_map: Any = config.feature_map
        return LinearAttention(*sizes, feature_map=feature_map, rope_theta=config.rope_theta)
    options: dict[str, Any] = {
        "mini_batch_size": config.mini_batch_size,
        "base_lr": config.base_lr,
        "rope_theta": config.rope_theta,
        "use_gate": config.use_gate,
        "share_qk": config.share_qk,
        "conv_kernel": config.conv_kernel,
        "learnable_lr": config.learnable_lr,
        "backend": config.backend,
    }
    if layer_type == "ttt_mlp":
        return TTTMLP(*sizes, **options)
    if config.inner_norm:
        return TTTLinear(*sizes, **options)
    return TTTPlainLinear(*sizes, learnable_w0=config.learnable_w0, **options)
