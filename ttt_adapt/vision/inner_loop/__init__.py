"""Inner loops on an image's tokens: full-batch descent, SGD, causal mini-batches, online."""

from ttt_adapt.vision.inner_loop.function import mttt
from ttt_adapt.vision.inner_loop.presets import PRESETS, MTTTSettings, preset
from ttt_adapt.vision.inner_loop.reconstruction import Decoder, Norm, Reconstruction

__all__ = ["PRESETS", "Decoder", "MTTTSettings", "Norm", "Reconstruction", "mttt", "preset"]
