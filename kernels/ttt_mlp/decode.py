"""TTT-MLP decode in Triton: one token of every row, from any offset, without waiting for the GPU.

One program per (row, head) reads the weights and the open tokens' slots, answers the token, and writes
the state after it: the token in its slot, or, when that was the last one free, the folded weights and
empty slots. As everywhere a state handed in is left as it was, so that it may be used again.

Shape legend: B rows, H heads, D head width, F hidden width, b tokens in a mini-batch (in blocks of N),
J tile of F.
"""

import torch
import triton
import triton.language as tl

from ttt_adapt.kernels.inner_loop.models import Shared, Tokens
from ttt_adapt.kernels.inner_loop.state import FastWeightState
from ttt_adapt.kernels.inner_loop.triton_support import (
    block_of,
    fitting,
    norm_l2_gradient,
    normalize,
)
from ttt_adapt.kernels.ttt_mlp.forward import (
    gelu,
    gelu_and_slope,
    hidden_tile,
    launch_of,
    output_like,
)


def decode(
    tokens: Tokens, shared: Shared, state: FastWeightState
) -> tuple[torch.Tensor, FastWeightState]:
    """``complete_open`` of :mod:`ttt_adapt.kernels.inner_loop.operator` for one token.

    Args:
        tokens: ``[B, 1, H, D]``, float16, bfloat16 or float32; lr ``[B, 1, H]``.
        state: float32 weights and slots.

    Returns:
        ``[B, 1, H, D]`` in q's dtype and the state after it.
    """
    q, k, v, lr = tokens.map(torch.Tensor.contiguous)
    batch, _, heads, width = q.shape
    size, hidden = state.mini_batch_size, state.weights[0].shape[-1]
    old = FastWeightState(
        tuple(tensor.float().contiguous() for tensor in state.weights),
        tuple(tensor.float().contiguous() for tensor in state.slots),
        state.num_open.contiguous(),
    )
    new = old.map(torch.empty_like)
    out = output_like(q, None)
    launch = launch_of(width)
    with fitting("ttt_mlp", q, size):
        _decode_kernel[(batch * heads,)](
            q, k, v, lr, *(tensor.contiguous() for tensor in shared),
            *old.weights, *old.slots, old.num_open, *new.weights, *new.slots, new.num_open,
            out, heads,
            SIZE=size, N=block_of(size), D=width, F=hidden, J=hidden_tile(width, hidden),
            **launch.options(),
        )  # fmt: skip
    return out.to(q.dtype), new


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, lr_ptr: tl.tensor, scale_ptr: tl.tensor, ln_weight_ptr: tl.tensor,
    ln_bias_ptr: tl.tensor,
    w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, b2: tl.tensor, k_slot: tl.tensor, g1_slot: tl.tensor, x2_slot: tl.tensor, g2_slot: tl.tensor,
    num_open_ptr: tl.tensor,
    to_w1: tl.tensor, to_b1: tl.tensor, to_w2: tl.tensor, to_b2: tl.tensor,
    to_k_slot: tl.tensor, to_g1_slot: tl.tensor, to_x2_slot: tl.tensor, to_g2_slot: tl.tensor, to_num_open: tl.tensor,
    out_ptr: tl.tensor, heads: tl.tensor,
    SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    slot, unit, wide = tl.arange(0, N), tl.arange(0, J), tl.arange(0, D)
    ln_weight = tl.load(ln_weight_ptr + head * D + wide)[None, :].to(tl.float32)
    ln_bias = tl.load(ln_bias_ptr + head * D + wide)[None, :].to(tl.float32)
    num_open = tl.load(num_open_ptr + row)
    after = num_open + 1
    is_new = slot == num_open
    full = after == SIZE
    scale = tl.load(scale_ptr + num_open).to(tl.float32)
    fold = tl.where(full, tl.load(scale_ptr + SIZE - 1).to(tl.float32), 0.0)
    visible = tl.where(slot <= num_open, scale, 0.0)
    q = tl.load(q_ptr + program * D + wide).to(tl.float32)
    k = tl.load(k_ptr + program * D + wide).to(tl.float32)
    v = tl.load(v_ptr + program * D + wide).to(tl.float32)
    lr = tl.load(lr_ptr + program).to(tl.float32)
    b2_D = tl.load(b2 + program * D + wide)
    w1 += program * D * F
    b1 += program * F
    w2 += program * F * D
    to_w1 += program * D * F
    to_b1 += program * F
    to_w2 += program * F * D
    in_block = slot[:, None] < SIZE
    at_narrow = program * SIZE * D + slot[:, None] * D + wide[None, :]
    at_hidden = program * SIZE * F + slot[:, None] * F + unit[None, :]

    z2 = b2_D
    for first in range(0, F, J):
        w1_DJ = tl.load(w1 + wide[:, None] * F + first + unit[None, :])
        w2_JD = tl.load(w2 + (first + unit[:, None]) * D + wide[None, :])
        z1 = tl.sum(k[:, None] * w1_DJ, axis=0) + tl.load(b1 + first + unit)
        z2 += tl.sum(gelu(z1)[:, None] * w2_JD, axis=0)
    e, _, _ = norm_l2_gradient(z2[None, :], (v - k)[None, :], ln_weight, ln_bias, D, 1)
    g2 = e * lr

    keys = tl.load(k_slot + at_narrow, mask=in_block, other=0.0)
    keys = tl.where(is_new[:, None], k[None, :], keys)
    g2_ND = tl.load(g2_slot + at_narrow, mask=in_block, other=0.0)
    g2_ND = tl.where(is_new[:, None], g2, g2_ND)
    scores = (tl.sum(keys * q[None, :], axis=1) + 1.0) * visible
    products = tl.zeros((N,), dtype=tl.float32)
    y2 = b2_D
    for first in range(0, F, J):
        at_w1 = wide[:, None] * F + first + unit[None, :]
        at_w2 = (first + unit[:, None]) * D + wide[None, :]
        w1_DJ, b1_J = tl.load(w1 + at_w1), tl.load(b1 + first + unit)
        w2_JD = tl.load(w2 + at_w2)
        x2, slope = gelu_and_slope(tl.sum(k[:, None] * w1_DJ, axis=0) + b1_J)
        g1 = tl.sum(w2_JD * g2, axis=1) * slope
        g1_NJ = tl.load(g1_slot + at_hidden + first, mask=in_block, other=0.0)
        g1_NJ = tl.where(is_new[:, None], g1[None, :], g1_NJ)
        x2_NJ = tl.load(x2_slot + at_hidden + first, mask=in_block, other=0.0)
        x2_NJ = tl.where(is_new[:, None], x2[None, :], x2_NJ)
        y1 = tl.sum(q[:, None] * w1_DJ, axis=0) + b1_J - tl.sum(scores[:, None] * g1_NJ, axis=0)
        h = gelu(y1)
        products += tl.sum(x2_NJ * h[None, :], axis=1)
        y2 += tl.sum(h[:, None] * w2_JD, axis=0)
        if full:
            w1_DJ -= fold * tl.dot(tl.trans(keys), g1_NJ, input_precision="ieee")
            b1_J -= fold * tl.sum(g1_NJ, axis=0)
            w2_JD -= fold * tl.dot(tl.trans(x2_NJ), g2_ND, input_precision="ieee")
        tl.store(to_w1 + at_w1, w1_DJ)
        tl.store(to_b1 + first + unit, b1_J)
        tl.store(to_w2 + at_w2, w2_JD)
        tl.store(to_g1_slot + at_hidden + first, tl.where(full, 0.0, g1_NJ), mask=in_block)
        tl.store(to_x2_slot + at_hidden + first, tl.where(full, 0.0, x2_NJ), mask=in_block)
    shares = (products + 1.0) * visible
    y2 -= tl.sum(shares[:, None] * g2_ND, axis=0)
    normal, _ = normalize(y2[None, :], D, 1)
    out = q[None, :] + normal * ln_weight + ln_bias
    tl.store(out_ptr + program * D + wide[None, :], out.to(out_ptr.dtype.element_ty))
    tl.store(to_b2 + program * D + wide, b2_D - fold * tl.sum(g2_ND, axis=0))
    tl.store(to_k_slot + at_narrow, tl.where(full, 0.0, keys), mask=in_block)
    tl.store(to_g2_slot + at_narrow, tl.where(full, 0.0, g2_ND), mask=in_block)
    if head == 0:
        tl.store(to_num_open + row, tl.where(full, 0, after))
