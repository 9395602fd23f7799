"""A core as one operation with a formula for torch's FLOP counter; see ``counting.py``.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ttt_adapt.kernels.inner_loop.counting import core_of, inner_loop_macs
from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.operator import Core


def as_operation(name: str, backend: str) -> Core:
    """A backend's core, run as ``ttt_adapt::inner_loop``."""

    def run(
        tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, Tensors]:
        inputs = (*tokens, *shared, *weights)
        out, *after = _Counted.apply(name, backend, causal, lengths, *inputs)  # type: ignore[no-untyped-call]
        return out, tuple(after)

    return run


@torch.library.custom_op("ttt_adapt::inner_loop", mutates_args=())
def inner_loop(
    name: str,
    backend: str,
    causal: bool,
    lengths: torch.Tensor | None,
    tokens: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """A core as an operation: outputs, and the weights after it."""
    out, after = core_of(name, backend)(
        Tokens(*tokens), Shared(*shared), tuple(weights), lengths, causal
    )
    return [out, *(weight.clone() for weight in after)]


@inner_loop.register_fake
def _(
    name: str,
    backend: str,
    causal: bool,
    lengths: torch.Tensor | None,
    tokens: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in (tokens[0], *weights)]


@torch.library.custom_op("ttt_adapt::inner_loop_backward_cost", mutates_args=())
def inner_loop_backward_cost(queries: torch.Tensor, macs: int) -> torch.Tensor:
    """Nothing but its own count: what a core's backward, hidden from the counter, has computed."""
    return queries.new_empty(0)


@inner_loop_backward_cost.register_fake
def _(queries: torch.Tensor, macs: int) -> torch.Tensor:
    return queries.new_empty(0)


@register_flop_formula(torch.ops.ttt_adapt.inner_loop)
def _forward_flops(
    name: str,
    backend: str,
    causal: bool,
    lengths: Any,
    tokens: Any,
    shared: Any,
    weights: Any,
    out_shape: Any = None,
    **_: Any,
) -> int:
    q, num_tokens = tokens[0], tokens[0][1]
    hidden = weights[0][-1] if name == "ttt_mlp" else 0
    size = shared[0][0]
    return 2 * int(q[0]) * inner_loop_macs(num_tokens, q[2], q[3], size, hidden)


@register_flop_formula(torch.ops.ttt_adapt.inner_loop_backward_cost)
def _backward_flops(queries: Any, macs: int, out_shape: Any = None, **_: Any) -> int:
    return 2 * macs


FORMULAS = {
    operation: flop_registry[operation]
    for operation in (torch.ops.ttt_adapt.inner_loop, torch.ops.ttt_adapt.inner_loop_backward_cost)
}
"""As torch's counter holds them."""


class _Counted(torch.autograd.Function):
    """Forward as one operation; backward is counted as twice the forward, two products for each one.
    What a backend computes again between its checkpoints is not counted."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        backend: str,
        causal: bool,
        lengths: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> Tensors:
        ctx.save_for_backward(lengths, *inputs)
        ctx.options = name, backend, causal
        found = torch.ops.ttt_adapt.inner_loop(
            name, backend, causal, lengths, inputs[:4], inputs[4:7], inputs[7:]
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, backend, causal = ctx.options
        lengths, *saved = ctx.saved_tensors
        with _disable_current_modes(), torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in saved]
            out, after = core_of(name, backend)(
                Tokens(*inputs[:4]), Shared(*inputs[4:7]), tuple(inputs[7:]), lengths, causal
            )
            found = torch.autograd.grad((out, *after), inputs, upstream, allow_unused=True)
        q, hidden = saved[0], saved[7].shape[-1] if name == "ttt_mlp" else 0
        batch, num_tokens, heads, width = q.shape
        macs = batch * inner_loop_macs(num_tokens, heads, width, saved[4].shape[0], hidden)
        torch.ops.ttt_adapt.inner_loop_backward_cost(q, 2 * macs)
        return None, None, None, None, *found
