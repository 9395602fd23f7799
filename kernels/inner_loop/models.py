"""Inner models as chains of affine layers, and what one mini-batch does to them, in plain PyTorch.

The dual form: with parameters ``P_i = P − s_i Σ_{j≤i} g_j``, an affine layer's output for an input
x is ``x W + b − (M ∘ (x Xᵀ)) G − M G``: X are the open tokens' inputs of that layer, G their
weighted gradients, ``M[i, j] = s_i`` where token j is visible to query i, else 0 (Sun et al. 2024,
arXiv 2407.04620, section 2.5 and appendix A).

Shape legend: B rows, H heads, n queries, b slots, D head width, F hidden width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

EPSILON = 1e-6
"""Of the inner layer norm (public reference, ``ttt.py``)."""

Tensors = tuple[torch.Tensor, ...]


class Tokens(NamedTuple):
    """What a sequence brings: ``q, k, v [B, T, H, D]`` and ``lr [B, T, H]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lr: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Tokens":
        return Tokens(*(change(tensor) for tensor in self))


class Shared(NamedTuple):
    """What all tokens share: ``token_scale [b]``, ``ln_weight [H, D]``, ``ln_bias [H, D]``."""

    token_scale: torch.Tensor
    ln_weight: torch.Tensor
    ln_bias: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Shared":
        return Shared(*(tensor.to(dtype) for tensor in self))


def layer_norm(z: torch.Tensor, weight_HD: torch.Tensor, bias_HD: torch.Tensor) -> torch.Tensor:
    """Layer norm over the last axis of ``[B, H, n, D]`` with one weight and bias for each head."""
    normal = functional.layer_norm(z, (z.shape[-1],), eps=EPSILON)
    return normal * weight_HD[None, :, None] + bias_HD[None, :, None]


def norm_l2_gradient(
    z: torch.Tensor, target: torch.Tensor, weight_HD: torch.Tensor, bias_HD: torch.Tensor
) -> torch.Tensor:
    """∂/∂z of ``½‖LN(z) − target‖²``, ``[B, H, n, D]``."""
    variance, mean = torch.var_mean(z, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + EPSILON)
    normal = (z - mean) * rstd
    weight, bias = weight_HD[None, :, None], bias_HD[None, :, None]
    upstream = (normal * weight + bias - target) * weight
    centred = upstream - upstream.mean(-1, keepdim=True)
    return (centred - normal * (upstream * normal).mean(-1, keepdim=True)) * rstd


def dual_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    inputs: torch.Tensor,
    gradients: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """An affine layer's outputs ``[B, H, n, out]`` under each query's own parameters.

    Args:
        x: ``[B, H, n, in]``.
        weight: ``[B, H, in, out]``; bias: ``[B, H, out]``.
        inputs: ``[B, H, b, in]``; gradients: ``[B, H, b, out]``, weighted.
        visible: M, ``[B, 1, n, b]``.
    """
    scores = (x @ inputs.transpose(-1, -2) + 1.0) * visible
    return x @ weight + bias[:, :, None] - scores @ gradients


class InnerModel(ABC):
    """What a mini-batch needs to know of an inner model."""

    name: str
    num_weights: int
    num_slots: int

    @abstractmethod
    def slots(
        self, weights: Tensors, k: torch.Tensor, target: torch.Tensor, lr: torch.Tensor,
        ln_weight: torch.Tensor, ln_bias: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        """Each layer's inputs and weighted gradients for tokens ``[B, H, n, D]``, lr ``[B, H, n]``."""

    @abstractmethod
    def outputs(
        self, weights: Tensors, slots: Tensors, visible: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        """``f(q_i; P_i)``, ``[B, H, n, D]``."""

    def target(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What the loss compares with, ``[B, H, n, D]``."""
        return v - k

    def answer(
        self, q: torch.Tensor, z: torch.Tensor, ln_weight: torch.Tensor, ln_bias: torch.Tensor
    ) -> torch.Tensor:
        """The operator's output ``[B, H, n, D]`` from the inner model's ``z``."""
        return q + layer_norm(z, ln_weight, ln_bias)

    def fold(self, weights: Tensors, slots: Tensors, scale: torch.Tensor) -> Tensors:
        """Parameters after a whole mini-batch: ``P − scale Σ_j g_j``; scale: ``[B]``, 0 folds nothing."""
        found: list[torch.Tensor] = []
        for layer in range(self.num_weights // 2):
            inputs, gradients = slots[2 * layer : 2 * layer + 2]
            scaled = gradients * scale[:, None, None, None]
            found.append(weights[2 * layer] - inputs.transpose(-1, -2) @ scaled)
            found.append(weights[2 * layer + 1] - scaled.sum(-2))
        return tuple(found)

    @abstractmethod
    def slot_widths(self, weights: Tensors) -> tuple[int, ...]:
        """The last axis of each slot tensor."""


class LinearModel(InnerModel):
    """``f(x) = x W + b``."""

    name, num_weights, num_slots = "ttt_linear", 2, 2

    def slots(
        self, weights: Tensors, k: torch.Tensor, target: torch.Tensor, lr: torch.Tensor,
        ln_weight: torch.Tensor, ln_bias: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        weight, bias = weights
        z = k @ weight + bias[:, :, None]
        return k, norm_l2_gradient(z, target, ln_weight, ln_bias) * lr[..., None]

    def outputs(
        self, weights: Tensors, slots: Tensors, visible: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        weight, bias = weights
        k, g = slots
        return dual_affine(q, weight, bias, k, g, visible)

    def slot_widths(self, weights: Tensors) -> tuple[int, ...]:
        width = weights[0].shape[-1]
        return width, width


class MlpModel(InnerModel):
    """``f(x) = gelu(x W1 + b1) W2 + b2`` with the tanh approximation of GELU."""

    name, num_weights, num_slots = "ttt_mlp", 4, 4

    def slots(
        self, weights: Tensors, k: torch.Tensor, target: torch.Tensor, lr: torch.Tensor,
        ln_weight: torch.Tensor, ln_bias: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        w1, b1, w2, b2 = weights
        z1 = k @ w1 + b1[:, :, None]
        x2 = functional.gelu(z1, approximate="tanh")
        z2 = x2 @ w2 + b2[:, :, None]
        g2 = norm_l2_gradient(z2, target, ln_weight, ln_bias) * lr[..., None]
        # Through the start W2, as the public reference has it.
        g1 = (g2 @ w2.transpose(-1, -2)) * gelu_derivative(z1)
        return k, g1, x2, g2

    def outputs(
        self, weights: Tensors, slots: Tensors, visible: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        w1, b1, w2, b2 = weights
        k, g1, x2, g2 = slots
        hidden = functional.gelu(dual_affine(q, w1, b1, k, g1, visible), approximate="tanh")
        return dual_affine(hidden, w2, b2, x2, g2, visible)

    def slot_widths(self, weights: Tensors) -> tuple[int, ...]:
        width, hidden = weights[0].shape[-2:]
        return width, hidden, hidden, width


def gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    """d/dx of tanh-approximated GELU."""
    slope, cubic = (2.0 / torch.pi) ** 0.5, 0.044715
    inner = torch.tanh(slope * (x + cubic * x.pow(3)))
    rise: torch.Tensor = slope * (1 + 3 * cubic * x.square())
    found: torch.Tensor = 0.5 * (1 + inner) + 0.5 * x * (1 - inner.square()) * rise
    return found
