"""TTT-MLP backward in Triton: one program per (row, head), group by group from the last to the first.

For each group of mini-batches the forward kernel replays it from the group's saved weights, keeping
every mini-batch's weights, z2 (before the key's layer norm) and y2 (before the query's) in scratch; a
second kernel then goes backward through them. The adjoints of W1, b1 and W2 lie in global memory like the weights, and are
changed in place, tile by tile; where they go out is where they came in, and in the end they are the
gradients of the initial weights. Sums over programs are left to torch: no atomics, every run the same.

A mini-batch with start weights P, next weights ``P' = P − c Σ g`` and output adjoint ``do`` takes two
sweeps over the hidden units, for dz2 needs dg2 complete (equations in README.md):

1. from dy2 (layer norm) all that follows from the outputs, the fold and g1, and the parts of dg2;
2. from dz2 (second derivative of the loss through its layer norm) what follows from z1 and x2.

Barriers as in ``forward.py``. Shape legend as there, and G mini-batches of a group.
"""

import torch
import triton
import triton.language as tl

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.triton_support import (
    block_of,
    fitting,
    matmul,
    norm_l2_gradient,
    norm_l2_gradient_backward,
    normalize,
    normalize_backward,
    product_mode,
)
from ttt_adapt.kernels.ttt_mlp.forward import (
    CUBIC,
    SLOPE,
    Saved,
    gelu_and_slope,
    gelu_gate,
    hidden_tile,
    launch_of,
    load_tokens,
    output_like,
    replay,
)


def run_backward(
    d_out: torch.Tensor,
    d_ended: Tensors,
    tokens: Tokens,
    shared: Shared,
    saved: Saved,
    lengths: torch.Tensor | None,
) -> tuple[Tokens, Shared, Tensors]:
    """Gradients of the tokens, of what they share (float32), and of the initial weights.

    Args:
        d_out: ``[B, T, H, D]``, contiguous; d_ended: of the final weights, not changed.
        tokens, shared, lengths: as :func:`~ttt_adapt.kernels.ttt_mlp.forward.run_forward` had them.
    """
    q, like = tokens.q, saved.weights[0]
    batch, num_tokens, heads, width = q.shape
    size, hidden = shared.token_scale.shape[0], like.shape[-1]
    block, group = block_of(size), saved.group
    d_tokens = Tokens(*(output_like(tensor, lengths) for tensor in tokens))
    d_weights = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in d_ended)
    # One for each program; every launch adds to them.
    d_shared = tuple(like.new_zeros(batch, heads, n) for n in (size, width, width))
    states = tuple(w.new_empty(batch, heads, group, *w.shape[3:]) for w in saved.weights)
    z2, y2 = (like.new_empty(batch, heads, group, block, width) for _ in range(2))
    d_z1 = like.new_empty(batch, heads, block, hidden)
    launch = launch_of(width)
    for index in reversed(range(saved.num_states)):
        for state, kept in zip(states, saved.weights, strict=True):
            state[:, :, 0] = kept[:, :, index]
        first = index * group * size
        replay(tokens, shared, states, lengths, first, z2, y2)
        with fitting("ttt_mlp", q, size):
            _backward_kernel[(batch * heads,)](
                *tokens, *shared, *states[:3], z2, y2, d_out, *d_tokens, *d_shared, *d_weights,
                d_z1, q if lengths is None else lengths, first,
                min(first + group * size, num_tokens), num_tokens, heads, group,
                SIZE=size, N=block, D=width, F=hidden, J=hidden_tile(width, hidden),
                MODE=product_mode(q.device), RAGGED=lengths is not None,
                **launch.options(),
            )  # fmt: skip
    d_scale, d_ln_weight, d_ln_bias = d_shared
    return (
        Tokens(*(grad.to(tensor.dtype) for grad, tensor in zip(d_tokens, tokens, strict=True))),
        Shared(d_scale.sum((0, 1)), d_ln_weight.sum(0), d_ln_bias.sum(0)),
        d_weights,
    )


