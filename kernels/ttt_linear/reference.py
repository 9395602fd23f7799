"""TTT-Linear per token: ``f(x) = x W + b`` under :func:`run_per_token`."""

import torch

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.reference import run_per_token


def apply_linear(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """``[H, D]`` to ``[H, D]`` with ``weight [H, D, D]``, ``bias [H, D]``."""
    weight, bias = params
    return torch.einsum("hi,hio->ho", x, weight) + bias


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`."""
    return run_per_token(apply_linear, tokens, shared, weights, lengths, causal)
