"""TTT-Linear backward in Triton: from the last mini-batch to the first, one program for a row and head.

Weights at the start of a group of mini-batches come from the forward's checkpoints; those within it
are found again by going forward, and wait in a scratch buffer of one group.

For one mini-batch, with ``e_j`` the gradient of token j's loss, ``g_j = lr_j e_j``, h_i the normalized
z_i, ``S_ij = q_i·k_j + 1`` for j ≤ i, else 0, and ``A_ij = s_i S_ij``, the forward is

    z_i = q_i W + b − Σ_j A_ij g_j     out_i = q_i + γ h_i + β     W' = W − s_b Σ_j k_jᵀ g_j

(the last for whole mini-batches; b' alike). A gradient ∂x of each x then is, from the end:

    ∂z = through the layer norm of γ ∂out
    ∂A = −∂z gᵀ          ∂s_i = Σ_j ∂A_ij S_ij, for the last i also −Σ_j g_j·f_j
    f_j = k_j ∂W' + ∂b'   ∂g_j = −Σ_i A_ij ∂z_i − s_b f_j     ∂lr_j = ∂g_j·e_j
    (∂y_j, ∂t_j) = second derivative of e_j at y_j = k_j W + b, t_j = v_j − k_j, for lr_j ∂g_j
    ∂q_i = ∂out_i + ∂z_i Wᵀ + Σ_j s_i ∂A_ij k_j
    ∂k_j = ∂y_j Wᵀ − ∂t_j + Σ_i s_i ∂A_ij q_i − s_b g_j ∂W'ᵀ     ∂v_j = ∂t_j
    ∂W = ∂W' + qᵀ∂z + kᵀ∂y     ∂b = ∂b' + Σ ∂z + Σ ∂y

The second derivative is that of ``norm_l2_gradient_backward`` in ``inner_loop/triton_support.py``.

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch, C checkpoints.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.triton_support import (
    Launch,
    block_of,
    fitting,
    matmul,
    matmul_add,
    norm_l2_gradient,
    norm_l2_gradient_backward,
    normalize,
    normalize_backward,
    product_mode,
    stored_dtype,
)
from ttt_adapt.kernels.ttt_linear.forward import group_of, launch_of


class Backward(NamedTuple):
    """Gradients: of tokens in their dtypes, of all else in float32; weights ``[B, H, ...]``."""

    tokens: Tokens
    shared: Shared
    weights: Tensors


@triton.jit
def backward_kernel(
    Q: tl.tensor, K: tl.tensor, V: tl.tensor, LR: tl.tensor,
    SCALE: tl.tensor, LN_WEIGHT: tl.tensor, LN_BIAS: tl.tensor, LENGTHS: tl.tensor,
    SAVED_WEIGHT: tl.tensor, SAVED_BIAS: tl.tensor, SCRATCH_WEIGHT: tl.tensor, SCRATCH_BIAS: tl.tensor,
    D_OUT: tl.tensor, D_LAST_WEIGHT: tl.tensor, D_LAST_BIAS: tl.tensor,
    DQ: tl.tensor, DK: tl.tensor, DV: tl.tensor, D_LR: tl.tensor,
    D_SCALE: tl.tensor, D_LN_WEIGHT: tl.tensor, D_LN_BIAS: tl.tensor, D_WEIGHT: tl.tensor, D_BIAS: tl.tensor,
    q_row: tl.tensor, q_token: tl.tensor, q_head: tl.tensor,
    k_row: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_token: tl.tensor, v_head: tl.tensor,
    lr_row: tl.tensor, lr_token: tl.tensor, lr_head: tl.tensor,
    num_tokens: tl.tensor, num_heads: tl.tensor, num_saved: tl.tensor, group: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr,
    RAGGED: tl.constexpr, FROM_WEIGHTS: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, head = program // num_heads, program % num_heads
    length = num_tokens
    if RAGGED:
        length = tl.load(LENGTHS + row).to(tl.int32)
    slot = tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDTH)
    down, across = dim[:, None], slot[None, :]
    square = down * WIDTH + dim[None, :]
    visible = slot[:, None] <= across  # [key, query]
    scale = tl.load(SCALE + slot, mask=slot < SIZE, other=0.0).to(tl.float32)
    last_scale = tl.load(SCALE + SIZE - 1).to(tl.float32)
    gamma = tl.load(LN_WEIGHT + head * WIDTH + down).to(tl.float32)
    beta = tl.load(LN_BIAS + head * WIDTH + down).to(tl.float32)
    Q += row * q_row + head * q_head
    K += row * k_row + head * k_head
    V += row * v_row + head * v_head
    LR += row * lr_row + head * lr_head
    dense_row, dense_token = row * num_tokens, num_heads * WIDTH

    # Gradients of the weights after the mini-batch at hand, [out, in] and [out, 1].
    if FROM_WEIGHTS:
        d_weight = tl.trans(tl.load(D_LAST_WEIGHT + program * WIDTH * WIDTH + square))
        d_bias = tl.load(D_LAST_BIAS + program * WIDTH + down)
    else:
        d_weight = tl.zeros([WIDTH, WIDTH], tl.float32)
        d_bias = tl.zeros([WIDTH, 1], tl.float32)
    # Summed over the tokens only in the end: a sum along each row would be needed every time.
    zeros = tl.zeros([WIDTH, BLOCK], tl.float32)
    d_gamma, d_beta = zeros, zeros
    d_scale = tl.zeros([BLOCK], tl.float32)

    num_steps = tl.cdiv(length, SIZE)
    num_groups = tl.cdiv(num_steps, group)
    for passed in range(num_groups):
        begin = (num_groups - 1 - passed) * group
        num_inside = tl.minimum(group, num_steps - begin)
        saved = program * num_saved + num_groups - 1 - passed
        weight = tl.load(SAVED_WEIGHT + saved * WIDTH * WIDTH + square)
        bias = tl.load(SAVED_BIAS + saved * WIDTH + down)
        for inside in range(num_inside):
            waiting = program * group + inside
            tl.store(SCRATCH_WEIGHT + waiting * WIDTH * WIDTH + square, weight)
            tl.store(SCRATCH_BIAS + waiting * WIDTH + down, bias)
            first = tl.cast((begin + inside) * SIZE, tl.int64)
            count = tl.minimum(SIZE, length - (begin + inside) * SIZE)
            real = across < count
            k = tl.load(K + first * k_token + across * k_token + down, mask=real, other=0.0)
            v = tl.load(V + first * v_token + across * v_token + down, mask=real, other=0.0)
            lr = tl.load(LR + first * lr_token + slot * lr_token, mask=slot < count, other=0.0).to(
                tl.float32
            )
            if MODE == "ieee":
                k = k.to(tl.float32)
            target = v.to(tl.float32) - k.to(tl.float32)
            z = matmul_add(zeros + bias, weight, k, MODE)
            gradient, _, _ = norm_l2_gradient(z, target, gamma, beta, WIDTH, 0)
            step = gradient * (lr[None, :] * -last_scale)
            weight = matmul_add(weight, step, tl.trans(k), MODE)
            bias += tl.sum(step, axis=1, keep_dims=True)
        # What one thread has stored another one loads.
        tl.debug_barrier()
        for back in range(num_inside):
            inside = num_inside - 1 - back
            waiting = program * group + inside
            weight = tl.load(SCRATCH_WEIGHT + waiting * WIDTH * WIDTH + square)
            bias = tl.load(SCRATCH_BIAS + waiting * WIDTH + down)
            first = tl.cast((begin + inside) * SIZE, tl.int64)
            count = tl.minimum(SIZE, length - (begin + inside) * SIZE)
            real = across < count
            q = tl.load(Q + first * q_token + across * q_token + down, mask=real, other=0.0)
            k = tl.load(K + first * k_token + across * k_token + down, mask=real, other=0.0)
            v = tl.load(V + first * v_token + across * v_token + down, mask=real, other=0.0)
            lr = tl.load(LR + first * lr_token + slot * lr_token, mask=slot < count, other=0.0).to(
                tl.float32
            )
            dense = ((dense_row + first) * num_heads + head) * WIDTH
            dense_at = dense + across * dense_token + down
            d_out = tl.load(D_OUT + dense_at, mask=real, other=0.0).to(tl.float32)
            if MODE == "ieee":
                q, k = q.to(tl.float32), k.to(tl.float32)
            fold = tl.where(count == SIZE, last_scale, 0.0)

            # Forward again, from this mini-batch's own weights.
            target = v.to(tl.float32) - k.to(tl.float32)
            z = matmul_add(zeros + bias, weight, k, MODE)
            gradient, normal, rstd = norm_l2_gradient(z, target, gamma, beta, WIDTH, 0)
            g = gradient * lr[None, :]
            scores = tl.where(visible, matmul(tl.trans(k), q, MODE) + 1.0, 0.0)
            scaled = scores * scale[None, :]
            z = matmul_add(zeros + bias, weight, q, MODE) - matmul(g, scaled, MODE)
            q_normal, q_rstd = normalize(z, WIDTH, 0)

            # out = q + LN(z), z = q W + b − A g.
            d_gamma += d_out * q_normal
            d_beta += d_out
            dz = normalize_backward(d_out * gamma, q_normal, q_rstd, WIDTH, 0)
            # W' = W − s k g, b' = b − s g.
            folded = matmul_add(zeros + d_bias, d_weight, k, MODE)
            dg = -matmul_add(fold * folded, dz, tl.trans(scaled), MODE)
            d_last = -tl.sum(tl.sum(g * folded, axis=1), axis=0)
            d_last = tl.where(count == SIZE, d_last, 0.0)
            d_scores = tl.where(visible, -matmul(tl.trans(g), dz, MODE), 0.0)
            d_scale += tl.sum(d_scores * scores, axis=0)
            d_scale += tl.where(slot == SIZE - 1, d_last, 0.0)
            d_scores *= scale[None, :]
            upright = tl.trans(weight)
            dq = matmul_add(matmul_add(d_out, upright, dz, MODE), k, d_scores, MODE)
            dk = matmul(tl.trans(d_weight), g * -fold, MODE)
            dk = matmul_add(dk, q, tl.trans(d_scores), MODE)
            # g = lr · e(k W + b, v − k).
            d_lr = tl.sum(dg * gradient, axis=0)
            dz_k, d_target, more_gamma, more_beta = norm_l2_gradient_backward(
                dg * lr[None, :], gradient, normal, rstd, target, gamma, beta, WIDTH, 0
            )
            d_gamma += more_gamma
            d_beta += more_beta
            dk = matmul_add(dk - d_target, upright, dz_k, MODE)
            d_weight = matmul_add(d_weight, dz, tl.trans(q), MODE)
            d_weight = matmul_add(d_weight, dz_k, tl.trans(k), MODE)
            d_bias += tl.sum(dz + dz_k, axis=1, keep_dims=True)
            tl.store(DQ + dense_at, dq.to(DQ.dtype.element_ty), mask=real)
            tl.store(DK + dense_at, dk.to(DK.dtype.element_ty), mask=real)
            tl.store(DV + dense_at, d_target.to(DV.dtype.element_ty), mask=real)
            lr_at = (dense_row + first + slot) * num_heads + head
            tl.store(D_LR + lr_at, d_lr.to(D_LR.dtype.element_ty), mask=slot < count)
        # The next group's weights go where this one's lie.
        tl.debug_barrier()

    tl.store(D_WEIGHT + program * WIDTH * WIDTH + square, tl.trans(d_weight))
    tl.store(D_BIAS + program * WIDTH + down, d_bias)
    tl.store(D_LN_WEIGHT + program * WIDTH + dim, tl.sum(d_gamma, axis=1))
    tl.store(D_LN_BIAS + program * WIDTH + dim, tl.sum(d_beta, axis=1))
    tl.store(D_SCALE + program * SIZE + slot, d_scale, mask=slot < SIZE)


def backward(
    tokens: Tokens,
    shared: Shared,
    lengths: torch.Tensor | None,
    checkpoints: Tensors,
    d_out: torch.Tensor,
    d_weights: Tensors | None,
    *,
    mode: str | None = None,
    launch: Launch | None = None,
) -> Backward:
    """Gradients of :func:`~ttt_adapt.kernels.ttt_linear.forward.forward`'s inputs.

    Sums over rows and tokens are taken in a fixed order: the same inputs give the same bits.

    Args:
        checkpoints: as the forward returned them.
        d_out: contiguous ``[B, T, H, D]``.
        d_weights: of the weights in the end, contiguous float32 ``[B, H, ...]``; ``None``: zero.
        mode, launch: as in the forward.
    """
    q, k, v, lr = tokens
    batch, num_tokens, heads, width = q.shape
    size = shared.token_scale.shape[0]
    group = group_of(width, size)
    saved_weight, saved_bias = checkpoints
    # Beyond a row's length nothing is written.
    create = torch.empty if lengths is None else torch.zeros
    found = tokens.map(
        lambda like: create(like.shape, dtype=stored_dtype(like.dtype), device=like.device)
    )

    def per_program(*shape: int) -> torch.Tensor:
        return saved_weight.new_empty(batch, heads, *shape)

    partial = Shared(per_program(size), per_program(width), per_program(width))
    d_first = per_program(width, width), per_program(width)
    mode = mode or product_mode(q.device)
    chosen = launch or launch_of(width, mode)
    with fitting("ttt_linear", q, size):
        backward_kernel[(batch * heads,)](
            *tokens,
            *shared, q if lengths is None else lengths,
            saved_weight, saved_bias, per_program(group, width, width), per_program(group, width),
            d_out, *(d_weights or d_first),
            *found,
            *partial, *d_first,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *lr.stride(),
            num_tokens, heads, saved_weight.shape[2], group,
            SIZE=size, BLOCK=block_of(size), WIDTH=width,
            MODE=mode, RAGGED=lengths is not None, FROM_WEIGHTS=d_weights is not None,
            **chosen.options(),
        )  # fmt: skip
    return Backward(
        Tokens(*(new.to(like.dtype) for new, like in zip(found, tokens, strict=True))),
        Shared(partial[0].sum((0, 1)), partial[1].sum(0), partial[2].sum(0)),
        d_first,
    )
