"""Projections into heads and out of them, initialised as the public JAX code does.

Shape legend: B images, T tokens, D width, N heads, d = D / N.
"""

import torch
from torch import nn

from ttt_adapt.errors import ModelError


def new_projection(dim: int, num_heads: int, bias: bool) -> nn.Linear:
    """D to D, uniform of variance 1/D, biases zero.

    The code's Xavier initialisation of the joint matrix and its fan-in (or fan-out) scaling of each
    head's have this variance both. torch's own default has a third of it.

    Raises:
        ModelError: heads that do not divide the width.
    """
    if dim < 1 or num_heads < 1 or dim % num_heads:
        raise ModelError(
            f"expected dim to be a multiple of num_heads, found dim {dim} and num_heads {num_heads}"
        )
    layer = nn.Linear(dim, dim, bias=bias)
    uniform_(layer.weight, 1 / dim)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def uniform_(tensor: torch.Tensor, variance: float) -> torch.Tensor:
    """Fill in place from the centred uniform distribution of ``variance``."""
    bound = (3 * variance) ** 0.5
    return nn.init.uniform_(tensor, -bound, bound)


def into_heads(tensor_BTD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[B, T, D]`` to ``[B, N, T, d]``."""
    batch, num_tokens, width = tensor_BTD.shape
    return tensor_BTD.reshape(batch, num_tokens, num_heads, width // num_heads).transpose(1, 2)


def out_of_heads(tensor_BNTd: torch.Tensor) -> torch.Tensor:
    """``[B, N, T, d]`` to ``[B, T, D]``."""
    return tensor_BNTd.transpose(1, 2).flatten(2)
