"""Multiply-adds of a module's forward, by formula: products of matrices and convolutions.

Elementwise work (norms, activations, the four taps of the short convolution, softmax) is not counted, as
in the papers' tables and in torch's counter.

Shape legend: B images, T tokens, D width, N heads, d head width.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from ttt_adapt.kernels.inner_loop.counting import inner_loop_macs
from ttt_adapt.vision.costs.inner_loops import Sizes, mttt_macs
from ttt_adapt.vision.mixers import MTTT, Attention, LinearAttention
from ttt_adapt.vision.models.inner_learner import InnerLearner

Formula = Callable[[Any, tuple[Any, ...], Any], int]
FormulaType = TypeVar("FormulaType", bound=Formula)

_FORMULAS: dict[type[nn.Module], Formula] = {}

_sdpa_flops: Callable[..., int] = sdpa_flop_count
_sdpa_backward_flops: Callable[..., int] = sdpa_backward_flop_count


def register_macs(kind: type[nn.Module]) -> Callable[[FormulaType], FormulaType]:
    """Decorate ``formula(module, inputs, output) -> int``: what a forward multiplies and adds, but for
    what modules inside it have a formula for themselves."""

    def register(formula: FormulaType) -> FormulaType:
        _FORMULAS[kind] = formula
        return formula

    return register


def formula_for(module: nn.Module) -> Formula | None:
    """That of the module's class, or of the nearest class it descends from."""
    for kind in type(module).__mro__:
        if kind in _FORMULAS:
            return _FORMULAS[kind]
    return None


@register_macs(nn.Linear)
def linear(module: nn.Linear, inputs: tuple[Any, ...], output: torch.Tensor) -> int:
    return output.numel() * module.in_features


@register_macs(nn.Conv1d)
@register_macs(nn.Conv2d)
def convolution(
    module: nn.Conv1d | nn.Conv2d, inputs: tuple[Any, ...], output: torch.Tensor
) -> int:
    return output.numel() * module.in_channels // module.groups * math.prod(module.kernel_size)


@register_macs(Attention)
def attention(module: Attention, inputs: tuple[Any, ...], output: torch.Tensor) -> int:
    """Scores, and the values' means: 2 T² D."""
    batch, num_tokens, _ = inputs[0].shape
    return int(batch * 2 * num_tokens**2 * module.dim)


@register_macs(LinearAttention)
def linear_attention(module: LinearAttention, inputs: tuple[Any, ...], output: torch.Tensor) -> int:
    """Keys times values, and queries times that: 2 T D d."""
    batch, num_tokens, _ = inputs[0].shape
    return int(batch * 2 * num_tokens * module.dim * (module.dim // module.num_heads))


@register_macs(MTTT)
def mttt(module: MTTT, inputs: tuple[Any, ...], output: torch.Tensor) -> int:
    batch, num_tokens, _ = inputs[0].shape
    sizes = Sizes(module.num_heads, module.head_width)
    return mttt_macs(module.settings, sizes, num_tokens, batch)


@register_macs(InnerLearner)
def inner_learner(module: InnerLearner, inputs: tuple[Any, ...], output: torch.Tensor) -> int:
    """One direction's TTT-Linear: T D (3 d + 2 b), a shorter last mini-batch counted as it is."""
    batch, num_tokens, _ = inputs[0].shape
    heads, width = module.num_heads, module.head_width
    return int(batch * inner_loop_macs(num_tokens, heads, width, module.mini_batch_size))


def _register_attention_on_cpu() -> None:
    """torch's counter knows attention's fused kernels for accelerators; that for CPUs, from here."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward not in flop_registry:

        @register_flop_formula(forward)
        def _forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return _sdpa_flops(q, k, v)

    if backward not in flop_registry:

        @register_flop_formula(backward)
        def _backward(
            d_out: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any
        ) -> int:
            return _sdpa_backward_flops(d_out, q, k, v)


_register_attention_on_cpu()
