"""Token mixers of one interface: ``(dim, num_heads, **options)``, ``[B, T, D]`` to ``[B, T, D]``."""

from ttt_adapt.vision.inner_loop import mttt
from ttt_adapt.vision.mixers.attention import Attention, LinearAttention
from ttt_adapt.vision.mixers.mttt_layer import MTTT

__all__ = ["MTTT", "Attention", "LinearAttention", "mttt"]
