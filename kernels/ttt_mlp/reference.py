"""TTT-MLP per token: ``f(x) = gelu(x W1 + b1) W2 + b2`` under :func:`run_per_token`."""

import torch
from torch.nn import functional

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.reference import run_per_token


def apply_mlp(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """``[H, D]`` to ``[H, D]`` with ``w1 [H, D, F]``, ``b1 [H, F]``, ``w2 [H, F, D]``, ``b2 [H, D]``."""
    w1, b1, w2, b2 = params
    hidden = functional.gelu(torch.einsum("hi,hio->ho", x, w1) + b1, approximate="tanh")
    return torch.einsum("hi,hio->ho", hidden, w2) + b2


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`."""
    return run_per_token(apply_mlp, tokens, shared, weights, lengths, causal)
