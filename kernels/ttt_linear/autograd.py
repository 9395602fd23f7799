"""The Triton kernels of TTT-Linear behind the core contract, differentiable once."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.triton_support import dense_from
from ttt_adapt.kernels.ttt_linear.backward import backward
from ttt_adapt.kernels.ttt_linear.forward import forward


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`, causal only."""
    assert causal, "the choice of a backend refuses Triton when not causal"
    inputs = (*tokens, *shared, *weights)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        out, weight, bias = _Differentiable.apply(lengths, *inputs)  # type: ignore[no-untyped-call]
        return out, (weight, bias)
    found = forward(*_loadable(tokens, shared, weights), lengths, save=False)
    return found.out, found.weights


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: torch.Tensor | None, *inputs: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        tokens, shared, weights = _loadable(Tokens(*inputs[:4]), Shared(*inputs[4:7]), inputs[7:])
        found = forward(tokens, shared, weights, lengths, save=True)
        assert found.checkpoints is not None
        ctx.save_for_backward(lengths, *tokens, *shared, *found.checkpoints)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return found.out, *found.weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_out: torch.Tensor | None,
        d_weight: torch.Tensor | None,
        d_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        lengths, *saved = ctx.saved_tensors
        tokens, shared, checkpoints = Tokens(*saved[:4]), Shared(*saved[4:7]), tuple(saved[7:])
        d_weights: Tensors | None = None
        if d_weight is not None or d_bias is not None:
            batch, _, heads, width = tokens.q.shape
            like = checkpoints[0]
            d_weights = (
                _dense(d_weight, like.new_zeros, (batch, heads, width, width)),
                _dense(d_bias, like.new_zeros, (batch, heads, width)),
            )
        upstream = _dense(d_out, tokens.q.new_zeros, tuple(tokens.q.shape))
        found = backward(tokens, shared, lengths, checkpoints, upstream, d_weights)
        gradients = (*found.tokens, *found.shared, *found.weights)
        return None, *(
            gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )


def _loadable(tokens: Tokens, shared: Shared, weights: Tensors) -> tuple[Tokens, Shared, Tensors]:
    """Laid out as the kernels read: neighbours along D next to each other, all else by strides."""
    q, k, v = (dense_from(tensor, 3) for tensor in tokens[:3])
    return (
        Tokens(q, k, v, tokens.lr),
        Shared(*(tensor.contiguous() for tensor in shared)),
        (dense_from(weights[0], 2), dense_from(weights[1], 2)),
    )


def _dense(tensor: torch.Tensor | None, zeros: Any, shape: tuple[int, ...]) -> torch.Tensor:
    found: torch.Tensor = zeros(shape) if tensor is None else tensor.contiguous()
    return found
