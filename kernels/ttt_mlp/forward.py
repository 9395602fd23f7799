"""TTT-MLP forward in Triton: one program per (row, head), one sweep over the weights per mini-batch.

W1 and W2 in float32 outgrow a program's registers, so they stay in global memory (the L2 cache, in
practice) and are streamed in tiles of the hidden width, changed in place. With g2 known before a
sweep, every tile gives the queries' answers, is updated, and gives its part of the *next*
mini-batch's z2, from which the next g2 follows: each weight is read and written once per mini-batch.
The equations are those of ``MlpModel`` in ``kernels/inner_loop/models.py``.

Threads of a program read tiles that others of it wrote. Nothing orders that but a barrier, so each
tile is loaded by all before it is stored by any (a barrier within the tile), and stored by all before
the next sweep (a barrier after the loop). It also keeps the pipeliner from loading a tile ahead of
its store.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch (in
blocks of N), J tile of F, S saved states.
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
    norm_l2_gradient,
    normalize,
    product_mode,
    stored_dtype,
)

SLOPE = tl.constexpr((2.0 / torch.pi) ** 0.5)
CUBIC = tl.constexpr(0.044715)


class Saved(NamedTuple):
    """The weights at the start of every ``group``-th mini-batch, float32 ``[B, H, S, ...]`` each."""

    weights: Tensors
    group: int

    @property
    def num_states(self) -> int:
        """S."""
        return int(self.weights[0].shape[2])


def hidden_tile(width: int, hidden: int) -> int:
    """Hidden units streamed at a time: a power of two that divides F, at most 2048 weights a layer."""
    return min(hidden & -hidden, 2048 // width)


def launch_of(width: int) -> Launch:
    """What spills few registers, compiled for compute capability 9.0."""
    # No pipelining: loads may not overtake the stores of the sweep before.
    return Launch(num_warps=8 if width == 128 else 4, num_stages=1)


def output_like(tokens: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Where a kernel writes one value for each of ``tokens``; zero where it may not write."""
    new = torch.empty_like if lengths is None else torch.zeros_like
    dtype = stored_dtype(tokens.dtype)
    return new(tokens, dtype=dtype, memory_format=torch.contiguous_format)


def run_forward(
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    group: int,
) -> tuple[torch.Tensor, Tensors, Saved]:
    """Outputs, the weights after the last whole mini-batch, and states to go backward from.

    Args:
        tokens: contiguous; lr float32. shared: contiguous float32.
        weights: float32 ``[B, H, ...]``, not changed.
        group: mini-batches from one saved state to the next; 0 saves none.
    """
    q = tokens.q
    batch, num_tokens, heads, _ = q.shape
    size = shared.token_scale.shape[0]
    out = output_like(q, lengths)
    ended = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in weights)
    num_saved = triton.cdiv(num_tokens, size * group) if group else 1
    saved = Saved(
        tuple(w.new_empty(batch, heads, num_saved, *w.shape[2:]) if group else w for w in ended),
        max(1, group),
    )
    _launch(tokens, shared, ended, lengths, saved, out, out, (0, num_tokens), save=group > 0)
    return out.to(q.dtype), ended, saved


def replay(
    tokens: Tokens,
    shared: Shared,
    states: Tensors,
    lengths: torch.Tensor | None,
    first: int,
    z2: torch.Tensor,
    y2: torch.Tensor,
) -> None:
    """Forward again through mini-batches from token ``first`` on, keeping what backward needs.

    Args:
        states: float32 ``[B, H, G, ...]``, the first given; the others are written.
        z2, y2: float32 ``[B, H, G, N, D]``, written: keys' and queries' outputs before the layer norm.
    """
    end = first + states[0].shape[2] * shared.token_scale.shape[0]
    last = min(end, tokens.q.shape[1])
    _launch(tokens, shared, states, lengths, Saved(states, 1), z2, y2, (first, last))


def _launch(
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    saved: Saved,
    out: torch.Tensor,
    y2: torch.Tensor,
    bounds: tuple[int, int],
    save: bool | None = None,
) -> None:
    batch, num_tokens, heads, width = tokens.q.shape
    size, hidden = shared.token_scale.shape[0], weights[0].shape[-1]
    launch = launch_of(width)
    with fitting("ttt_mlp", tokens.q, size):
        _forward_kernel[(batch * heads,)](
            *tokens, *shared, *weights, out, y2, *saved.weights,
            tokens.q if lengths is None else lengths, *bounds, num_tokens, heads,
            saved.group, saved.num_states,
            SIZE=size, N=block_of(size), D=width, F=hidden, J=hidden_tile(width, hidden),
            MODE=product_mode(tokens.q.device), RAGGED=lengths is not None,
            SAVE=bool(save), REPLAY=save is None,
            **launch.options(),
        )  # fmt: skip