@triton.jit
def _gelu_and_slopes(x: tl.tensor) -> tl.tensor:
    """``gelu(x)``, ``gelu'(x)`` and ``gelu''(x)``."""
    gate, rise = gelu_gate(x)
    # With t = tanh(u): 1 - t² = 4 σ (1 − σ), and d²u/dx² = 6 SLOPE CUBIC x.
    spread = 4.0 * gate * (1.0 - gate)
    curve = 3.0 * SLOPE * CUBIC * x * x
    bend = spread * (rise + curve - x * (2.0 * gate - 1.0) * rise * rise)
    return x * gate, gate + 0.5 * spread * x * rise, bend


@triton.jit
def _output_sweep(
    q: tl.tensor, k: tl.tensor, g2: tl.tensor, dy2: tl.tensor, scores: tl.tensor, d_products: tl.tensor, fold: tl.tensor,
    w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, dw1: tl.tensor, db1: tl.tensor, dw2: tl.tensor, dz1: tl.tensor,
    N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr, MODE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first sweep: adjoints through the outputs, the fold, and the gradients' W2.

    Args:
        scores: ``(q kᵀ + 1) ∘ M``; d_products: of ``h x2ᵀ``; ``[N, N]``.
        dw1, db1, dw2: adjoints of the next weights, changed to those of these so far.
        dz1: ``[N, F]``, written: the adjoint of ``k W1 + b1`` so far.

    Returns:
        ``h x2ᵀ``, the adjoints of ``q``, of ``k``, of g2 (through W2), of ``scores``, ``x2 dW2'``
        and the fold's adjoint of g1, summed over all.
    """
    token, unit, wide = tl.arange(0, N), tl.arange(0, J), tl.arange(0, D)
    products = tl.zeros((N, N), dtype=tl.float32)
    dq = tl.zeros((N, D), dtype=tl.float32)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dg2 = tl.zeros((N, D), dtype=tl.float32)
    d_scores = tl.zeros((N, N), dtype=tl.float32)
    fold2 = tl.zeros((N, D), dtype=tl.float32)
    folded = tl.zeros((N,), dtype=tl.float32)
    for first in range(0, F, J):
        at_w1 = wide[:, None] * F + first + unit[None, :]
        at_w2 = (first + unit[:, None]) * D + wide[None, :]
        w1_DJ, b1_J = tl.load(w1 + at_w1), tl.load(b1 + first + unit)
        w2_JD = tl.load(w2 + at_w2)
        w2_DJ = tl.trans(w2_JD)
        x2, slope, bend = _gelu_and_slopes(matmul(k, w1_DJ, MODE) + b1_J[None, :])
        a = matmul(g2, w2_DJ, MODE)
        g1 = a * slope
        y1 = matmul(q, w1_DJ, MODE) + b1_J[None, :] - matmul(scores, g1, MODE)
        h, y_slope = gelu_and_slope(y1)
        products += matmul(h, tl.trans(x2), MODE)
        dy1 = (matmul(dy2, w2_DJ, MODE) + matmul(d_products, x2, MODE)) * y_slope
        dq += matmul(dy1, tl.trans(w1_DJ), MODE)
        d_scores -= matmul(dy1, tl.trans(g1), MODE)

        dw1_DJ, db1_J = tl.load(dw1 + at_w1), tl.load(db1 + first + unit)
        dw2_JD = tl.load(dw2 + at_w2)
        fold1 = matmul(k, dw1_DJ, MODE) + db1_J[None, :]
        fold2 += matmul(x2, dw2_JD, MODE)
        folded += tl.sum(g1 * fold1, axis=1)
        dg1 = -matmul(tl.trans(scores), dy1, MODE) - fold * fold1
        dk -= fold * matmul(g1, tl.trans(dw1_DJ), MODE)
        dx2 = matmul(tl.trans(d_products), h, MODE)
        dx2 -= fold * matmul(g2, tl.trans(dw2_JD), MODE)
        da = dg1 * slope
        dg2 += matmul(da, w2_JD, MODE)
        dw1_DJ += matmul(tl.trans(q), dy1, MODE)
        db1_J += tl.sum(dy1, axis=0)
        dw2_JD += matmul(tl.trans(h), dy2, MODE) + matmul(tl.trans(da), g2, MODE)
        tl.debug_barrier()  # in place: no thread stores what another has yet to load
        tl.store(dw1 + at_w1, dw1_DJ)
        tl.store(db1 + first + unit, db1_J)
        tl.store(dw2 + at_w2, dw2_JD)
        tl.store(dz1 + token[:, None] * F + first + unit[None, :], dg1 * a * bend + dx2 * slope)
    tl.debug_barrier()  # the next sweep's loads see these stores
    return products, dq, dk, dg2, d_scores, fold2, tl.sum(folded, axis=0)


@triton.jit
def _input_sweep(
    k: tl.tensor, dz2: tl.tensor, w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, dw1: tl.tensor, db1: tl.tensor, dw2: tl.tensor, dz1: tl.tensor,
    N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr, MODE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The second sweep: adjoints through ``z2 = gelu(k W1 + b1) W2 + b2``; returns that of ``k``."""
    token, unit, wide = tl.arange(0, N), tl.arange(0, J), tl.arange(0, D)
    dk = tl.zeros((N, D), dtype=tl.float32)
    for first in range(0, F, J):
        at_w1 = wide[:, None] * F + first + unit[None, :]
        at_w2 = (first + unit[:, None]) * D + wide[None, :]
        w1_DJ, b1_J = tl.load(w1 + at_w1), tl.load(b1 + first + unit)
        w2_DJ = tl.trans(tl.load(w2 + at_w2))
        x2, slope = gelu_and_slope(matmul(k, w1_DJ, MODE) + b1_J[None, :])
        dz1_NJ = tl.load(dz1 + token[:, None] * F + first + unit[None, :])
        dz1_NJ += matmul(dz2, w2_DJ, MODE) * slope
        dk += matmul(dz1_NJ, tl.trans(w1_DJ), MODE)
        dw1_DJ = tl.load(dw1 + at_w1) + matmul(tl.trans(k), dz1_NJ, MODE)
        db1_J = tl.load(db1 + first + unit) + tl.sum(dz1_NJ, axis=0)
        dw2_JD = tl.load(dw2 + at_w2) + matmul(tl.trans(x2), dz2, MODE)
        tl.debug_barrier()
        tl.store(dw1 + at_w1, dw1_DJ)
        tl.store(db1 + first + unit, db1_J)
        tl.store(dw2 + at_w2, dw2_JD)
    tl.debug_barrier()
    return dk


@triton.jit(do_not_specialize=["begin", "end", "num_tokens", "group"])
def _backward_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, lr_ptr: tl.tensor,
    scale_ptr: tl.tensor, ln_weight_ptr: tl.tensor, ln_bias_ptr: tl.tensor,
    w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, z2_ptr: tl.tensor, y2_ptr: tl.tensor,
    d_out_ptr: tl.tensor, dq_ptr: tl.tensor, dk_ptr: tl.tensor, dv_ptr: tl.tensor, dlr_ptr: tl.tensor,
    d_scale_ptr: tl.tensor, d_ln_weight_ptr: tl.tensor, d_ln_bias_ptr: tl.tensor,
    dw1: tl.tensor, db1: tl.tensor, dw2: tl.tensor, db2: tl.tensor, dz1: tl.tensor,
    lengths_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, num_tokens: tl.tensor,
    heads: tl.tensor, group: tl.tensor,
    SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr,
    MODE: tl.constexpr, RAGGED: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    length = end
    if RAGGED:
        length = tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), end)
    position, wide = tl.arange(0, N), tl.arange(0, D)
    scale = tl.load(scale_ptr + position, mask=position < SIZE, other=0.0)
    last_scale = tl.load(scale_ptr + SIZE - 1)
    ln_weight = tl.load(ln_weight_ptr + head * D + wide)[None, :]
    ln_bias = tl.load(ln_bias_ptr + head * D + wide)[None, :]
    seen = position[:, None] >= position[None, :]
    visible = tl.where(seen, scale[:, None], 0.0)
    stride = tl.full((), D, tl.int64) * heads
    start = row * num_tokens * stride + head * D
    dz1 += program * N * F
    dw1 += program * D * F
    db1 += program * F
    dw2 += program * F * D
    db2_D = tl.load(db2 + program * D + wide)
    d_scale = tl.zeros((N,), dtype=tl.float32)
    d_ln_weight = tl.zeros((D,), dtype=tl.float32)
    d_ln_bias = tl.zeros((D,), dtype=tl.float32)

    num_batches = tl.cdiv(tl.maximum(length - begin, 0), SIZE)
    for behind in range(num_batches):
        index = num_batches - 1 - behind
        first = begin + index * SIZE
        real = tl.minimum(length - first, SIZE)
        fold = tl.where(real == SIZE, last_scale, 0.0)
        at = start + first * stride
        q = load_tokens(q_ptr, at, stride, position, real, D)
        k = load_tokens(k_ptr, at, stride, position, real, D)
        target = load_tokens(v_ptr, at, stride, position, real, D).to(tl.float32)
        target -= k.to(tl.float32)
        d_out = load_tokens(d_out_ptr, at, stride, position, real, D).to(tl.float32)
        at_lr = (row * num_tokens + first + position) * heads + head
        lr = tl.load(lr_ptr + at_lr, mask=position < real, other=0.0)
        state = program * group + index
        at_kept = state * N * D + position[:, None] * D + wide[None, :]
        z2 = tl.load(z2_ptr + at_kept)
        y2 = tl.load(y2_ptr + at_kept)
        e, normal, rstd = norm_l2_gradient(z2, target, ln_weight, ln_bias, D, 1)
        g2 = e * lr[:, None]
        y_normal, y_rstd = normalize(y2, D, 1)
        dy2 = normalize_backward(d_out * ln_weight, y_normal, y_rstd, D, 1)
        dots = matmul(q, tl.trans(k), MODE) + 1.0
        # Of (h x2ᵀ + 1) ∘ M, before M and after.
        d_masked = tl.where(seen, -matmul(dy2, tl.trans(g2), MODE), 0.0)
        products, dq, dk, dg2, d_scores, fold2, folded = _output_sweep(
            q, k, g2, dy2, dots * visible, d_masked * scale[:, None], fold,
            w1 + state * D * F, b1 + state * F, w2 + state * F * D, dw1, db1, dw2, dz1,
            N, D, F, J, MODE,
        )  # fmt: skip
        products += 1.0
        d_scores = tl.where(seen, d_scores, 0.0)
        d_scale += tl.sum(d_masked * products + d_scores * dots, axis=1)
        d_scores *= scale[:, None]
        fold2 += db2_D[None, :]
        folded += tl.sum(tl.sum(g2 * fold2, axis=1), axis=0)
        d_scale -= tl.where((position == SIZE - 1) & (real == SIZE), folded, 0.0)
        dg2 -= matmul(tl.trans(products * visible), dy2, MODE) + fold * fold2
        dz2, d_target, d_weight, d_bias = norm_l2_gradient_backward(
            dg2 * lr[:, None], e, normal, rstd, target, ln_weight, ln_bias, D, 1
        )
        dk += _input_sweep(
            k, dz2, w1 + state * D * F, b1 + state * F, w2 + state * F * D, dw1, db1, dw2, dz1,
            N, D, F, J, MODE,
        )  # fmt: skip
        dq += d_out + matmul(d_scores, k, MODE)
        dk += matmul(tl.trans(d_scores), q, MODE) - d_target
        db2_D += tl.sum(dy2 + dz2, axis=0)
        d_ln_weight += tl.sum(d_weight + d_out * y_normal, axis=0)
        d_ln_bias += tl.sum(d_bias + d_out, axis=0)
        at_token = at + position[:, None] * stride + wide[None, :]
        mask = position[:, None] < real
        tl.store(dq_ptr + at_token, dq.to(dq_ptr.dtype.element_ty), mask=mask)
        tl.store(dk_ptr + at_token, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_ptr + at_token, d_target.to(dv_ptr.dtype.element_ty), mask=mask)
        tl.store(dlr_ptr + at_lr, tl.sum(dg2 * e, axis=1), mask=position < real)

    at_scale = d_scale_ptr + program * SIZE + position
    d_scale += tl.load(at_scale, mask=position < SIZE, other=0.0)
    d_ln_weight += tl.load(d_ln_weight_ptr + program * D + wide)
    d_ln_bias += tl.load(d_ln_bias_ptr + program * D + wide)
    tl.debug_barrier()
    tl.store(db2 + program * D + wide, db2_D)
    tl.store(at_scale, d_scale, mask=position < SIZE)
    tl.store(d_ln_weight_ptr + program * D + wide, d_ln_weight)
    tl.store(d_ln_bias_ptr + program * D + wide, d_ln_bias)
