"""PEFT's LoRA layer, with its forward and backward pass in one autograd node.

y = x Wᵀ + b + s (x Aᵀ) Bᵀ.  With d = ∂loss/∂y:  ∂x = d W + s d B A,  ∂A = s (d B)ᵀ x,
∂B = s dᵀ (x Aᵀ).  PEFT's own forward makes a dozen passes over activations to compute the same
(casts to the adapters' dtype and back, scaling, adding, and their gradients); here the low-rank
terms are accumulated by the products themselves, and the scale multiplies the thin matrices.

Shape legend: N positions (batch × time), I input width, O output width, R rank.
"""

from typing import Any

import torch
from torch import nn


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: torch.Tensor,
        weight_IO: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        dtype = x_NI.dtype
        a, b = a_RI.to(dtype), b_OR.to(dtype) * scale
        weight = weight_IO.to(dtype)
        hidden_NR = x_NI @ a.t()
        y_NO = x_NI @ weight if bias_O is None else torch.addmm(bias_O.to(dtype), x_NI, weight)
        ctx.save_for_backward(x_NI, weight, a, b, hidden_NR)
        ctx.scale, ctx.dtype = scale, a_RI.dtype
        return y_NO.addmm_(hidden_NR, b.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_NO,) = gradients
        x_NI, weight_IO, a, b, hidden_NR = ctx.saved_tensors
        thin_NR = d_NO @ b
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (d_NO @ weight_IO.t()).addmm_(thin_NR, a)
        d_a = (thin_NR.t() @ x_NI).to(ctx.dtype)
        d_b = (d_NO.t() @ hidden_NR).to(ctx.dtype) * ctx.scale
        return d_x, None, None, d_a, d_b, None


def low_rank_linear(
    x_NI: torch.Tensor,
    weight_IO: torch.Tensor,
    bias_O: torch.Tensor | None,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """y of the formula above, ``[N, O]``; differentiable in x, A and B, the base is frozen."""
    apply: Any = _LowRankLinear.apply
    found: torch.Tensor = apply(x_NI, weight_IO, bias_O, a_RI, b_OR, scale)
    return found


def fuse(layer: Any, adapter: str) -> None:
    """Give one of PEFT's linear LoRA layers the fused pass where it computes the same.

    It takes over under autocast or with everything in float32; else PEFT's own forward runs.
    """
    plain = layer.forward
    base = layer.base_layer
    scale = float(layer.scaling[adapter])
    transposed = isinstance(base, nn.Linear)

    def forward(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        if arguments or options or not (autocast or x.dtype == base.weight.dtype == torch.float32):
            result: torch.Tensor = plain(x, *arguments, **options)
            return result
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        weight = base.weight.t() if transposed else base.weight
        with torch.autocast(device, enabled=False):
            flat = x.to(dtype).reshape(-1, x.shape[-1])
            y: torch.Tensor = low_rank_linear(flat, weight, base.bias, a, b, scale)
        return y.view(*x.shape[:-1], y.shape[-1])

    layer.forward = forward
