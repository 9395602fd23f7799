"""Backward passes of layer norm and GELU as operations that the outer loop differentiates.

PyTorch can differentiate its own; these take fewer passes over memory.

Shape legend: the last axis is the one that is normalised.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_INPUT_ONLY = (True, False, False)
_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def layer_norm_backward(
    upstream: torch.Tensor, z: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """``J u = ρ (u − mean(u) − x̂ mean(u ∘ x̂))`` with ``x̂ = ρ (z − mean(z))``: the gradient by z,
    differentiable once by u and z, whose statistics ``mean, rstd [..., 1]`` are given."""
    found: torch.Tensor = _LayerNormBackward.apply(upstream, z, mean, rstd)  # type: ignore[no-untyped-call]
    return found


def gelu_backward(upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``u gelu'(x)`` for GELU's tanh form, differentiable once by u and x."""
    found: torch.Tensor = _GeluBackward.apply(upstream, x)  # type: ignore[no-untyped-call]
    return found


def _jacobian(
    upstream: torch.Tensor, z: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.native_layer_norm_backward(
        upstream, z, [z.shape[-1]], mean, rstd, None, None, _INPUT_ONLY
    )[0]
    return found


class _LayerNormBackward(torch.autograd.Function):
    """With ``G = J u`` and v the gradient by G: ``du = J v``, and by z, through x̂ in J
    ``J w`` with ``w = −ρ (v mean(u ∘ x̂) + u mean(v ∘ x̂))``, through ρ before it
    ``−ρ x̂ mean(v ∘ G)``."""

    @staticmethod
    def forward(
        ctx: Any, u: torch.Tensor, z: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor:
        gradient = _jacobian(u, z, mean, rstd)
        ctx.save_for_backward(u, z, mean, rstd, gradient)
        return gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        u, z, mean, rstd, gradient = ctx.saved_tensors
        v = v.contiguous()
        normal = (z - mean).mul_(rstd)
        along_u = (u * normal).mean(-1, keepdim=True)
        along_v = (v * normal).mean(-1, keepdim=True)
        shared = (v * gradient).mean(-1, keepdim=True)
        through = torch.addcmul(v * along_u, u, along_v).mul_(-rstd)
        by_z = _jacobian(through, z, mean, rstd).addcmul_(normal, shared.mul_(rstd), value=-1.0)
        return _jacobian(v, z, mean, rstd), by_z, None, None


class _GeluBackward(torch.autograd.Function):
    """``gelu''(x) = (1 − t²) (p − x t p² + 3 a c x²)`` with ``t = tanh(a (x + c x³))``,
    ``p = a (1 + 3 c x²)``, ``a = √(2/π)``, ``c = 0.044715``."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(u, x)
        found: torch.Tensor = torch.ops.aten.gelu_backward(u, x, approximate="tanh")
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, x = ctx.saved_tensors
        square = x * x
        tanh = (square * (_SLOPE * _CUBIC)).add_(_SLOPE).mul_(x).tanh_()
        rise = (square * (3 * _SLOPE * _CUBIC)).add_(_SLOPE)
        second = (rise * rise).mul_(tanh).mul_(x).neg_().add_(rise)
        second.add_(square, alpha=3 * _SLOPE * _CUBIC)
        second.mul_(tanh.square_().neg_().add_(1.0)).mul_(u).mul_(v)
        return torch.ops.aten.gelu_backward(v, x, approximate="tanh"), second
