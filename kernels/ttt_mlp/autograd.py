"""The Triton kernels as a core: forward and backward under autograd.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.ttt_mlp.backward import run_backward
from ttt_adapt.kernels.ttt_mlp.forward import Saved, run_forward


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`; causal, and for
    what :mod:`ttt_adapt.kernels.inner_loop.backends` lets Triton have.
    """
    assert causal, "the choice of a backend refuses Triton when not causal"
    # Casts are autograd's: the kernels give gradients in the dtypes they were given.
    tokens = Tokens(*tokens[:3], tokens.lr.float()).map(torch.Tensor.contiguous)
    shared = Shared(*(tensor.float().contiguous() for tensor in shared))
    weights = tuple(tensor.float() for tensor in weights)
    inputs = (*tokens, *shared, *weights)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        out, *ended = _TTTMlp.apply(lengths, *inputs)  # type: ignore[no-untyped-call]
        return out, tuple(ended)
    found, final, _ = run_forward(tokens, shared, weights, lengths, group=0)
    return found, final


def group_of(num_mini_batches: int) -> int:
    """Mini-batches from one saved state to the next: √n needs the least memory for both the saved
    states and those of one group, which backward computes again."""
    return max(1, math.isqrt(num_mini_batches))


class _TTTMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: torch.Tensor | None, *inputs: torch.Tensor) -> Tensors:
        tokens, shared = Tokens(*inputs[:4]), Shared(*inputs[4:7])
        group = group_of(-(-tokens.q.shape[1] // shared.token_scale.shape[0]))
        out, ended, saved = run_forward(tokens, shared, inputs[7:], lengths, group)
        ctx.group = group
        ctx.save_for_backward(lengths, *tokens, *shared, *saved.weights)
        return out, *ended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lengths, *inputs = ctx.saved_tensors
        d_tokens, d_shared, d_weights = run_backward(
            d_outputs[0].contiguous(),
            d_outputs[1:],
            Tokens(*inputs[:4]),
            Shared(*inputs[4:7]),
            Saved(tuple(inputs[7:]), ctx.group),
            lengths,
        )
        return None, *d_tokens, *d_shared, *d_weights
