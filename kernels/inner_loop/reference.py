"""The operator per token, by plain autograd: the equations themselves, in any float dtype.

Equations 5 to 7 of Sun et al. 2024 (arXiv 2407.04620) with the inner model's layer norm, residual
and per-token learning rates of its section 2.6; used by tests and for diagnosis, far too slow else.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from ttt_adapt.kernels.inner_loop.models import EPSILON, Shared, Tensors, Tokens

Apply = Callable[[Tensors, torch.Tensor], torch.Tensor]
"""Parameters ``[H, ...]`` each and inputs ``[H, D]`` to outputs ``[H, D]``."""


def run_per_token(
    apply: Apply,
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, Tensors]:
    """The core contract (see ``operator.py``), one row, one token at a time."""
    num_rows, num_tokens = tokens.q.shape[:2]
    dtype = weights[0].dtype
    rows, finals = [], []
    for row in range(num_rows):
        length = num_tokens if lengths is None else int(lengths[row])
        out, final = _run_row(
            apply,
            Tokens(*(tensor[row, :length].to(dtype) for tensor in tokens)),
            shared.to(dtype),
            tuple(tensor[row] for tensor in weights),
            causal,
        )
        rows.append(functional.pad(out, (0, 0, 0, 0, 0, num_tokens - length)))
        finals.append(final)
    return torch.stack(rows).to(tokens.q.dtype), tuple(map(torch.stack, zip(*finals, strict=True)))


def _run_row(
    apply: Apply,
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    causal: bool,
) -> tuple[torch.Tensor, Tensors]:
    q, k, v, lr = tokens
    token_scale, ln_weight, ln_bias = shared
    length, size = q.shape[0], token_scale.shape[0]
    outer_grad = torch.is_grad_enabled()

    def norm(z: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(z, (z.shape[-1],), eps=EPSILON) * ln_weight + ln_bias

    def gradient(start: Tensors, token: int) -> Tensors:
        with torch.enable_grad():
            error = norm(apply(start, k[token])) - (v[token] - k[token])
            loss = (0.5 * error.square().sum(-1) * lr[token]).sum()
            return torch.autograd.grad(loss, start, create_graph=outer_grad)

    # Without an outer gradient, even views of parameters are the inner loop's own leaves.
    start = tuple(
        t if outer_grad and t.requires_grad else t.detach().requires_grad_() for t in weights
    )
    outputs = []
    for first in range(0, length, size):
        mini_batch = range(first, min(first + size, length))
        total: Tensors = tuple(torch.zeros_like(tensor) for tensor in start)
        after = []
        for position, token in enumerate(mini_batch):
            total = tuple(map(torch.add, total, gradient(start, token)))
            scale = token_scale[position]
            after.append(tuple(p - scale * g for p, g in zip(start, total, strict=True)))
        for position, token in enumerate(mini_batch):
            params = after[position] if causal else after[-1]
            outputs.append(q[token] + norm(apply(params, q[token])))
        if len(mini_batch) == size or not causal:
            start = after[-1]
        if not outer_grad:
            start = tuple(tensor.detach().requires_grad_() for tensor in start)
            outputs = [output.detach() for output in outputs]
    out = torch.stack(outputs) if outputs else q
    return (out, start) if outer_grad else (out.detach(), tuple(t.detach() for t in start))
