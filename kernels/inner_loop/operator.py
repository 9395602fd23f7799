"""From an aligned core to the whole operator: any offset, masks, packed sequences, final states.

A *core* is a backend's fast path: left-aligned rows that begin at a mini-batch's first token. What
comes before and after (completing an open mini-batch, taking up the last one's tokens) is the same
for all backends and inner models, and lies here.

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch.
"""

from collections.abc import Callable

import torch

from ttt_adapt.kernels.inner_loop.models import InnerModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.rows import Rows, valid_tokens
from ttt_adapt.kernels.inner_loop.state import FastWeightState

Core = Callable[[Tokens, Shared, Tensors, torch.Tensor | None, bool], tuple[torch.Tensor, Tensors]]
"""``core(tokens, shared, weights, lengths, causal) -> (out, weights)``.

``tokens.q, .k, .v [B, T, H, D]`` in any float dtype, ``.lr [B, T, H]``; ``weights`` float32 (float64
for float64 inputs) ``[B, H, ...]``; ``lengths`` int64 ``[B]``, or ``None`` for T. Returns
``out [B, T, H, D]`` in q's dtype (whatever it likes beyond a row's length, but finite) and, in the
weights' dtype, the weights at the start of each row's open mini-batch; when not causal, after the
row's last token. Differentiable in everything but lengths; inputs are not changed.
"""

Decode = Callable[[Tokens, Shared, FastWeightState], tuple[torch.Tensor, FastWeightState]]
"""``decode(tokens, shared, state) -> (out, state)``: one token (T = 1) for every row, at any offset.

What :func:`complete_open` gives for it, in one kernel and without waiting for the device; not
differentiable; inputs are not changed.
"""


def run_operator(
    inner: InnerModel,
    core: Core,
    tokens: Tokens,
    shared: Shared,
    state: FastWeightState | Tensors,
    *,
    rows: Rows | None,
    causal: bool,
    output_final_state: bool,
    decode: Decode | None = None,
) -> tuple[torch.Tensor, FastWeightState | None]:
    """The operator on checked inputs; ``state`` has one row for each row (of ``rows``, if given)."""
    if rows is not None:
        tokens = tokens.map(rows.gather)
    lengths = rows.lengths if rows is not None else None
    weights, carried = (
        (state.weights, state) if isinstance(state, FastWeightState) else (state, None)
    )
    single = rows is None and causal and tokens.q.shape[1] == 1
    if decode is not None and carried is not None and single:
        inputs = (*tokens, *shared, *carried.weights, *carried.slots)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            answer, after = decode(tokens, shared, carried)
            return answer, after if output_final_state else None
    if carried is not None and bool((carried.num_open > 0).any()):
        out, final = _continue(inner, core, tokens, shared, carried, lengths, output_final_state)
    else:
        out, ended = core(tokens, shared, weights, lengths, causal)
        final = None
        if output_final_state:
            final = _take_up(inner, tokens, shared, ended, lengths, causal)
    return (out if rows is None else rows.scatter(out)), final


def complete_open(
    inner: InnerModel,
    tokens: Tokens,
    shared: Shared,
    state: FastWeightState,
    num_new: torch.Tensor,
) -> tuple[torch.Tensor, FastWeightState]:
    """Add tokens to the open mini-batch, as many as fit; fold it where it becomes full.

    Args:
        tokens: ``[B, n, H, D]``, left-aligned, ``n <= b``.
        num_new: int64 ``[B]``: how many of them belong to the row; ``num_open + num_new <= b``.

    Returns:
        ``[B, n, H, D]`` outputs (meaningless beyond ``num_new``) and the state after them.
    """
    size, dtype = state.mini_batch_size, state.weights[0].dtype
    token_scale, ln_weight, ln_bias = shared.to(dtype)
    q, k, v, lr = tokens.map(lambda tensor: tensor.to(dtype).transpose(1, 2))
    new = inner.slots(state.weights, k, inner.target(k, v), lr, ln_weight, ln_bias)
    num_tokens = q.shape[2]
    # Slot p of a row holds its new token p - num_open, if it has one.
    slot = torch.arange(size, device=q.device)
    source = slot - state.num_open[:, None]
    arrives = (source >= 0) & (source < num_new[:, None])
    index = source.clamp(0, num_tokens - 1)
    slots = tuple(
        torch.where(arrives[:, None, :, None], _pick(fresh, index), old)
        for fresh, old in zip(new, state.slots, strict=True)
    )
    position = state.num_open[:, None] + torch.arange(num_tokens, device=q.device)
    visible = token_scale[position.clamp(max=size - 1)][..., None] * (slot <= position[..., None])
    z = inner.outputs(state.weights, slots, visible[:, None], q)
    out = inner.answer(q, z, ln_weight, ln_bias)
    num_open = state.num_open + num_new
    full = num_open == size
    weights = inner.fold(state.weights, slots, token_scale[-1] * full)
    emptied = tuple(slot.masked_fill(full[:, None, None, None], 0.0) for slot in slots)
    after = FastWeightState(weights, emptied, num_open.masked_fill(full, 0))
    return out.transpose(1, 2).to(tokens.q.dtype), after


