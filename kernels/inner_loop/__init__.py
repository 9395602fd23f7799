"""What the operators of TTT layers share: states, ragged rows, checks, the per-token reference."""

from ttt_adapt.kernels.inner_loop.state import FastWeightState

__all__ = ["FastWeightState"]
