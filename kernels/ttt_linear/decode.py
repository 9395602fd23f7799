"""TTT-Linear for one token in Triton: weights and open tokens are read once, nothing waits.

Shape legend: B rows, H heads, D head width, b tokens in a mini-batch.
"""

import torch
import triton
import triton.language as tl

from ttt_adapt.kernels.inner_loop.models import Shared, Tokens
from ttt_adapt.kernels.inner_loop.state import FastWeightState
from ttt_adapt.kernels.inner_loop.triton_support import (
    Launch,
    dense_from,
    fitting,
    norm_l2_gradient,
    normalize,
    stored_dtype,
)


def launch_of(width: int) -> Launch:
    """The weights take D·D / (32 · warps) registers of each thread, all loaded at once."""
    return Launch({32: 2, 64: 4, 128: 8}[width])


@triton.jit
def decode_kernel(
    Q: tl.tensor, K: tl.tensor, V: tl.tensor, LR: tl.tensor,
    SCALE: tl.tensor, LN_WEIGHT: tl.tensor, LN_BIAS: tl.tensor,
    WEIGHT: tl.tensor, BIAS: tl.tensor, KEYS: tl.tensor, GRADIENTS: tl.tensor, NUM_OPEN: tl.tensor,
    OUT: tl.tensor, NEW_WEIGHT: tl.tensor, NEW_BIAS: tl.tensor, NEW_KEYS: tl.tensor,
    NEW_GRADIENTS: tl.tensor, NEW_NUM_OPEN: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_head: tl.tensor, lr_row: tl.tensor, lr_head: tl.tensor,
    weight_row: tl.tensor, weight_head: tl.tensor, bias_row: tl.tensor, bias_head: tl.tensor,
    keys_row: tl.tensor, keys_head: tl.tensor, grads_row: tl.tensor, grads_head: tl.tensor,
    num_heads: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, head = program // num_heads, program % num_heads
    position = tl.load(NUM_OPEN + row).to(tl.int32)
    slot = tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, WIDTH)[:, None]
    square = down * WIDTH + dim
    gamma = tl.load(LN_WEIGHT + head * WIDTH + dim).to(tl.float32)
    beta = tl.load(LN_BIAS + head * WIDTH + dim).to(tl.float32)
    scale = tl.load(SCALE + position).to(tl.float32)
    lr = tl.load(LR + row * lr_row + head * lr_head).to(tl.float32)
    q = tl.load(Q + row * q_row + head * q_head + dim).to(tl.float32)
    k = tl.load(K + row * k_row + head * k_head + dim).to(tl.float32)
    v = tl.load(V + row * v_row + head * v_head + dim).to(tl.float32)
    # Upright copies, to be multiplied with the weight's rows.
    q_down = tl.load(Q + row * q_row + head * q_head + down).to(tl.float32)
    k_down = tl.load(K + row * k_row + head * k_head + down).to(tl.float32)
    weight = tl.load(WEIGHT + row * weight_row + head * weight_head + square)
    bias = tl.load(BIAS + row * bias_row + head * bias_head + dim)
    # Slots from the open ones on are zero.
    opened = slot < position
    at = slot * WIDTH + dim
    keys = tl.load(KEYS + row * keys_row + head * keys_head + at, mask=opened, other=0.0)
    grads = tl.load(GRADIENTS + row * grads_row + head * grads_head + at, mask=opened, other=0.0)

    z = tl.sum(weight * k_down, axis=0, keep_dims=True) + bias
    gradient, _, _ = norm_l2_gradient(z, v - k, gamma, beta, WIDTH, 1)
    keys = tl.where(slot == position, k, keys)
    grads = tl.where(slot == position, gradient * lr, grads)
    # Slots that nobody has taken add nothing: their gradients are zero.
    scores = (tl.sum(keys * q, axis=1, keep_dims=True) + 1.0) * scale
    z = tl.sum(weight * q_down, axis=0, keep_dims=True) + bias
    z -= tl.sum(scores * grads, axis=0, keep_dims=True)
    normal, _ = normalize(z, WIDTH, 1)
    out = q + normal * gamma + beta
    tl.store(OUT + program * WIDTH + dim, out.to(OUT.dtype.element_ty))

    full = position + 1 == SIZE
    if full:
        # Summed by themselves: next to the weights each would lose digits.
        total = k_down * (gradient * lr)
        for open_slot in range(position):
            key_at = KEYS + row * keys_row + head * keys_head + open_slot * WIDTH
            grad_at = GRADIENTS + row * grads_row + head * grads_head + open_slot * WIDTH
            total += tl.load(key_at + down) * tl.load(grad_at + dim)
        weight -= scale * total
        bias -= scale * tl.sum(grads, axis=0, keep_dims=True)
        keys = tl.zeros_like(keys)
        grads = tl.zeros_like(grads)
    tl.store(NEW_WEIGHT + program * WIDTH * WIDTH + square, weight)
    tl.store(NEW_BIAS + program * WIDTH + dim, bias)
    exists = slot < SIZE
    tl.store(NEW_KEYS + program * SIZE * WIDTH + at, keys, mask=exists)
    tl.store(NEW_GRADIENTS + program * SIZE * WIDTH + at, grads, mask=exists)
    if head == 0:
        tl.store(NEW_NUM_OPEN + row, tl.where(full, 0, position + 1).to(tl.int64))


def decode(
    tokens: Tokens, shared: Shared, state: FastWeightState, *, launch: Launch | None = None
) -> tuple[torch.Tensor, FastWeightState]:
    """One token for every row: :data:`~ttt_adapt.kernels.inner_loop.operator.Decode`.

    Args:
        tokens: ``[B, 1, H, D]``, lr ``[B, 1, H]``.
        state: float32, of B rows, each at its own offset.
    """
    q, k, v = (dense_from(tensor, 3) for tensor in tokens[:3])
    batch, _, heads, width = q.shape
    size = state.mini_batch_size
    weight, keys, gradients = (dense_from(tensor, 2) for tensor in (state.weights[0], *state.slots))
    bias, num_open = dense_from(state.weights[1], 2), state.num_open.contiguous()
    out = q.new_empty(q.shape, dtype=stored_dtype(q.dtype))
    new = state.map(lambda tensor: tensor.new_empty(tensor.shape))
    chosen = launch or launch_of(width)
    with fitting("ttt_linear", q, size):
        decode_kernel[(batch * heads,)](
            q, k, v, tokens.lr,
            *(tensor.contiguous() for tensor in shared),
            weight, bias, keys, gradients, num_open,
            out, *new.weights, *new.slots, new.num_open,
            *(step for tensor in (q, k, v) for step in (tensor.stride(0), tensor.stride(2))),
            tokens.lr.stride(0), tokens.lr.stride(2),
            *(step for tensor in (weight, bias, keys, gradients) for step in tensor.stride()[:2]),
            heads,
            SIZE=size, BLOCK=triton.next_power_of_2(size), WIDTH=width,
            **chosen.options(),
        )  # fmt: skip
    return out.to(q.dtype), new
