"""TTT-Linear forward in Triton: one program for each row and head, its weights in registers.

Blocks hold tokens as columns, so that the weights are the left operand of every large product: there
tensor cores take them from the registers that the last update left them in.

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
    normalize,
    product_mode,
    stored_dtype,
)


class Forward(NamedTuple):
    """``out [B, T, H, D]``, the weights in the end, and, where asked for, on the way there.

    ``checkpoints``: float32 ``[B, H, C, D, D]`` and ``[B, H, C, D]``, the transposed weight and the
    bias at the start of every ``group`` mini-batches.
    """

    out: torch.Tensor
    weights: Tensors
    checkpoints: Tensors | None


def launch_of(width: int, mode: str) -> Launch:
    """A weight matrix takes D·D / (32 · warps) registers of each thread; products without tensor
    cores as much again for their operands."""
    num_warps = {32: 2, 64: 4, 128: 8}[width]
    return Launch(num_warps * 2 if mode == "ieee" else num_warps)


def crowded(launch: Launch, num_programs: int, device: torch.device) -> Launch:
    """Programs wait for their own results most of the time: where there are more of them than two for
    each multiprocessor, four of 128 threads and half the registers fit, at the price of spills."""
    if launch.num_warps != 4 or device.type != "cuda":
        return launch
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    many = num_programs > 2 * num_processors
    return launch._replace(max_registers=128) if many else launch


def group_of(width: int, mini_batch_size: int) -> int:
    """Mini-batches to a checkpoint: one every D tokens takes what one float32 activation does."""
    return max(1, -(-width // mini_batch_size))


@triton.jit
def forward_kernel(
    Q: tl.tensor, K: tl.tensor, V: tl.tensor, LR: tl.tensor,
    SCALE: tl.tensor, LN_WEIGHT: tl.tensor, LN_BIAS: tl.tensor,
    WEIGHT: tl.tensor, BIAS: tl.tensor, LENGTHS: tl.tensor,
    OUT: tl.tensor, LAST_WEIGHT: tl.tensor, LAST_BIAS: tl.tensor, SAVED_WEIGHT: tl.tensor, SAVED_BIAS: tl.tensor,
    q_row: tl.tensor, q_token: tl.tensor, q_head: tl.tensor,
    k_row: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_token: tl.tensor, v_head: tl.tensor,
    lr_row: tl.tensor, lr_token: tl.tensor, lr_head: tl.tensor,
    weight_row: tl.tensor, weight_head: tl.tensor, bias_row: tl.tensor, bias_head: tl.tensor,
    num_tokens: tl.tensor, num_heads: tl.tensor, num_saved: tl.tensor, group: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr,
    RAGGED: tl.constexpr, SAVES: tl.constexpr,
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
    scale = tl.load(SCALE + slot, mask=slot < SIZE, other=0.0).to(tl.float32)
    last_scale = tl.load(SCALE + SIZE - 1).to(tl.float32)
    gamma = tl.load(LN_WEIGHT + head * WIDTH + down).to(tl.float32)
    beta = tl.load(LN_BIAS + head * WIDTH + down).to(tl.float32)
    # [out, in] and [out, 1].
    weight = tl.trans(tl.load(WEIGHT + row * weight_row + head * weight_head + square))
    bias = tl.load(BIAS + row * bias_row + head * bias_head + down)

    Q += row * q_row + head * q_head
    K += row * k_row + head * k_head
    V += row * v_row + head * v_head
    LR += row * lr_row + head * lr_head
    OUT += (row * num_tokens * num_heads + head) * WIDTH
    count = tl.minimum(SIZE, length)
    next_q = tl.load(Q + across * q_token + down, mask=across < count, other=0.0)
    next_k = tl.load(K + across * k_token + down, mask=across < count, other=0.0)
    next_v = tl.load(V + across * v_token + down, mask=across < count, other=0.0)
    next_lr = tl.load(LR + slot * lr_token, mask=slot < count, other=0.0)
    for index in range(tl.cdiv(length, SIZE)):
        if SAVES and index % group == 0:
            saved = program * num_saved + index // group
            tl.store(SAVED_WEIGHT + saved * WIDTH * WIDTH + square, weight)
            tl.store(SAVED_BIAS + saved * WIDTH + down, bias)
        num_real = count
        q, k, v, lr = next_q, next_k, next_v.to(tl.float32), next_lr.to(tl.float32)
        # The next mini-batch is on its way while this one is computed.
        Q += SIZE * q_token
        K += SIZE * k_token
        V += SIZE * v_token
        LR += SIZE * lr_token
        count = tl.minimum(SIZE, length - (index + 1) * SIZE)
        next_q = tl.load(Q + across * q_token + down, mask=across < count, other=0.0)
        next_k = tl.load(K + across * k_token + down, mask=across < count, other=0.0)
        next_v = tl.load(V + across * v_token + down, mask=across < count, other=0.0)
        next_lr = tl.load(LR + slot * lr_token, mask=slot < count, other=0.0)
        if MODE == "ieee":
            q, k = q.to(tl.float32), k.to(tl.float32)

        start = tl.zeros([WIDTH, BLOCK], tl.float32) + bias
        z = matmul_add(start, weight, k, MODE)
        gradient, _, _ = norm_l2_gradient(z, v - k.to(tl.float32), gamma, beta, WIDTH, 0)
        g = -lr[None, :] * gradient
        # [key, query]
        scores = matmul(tl.trans(k), q, MODE) + 1.0
        scores = tl.where(slot[:, None] <= across, scores * scale[None, :], 0.0)
        z = matmul_add(matmul_add(start, weight, q, MODE), g, scores, MODE)
        normal, _ = normalize(z, WIDTH, 0)
        out = q.to(tl.float32) + normal * gamma + beta
        at = across * (num_heads * WIDTH) + down
        tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=across < num_real)
        OUT += SIZE * num_heads * WIDTH
        # A tail is not folded.
        g *= tl.where(num_real == SIZE, last_scale, 0.0)
        weight = matmul_add(weight, g, tl.trans(k), MODE)
        bias += tl.sum(g, axis=1, keep_dims=True)

    tl.store(LAST_WEIGHT + program * WIDTH * WIDTH + square, tl.trans(weight))
    tl.store(LAST_BIAS + program * WIDTH + down, bias)


def forward(
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    *,
    save: bool,
    mode: str | None = None,
    launch: Launch | None = None,
) -> Forward:
    """The core contract's forward (see ``operator.py``), causal.

    Args:
        save: whether to keep checkpoints, for :func:`~ttt_adapt.kernels.ttt_linear.backward.backward`.
        mode: how to multiply (see ``triton_support.matmul``); by default in float32's accuracy.
        launch: warps and stages; by default chosen by the head width.
    """
    q, k, v, lr = tokens
    batch, num_tokens, heads, width = q.shape
    size = shared.token_scale.shape[0]
    group = group_of(width, size)
    num_saved = -(-num_tokens // (size * group)) if save else 1
    weight, bias = weights
    # Beyond a row's length nothing is written, and what is there must be finite.
    create = torch.empty if lengths is None else torch.zeros
    out = create(q.shape, dtype=stored_dtype(q.dtype), device=q.device)
    last_weight = weight.new_empty(batch, heads, width, width)
    last_bias = bias.new_empty(batch, heads, width)
    saved_weight = weight.new_empty(batch, heads, num_saved, width, width) if save else last_weight
    saved_bias = bias.new_empty(batch, heads, num_saved, width) if save else last_bias
    mode = mode or product_mode(q.device)
    chosen = launch or crowded(launch_of(width, mode), batch * heads, q.device)
    with fitting("ttt_linear", q, size):
        forward_kernel[(batch * heads,)](
            q, k, v, lr,
            *shared,
            weight, bias, q if lengths is None else lengths,
            out, last_weight, last_bias, saved_weight, saved_bias,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *lr.stride(),
            *weight.stride()[:2], *bias.stride()[:2],
            num_tokens, heads, num_saved, group,
            SIZE=size, BLOCK=block_of(size), WIDTH=width,
            MODE=mode, RAGGED=lengths is not None, SAVES=save,
            **chosen.options(),
        )  # fmt: skip
    checkpoints = (saved_weight, saved_bias) if save else None
    return Forward(out.to(q.dtype), (last_weight, last_bias), checkpoints)