@triton.jit
def gelu_gate(x: tl.tensor) -> tl.tensor:
    """σ and ``u'`` of tanh-GELU, ``gelu(x) = x σ(2 u)``: for ``tanh(u) = 2 σ(2 u) − 1``."""
    u = SLOPE * x * (1.0 + CUBIC * x * x)
    gate = tl.sigmoid(tl.minimum(tl.maximum(2.0 * u, -80.0), 80.0))
    return gate, SLOPE * (1.0 + 3.0 * CUBIC * x * x)


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    gate, _ = gelu_gate(x)
    return x * gate


@triton.jit
def gelu_and_slope(x: tl.tensor) -> tl.tensor:
    """``gelu(x)`` and ``gelu'(x)``."""
    gate, rise = gelu_gate(x)
    return x * gate, gate + 2.0 * gate * (1.0 - gate) * x * rise


@triton.jit
def load_tokens(
    tensor: tl.tensor,
    start: tl.tensor,
    stride: tl.tensor,
    position: tl.tensor,
    real: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """``[N, D]`` from a row and head's first element on, in its dtype; zero from ``real`` on."""
    at = start + position[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(tensor + at, mask=position[:, None] < real, other=0.0)


@triton.jit
def start_z2(
    k: tl.tensor, w1: tl.tensor, b1: tl.tensor, w2: tl.tensor,
    N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr, MODE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``gelu(k W1 + b1) W2``, ``[N, D]``."""
    unit, wide = tl.arange(0, J), tl.arange(0, D)
    z2 = tl.zeros((N, D), dtype=tl.float32)
    for first in range(0, F, J):
        at_w1 = wide[:, None] * F + first + unit[None, :]
        at_w2 = (first + unit[:, None]) * D + wide[None, :]
        w1_DJ, b1_J = tl.load(w1 + at_w1), tl.load(b1 + first + unit)
        w2_JD = tl.load(w2 + at_w2)
        z2 += matmul(gelu(matmul(k, w1_DJ, MODE) + b1_J[None, :]), w2_JD, MODE)
    return z2


@triton.jit
def sweep(
    q: tl.tensor, k: tl.tensor, next_k: tl.tensor, g2: tl.tensor, scores: tl.tensor, fold: tl.tensor, changes: tl.tensor,
    w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, to_w1: tl.tensor, to_b1: tl.tensor, to_w2: tl.tensor, copy_w1: tl.tensor, copy_b1: tl.tensor,
    copy_w2: tl.tensor, copies: tl.tensor,
    N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr, MODE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """All that one mini-batch does with W1, b1 and W2.

    Args:
        scores: ``(q kᵀ + 1) ∘ M``, ``[N, N]``.
        fold: by what the summed gradients change the weights; 0 for a mini-batch that stays open.
        to_w1, to_b1, to_w2: where the changed weights go if ``changes``; may be where they were.
        copy_w1, copy_b1, copy_w2: where the unchanged ones go if ``copies``.

    Returns:
        ``h W2 [N, D]``, ``h x2ᵀ [N, N]``, and of the changed weights ``gelu(next_k W1 + b1) W2``.
    """
    unit, wide = tl.arange(0, J), tl.arange(0, D)
    y2 = tl.zeros((N, D), dtype=tl.float32)
    products = tl.zeros((N, N), dtype=tl.float32)
    next_z2 = tl.zeros((N, D), dtype=tl.float32)
    for first in range(0, F, J):
        at_w1 = wide[:, None] * F + first + unit[None, :]
        at_w2 = (first + unit[:, None]) * D + wide[None, :]
        w1_DJ, b1_J = tl.load(w1 + at_w1), tl.load(b1 + first + unit)
        w2_JD = tl.load(w2 + at_w2)
        x2, slope = gelu_and_slope(matmul(k, w1_DJ, MODE) + b1_J[None, :])
        g1 = matmul(g2, tl.trans(w2_JD), MODE) * slope
        y1 = matmul(q, w1_DJ, MODE) + b1_J[None, :] - matmul(scores, g1, MODE)
        h = gelu(y1)
        products += matmul(h, tl.trans(x2), MODE)
        y2 += matmul(h, w2_JD, MODE)
        if copies:
            tl.store(copy_w1 + at_w1, w1_DJ)
            tl.store(copy_b1 + first + unit, b1_J)
            tl.store(copy_w2 + at_w2, w2_JD)
        w1_DJ -= fold * matmul(tl.trans(k), g1, MODE)
        b1_J -= fold * tl.sum(g1, axis=0)
        w2_JD -= fold * matmul(tl.trans(x2), g2, MODE)
        next_z2 += matmul(gelu(matmul(next_k, w1_DJ, MODE) + b1_J[None, :]), w2_JD, MODE)
        tl.debug_barrier()  # in place: no thread stores what another has yet to load
        if changes:
            tl.store(to_w1 + at_w1, w1_DJ)
            tl.store(to_b1 + first + unit, b1_J)
            tl.store(to_w2 + at_w2, w2_JD)
    tl.debug_barrier()  # the next sweep's loads see these stores
    return y2, products, next_z2


@triton.jit(do_not_specialize=["begin", "end", "num_tokens", "group", "num_saved"])
def _forward_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, lr_ptr: tl.tensor,
    scale_ptr: tl.tensor, ln_weight_ptr: tl.tensor, ln_bias_ptr: tl.tensor,
    w1: tl.tensor, b1: tl.tensor, w2: tl.tensor, b2: tl.tensor, out_ptr: tl.tensor, y2_ptr: tl.tensor,
    saved_w1: tl.tensor, saved_b1: tl.tensor, saved_w2: tl.tensor, saved_b2: tl.tensor,
    lengths_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, num_tokens: tl.tensor,
    heads: tl.tensor, group: tl.tensor, num_saved: tl.tensor,
    SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, J: tl.constexpr,
    MODE: tl.constexpr, RAGGED: tl.constexpr, SAVE: tl.constexpr, REPLAY: tl.constexpr,
) -> None:  # fmt: skip
    """Outputs and changed weights, or, to ``REPLAY``, z2 and y2 and each mini-batch's weights."""
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
    visible = tl.where(position[:, None] >= position[None, :], scale[:, None], 0.0)
    stride = tl.full((), D, tl.int64) * heads
    start = row * num_tokens * stride + head * D
    # In replay the states of a program's mini-batches lie one after the other.
    state = program
    if REPLAY:
        state = program * num_saved
    b2_D = tl.load(b2 + state * D + wide)

    k = load_tokens(k_ptr, start + begin * stride, stride, position, length - begin, D)
    z2 = tl.zeros((N, D), dtype=tl.float32)
    if begin < length:  # in replay a row that has ended has no weights here
        z2 = start_z2(k, w1 + state * D * F, b1 + state * F, w2 + state * F * D, N, D, F, J, MODE)
    for first in range(begin, length, SIZE):
        real = tl.minimum(length - first, SIZE)
        at = start + first * stride
        q = load_tokens(q_ptr, at, stride, position, real, D)
        k = load_tokens(k_ptr, at, stride, position, real, D)
        v = load_tokens(v_ptr, at, stride, position, real, D).to(tl.float32)
        at_lr = (row * num_tokens + first + position) * heads + head
        lr = tl.load(lr_ptr + at_lr, mask=position < real, other=0.0)
        next_k = load_tokens(k_ptr, at + SIZE * stride, stride, position, length - first - SIZE, D)
        z2 += b2_D[None, :]
        g2, _, _ = norm_l2_gradient(z2, v - k.to(tl.float32), ln_weight, ln_bias, D, 1)
        g2 *= lr[:, None]
        scores = (matmul(q, tl.trans(k), MODE) + 1.0) * visible
        changes = real == SIZE
        copies = False
        copy, after = state, state
        if REPLAY:
            changes = first + SIZE < length
            after = state + 1
            at_kept = state * N * D + position[:, None] * D + wide[None, :]
            tl.store(out_ptr + at_kept, z2)
        elif SAVE:
            copies = (first // SIZE) % group == 0
            copy = program * num_saved + first // SIZE // group
            if copies:
                tl.store(saved_b2 + copy * D + wide, b2_D)
        fold = tl.where(real == SIZE, last_scale, 0.0)
        y2, products, z2 = sweep(
            q, k, next_k, g2, scores, fold, changes,
            w1 + state * D * F, b1 + state * F, w2 + state * F * D,
            w1 + after * D * F, b1 + after * F, w2 + after * F * D,
            saved_w1 + copy * D * F, saved_b1 + copy * F, saved_w2 + copy * F * D, copies,
            N, D, F, J, MODE,
        )  # fmt: skip
        y2 += b2_D[None, :] - matmul((products + 1.0) * visible, g2, MODE)
        b2_D -= fold * tl.sum(g2, axis=0)
        if REPLAY:
            tl.store(y2_ptr + at_kept, y2)
            if changes:
                tl.store(b2 + after * D + wide, b2_D)
        else:
            normal, _ = normalize(y2, D, 1)
            out = q.to(tl.float32) + normal * ln_weight + ln_bias
            at_out = at + position[:, None] * stride + wide[None, :]
            mask = position[:, None] < real
            tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=mask)
        state = after
    if not REPLAY:
        tl.store(b2 + program * D + wide, b2_D)
