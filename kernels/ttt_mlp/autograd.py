"""Placeholder until the Triton kernels of ttt_mlp are written."""

import torch

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`."""
    raise NotImplementedError