def _continue(
    inner: InnerModel,
    core: Core,
    tokens: Tokens,
    shared: Shared,
    state: FastWeightState,
    lengths: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, FastWeightState | None]:
    """Complete the open mini-batches, then let the core go on where each row's next one begins."""
    num_tokens, size, device = tokens.q.shape[1], state.mini_batch_size, tokens.q.device
    if lengths is None:
        lengths = torch.full_like(state.num_open, num_tokens)
    num_new = torch.minimum(lengths, (size - state.num_open) % size)
    ahead = min(num_tokens, size)
    first = tokens.map(lambda tensor: tensor[:, :ahead])
    out, state = complete_open(inner, first, shared, state, num_new)
    rest = lengths - num_new
    longest = int(rest.max())
    if longest == 0:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_tokens - ahead))
        return out, state if output_final_state else None
    # Shift each row to the left by what has been consumed of it.
    moved = torch.arange(longest, device=device) + num_new[:, None]
    index = moved.clamp(max=num_tokens - 1)
    tail = tokens.map(lambda tensor: tensor.gather(1, _spread(index, tensor)))
    later, ended = core(tail, shared, state.weights, rest, True)
    token = torch.arange(num_tokens, device=device)
    back = (token - num_new[:, None]).clamp(0, longest - 1)
    padded = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, num_tokens - ahead))
    in_head = (token < num_new[:, None])[..., None, None]
    out = torch.where(in_head, padded, later.gather(1, _spread(back, later)))
    if not output_final_state:
        return out, None
    final = _take_up(inner, tail, shared, ended, rest, causal=True)
    # Rows that ended within their open mini-batch keep the state they had then.
    kept = rest == 0
    merged = FastWeightState(
        final.weights,
        tuple(
            torch.where(kept[:, None, None, None], old, new)
            for old, new in zip(state.slots, final.slots, strict=True)
        ),
        torch.where(kept, state.num_open, final.num_open),
    )
    return out, merged


def _take_up(
    inner: InnerModel,
    tokens: Tokens,
    shared: Shared,
    weights: Tensors,
    lengths: torch.Tensor | None,
    causal: bool,
) -> FastWeightState:
    """The state after rows that began aligned: the open tokens' gradients at the last weights."""
    dtype = weights[0].dtype
    token_scale, ln_weight, ln_bias = shared.to(dtype)
    size, k = token_scale.shape[0], tokens.k
    batch, num_tokens, heads = k.shape[:3]
    if lengths is None:
        lengths = torch.full((batch,), num_tokens, device=k.device, dtype=torch.int64)
    num_open = lengths % size if causal else torch.zeros_like(lengths)
    widest = int(num_open.max())
    widths = inner.slot_widths(weights)
    if widest == 0:
        slots = tuple(weights[0].new_zeros(batch, heads, size, width) for width in widths)
        return FastWeightState(weights, slots, num_open)
    index = (lengths - num_open)[:, None] + torch.arange(widest, device=k.device)
    index = index.clamp(max=num_tokens - 1)
    _, tail_k, tail_v, tail_lr = tokens.map(
        lambda tensor: tensor.gather(1, _spread(index, tensor)).to(dtype).transpose(1, 2)
    )
    target = inner.target(tail_k, tail_v)
    found = inner.slots(weights, tail_k, target, tail_lr, ln_weight, ln_bias)
    real = valid_tokens(num_open, widest)[:, None, :, None]
    slots = tuple(
        torch.nn.functional.pad(torch.where(real, slot, 0.0), (0, 0, 0, size - widest))
        for slot in found
    )
    return FastWeightState(weights, slots, num_open)


def _pick(tensor_BHnW: torch.Tensor, index_Bb: torch.Tensor) -> torch.Tensor:
    heads, width = tensor_BHnW.shape[1], tensor_BHnW.shape[3]
    spread = index_Bb[:, None, :, None].expand(-1, heads, -1, width)
    return tensor_BHnW.gather(2, spread)


def _spread(index_BT: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    shape = (*index_BT.shape, *tensor.shape[2:])
    return index_BT.view(*index_BT.shape, *(1,) * (tensor.ndim - 2)).expand(shape)
