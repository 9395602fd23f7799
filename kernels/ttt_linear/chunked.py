"""The dual form in PyTorch: fast on a CPU, its backward by hand, linear in T and of bounded memory.

What is serial (a mini-batch's weights depend on the one before) is a few fused operations a
mini-batch; all else is done for a whole group of mini-batches at once. Derivation in README.md.

Shape legend: B rows, T tokens, H heads, N = B·H programs, M mini-batches, b tokens in a mini-batch,
D head width, E = D + 1.
"""

from typing import Any

import torch

from ttt_adapt.kernels.inner_loop.checkpointing import (
    Grouping,
    mini_batch_scales,
    refuse_second_derivatives,
    without_padding,
)
from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.ttt_linear.chunked_backward import Backward
from ttt_adapt.kernels.ttt_linear.chunked_group import Group


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`; differentiable once."""
    dtype = weights[0].dtype
    token_scale, ln_weight, ln_bias = shared.to(dtype)
    grouping = Grouping.of(tokens.q, token_scale.shape[0])
    lr = without_padding(tokens.lr.to(dtype), lengths)
    with torch.autocast(tokens.q.device.type, enabled=False):
        visible, fold = mini_batch_scales(token_scale, lengths, grouping, causal=causal)
        inputs = (*tokens[:3], lr, visible, fold, ln_weight, ln_bias, *weights)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            out, weight, bias = _ChunkedLinear.apply(grouping, *inputs)  # type: ignore[no-untyped-call]
        else:
            out, weight, bias, _ = _forward(grouping, *inputs, keep=False)
    return out, (weight, bias)


def _forward(
    grouping: Grouping,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor,
    visible: torch.Tensor,
    fold: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs ``[B, T, H, D]``, final weight and bias, and the weights ``[groups, N, E, D]`` where
    each group begins, if these are to be kept."""
    tokens, group = Tokens(q, k, v, lr), Group(grouping, ln_weight, ln_bias)
    # [N, E, D]
    start = torch.cat((weight, bias[:, :, None]), dim=2).flatten(0, 1)
    centred = start - start.mean(-1, keepdim=True)
    state = centred.clone()
    spans = list(grouping.spans())
    checkpoints = state.new_empty(len(spans) if keep else 0, *state.shape)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for index, (first, last) in enumerate(spans):
        if index:  # Rounding moves the rows' means a little, and nothing would bring them back.
            state -= (state - centred).mean(-1, keepdim=True)
        if keep:
            checkpoints[index] = state
        group.load(tokens, fold, first, last)
        group.learn(state)
        group.answer(_of_group(visible, first, last))
        group.output(first, last, out)
    # Bit for bit the start where nothing was folded.
    final = state.sub_(centred).add_(start).view(*bias.shape[:2], -1, bias.shape[2])
    return out, final[:, :, :-1].contiguous(), final[:, :, -1].contiguous(), checkpoints


def _of_group(visible: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return visible if visible.shape[0] == 1 else visible[first:last]


class _ChunkedLinear(torch.autograd.Function):
    """Keeps its inputs and the weights where groups begin."""

    @staticmethod
    def forward(ctx: Any, grouping: Grouping, *inputs: torch.Tensor) -> Tensors:
        out, weight, bias, checkpoints = _forward(grouping, *inputs, keep=True)
        ctx.grouping = grouping
        # All but the initial weights: they are in the first checkpoint.
        ctx.save_for_backward(*inputs[:8], checkpoints)
        return out, weight, bias

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("ttt_linear")
        *inputs, checkpoints = ctx.saved_tensors
        with torch.autocast(inputs[0].device.type, enabled=False):
            found = Backward(ctx.grouping, *inputs).run(checkpoints, *upstream)
        return (None, *found)
