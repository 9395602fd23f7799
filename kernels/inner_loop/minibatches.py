"""The core contract in the plain dual form: what an eager implementation does, under autograd.

Obvious and exact, but slow: every fast path is held against it, and its error against the float64
reference is the yardstick for theirs.
"""

import torch

from ttt_adapt.kernels.inner_loop.models import InnerModel, Shared, Tensors, Tokens


def run_mini_batches(
    inner: InnerModel,
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, Tensors]:
    """The core contract (see ``operator.py``)."""
    dtype, size = weights[0].dtype, shared.token_scale.shape[0]
    scale, ln_weight, ln_bias = shared.to(dtype)
    q = tokens.q
    num_tokens = q.shape[1]
    if lengths is None:
        lengths = torch.full((q.shape[0],), num_tokens, device=q.device)
    outputs = []
    for first in range(0, num_tokens, size):
        part_q, part_k, part_v, part_lr = (
            tensor[:, first : first + size].to(dtype).transpose(1, 2) for tensor in tokens
        )
        count = part_q.shape[2]
        # Tokens of this mini-batch that each row has.
        real = (lengths - first).clamp(0, count)
        position = torch.arange(count, device=q.device)
        present = position < real[:, None]
        part_lr = part_lr.masked_fill(~present[:, None], 0.0)
        target = inner.target(part_k, part_v)
        slots = inner.slots(weights, part_k, target, part_lr, ln_weight, ln_bias)
        if causal:
            visible = scale[:count, None] * (position[:, None] >= position)
            visible = visible.expand(q.shape[0], 1, count, count)
        else:
            last = scale[(real - 1).clamp(min=0)]
            visible = last[:, None, None, None].expand(q.shape[0], 1, count, count)
        z = inner.outputs(weights, slots, visible, part_q)
        outputs.append(inner.answer(part_q, z, ln_weight, ln_bias).transpose(1, 2))
        if causal:
            weights = inner.fold(weights, slots, scale[-1] * (real == size))
        else:
            weights = inner.fold(weights, slots, last * (real > 0))
    return torch.cat(outputs, dim=1).to(q.dtype), weights
