"""The dual form of TTT-MLP in PyTorch, forward; see README.md for the equations.

Per mini-batch only what needs the fast weights is computed, in nine batched products without a copy;
layouts, first-layer scores, learning-rate factors and the output's layer norm are a group's at once.

Shape legend: B rows, T tokens, H heads, N inner models at once (pairs of a row and a head), M
mini-batches, C checkpoints, b tokens in a mini-batch, D head width, F hidden width, E = D + 1.
"""

import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ttt_adapt.kernels.inner_loop.checkpointing import (
    Grouping,
    mini_batch_scales,
    without_padding,
)
from ttt_adapt.kernels.inner_loop.models import Shared, Tensors, Tokens
from ttt_adapt.kernels.ttt_mlp.chunked_backward import backward_block
from ttt_adapt.kernels.ttt_mlp.chunked_group import (
    Block,
    GroupTokens,
    Inputs,
    Kept,
    augmented,
    blocks_of,
    gelu,
    gelu_constant,
    gelu_slope,
    grouping_of,
    normalise,
    normalise_backward,
)


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`; differentiable once.

    Memory beyond inputs and outputs is linear in T with a small factor: backward keeps two tensors of
    q's size in the weights' dtype, and the weights at the start of each group of √M, at most 16, of
    the M mini-batches.
    """
    dtype = weights[0].dtype
    token_scale, ln_weight, ln_bias = shared.to(dtype)
    num_tokens, size = tokens.q.shape[1], token_scale.shape[0]
    # Mini-batches after which weights are folded, for all that is known without looking at lengths.
    closed = num_tokens // size if causal else -(-num_tokens // size)
    if num_tokens < size:
        token_scale, size = token_scale[:num_tokens], num_tokens
    with torch.autocast(tokens.q.device.type, enabled=False):
        grouping = Grouping.of(tokens.q, size)
        visible, fold = mini_batch_scales(token_scale, lengths, grouping, causal=causal)
        lr = without_padding(tokens.lr.to(dtype), lengths)
        if not closed:
            fold = torch.zeros_like(fold)
        inputs = Inputs(*tokens[:3], lr, visible, fold, ln_weight, ln_bias, *weights)
        blocks = blocks_of(inputs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            out, *ended = _ChunkedMlp.apply(blocks, size, closed, *inputs)  # type: ignore[no-untyped-call]
        else:
            out, *ended = _forward(inputs, blocks, size, closed, None)
    return out, tuple(ended)


class _ChunkedMlp(torch.autograd.Function):
    """Keeps the inputs and each block's :class:`Kept`."""

    @staticmethod
    def forward(
        ctx: Any, blocks: list[Block], size: int, closed: int, *tensors: torch.Tensor
    ) -> Tensors:
        inputs, kept = Inputs(*tensors), list[Kept]()
        found = _forward(inputs, blocks, size, closed, kept)
        ctx.blocks, ctx.size, ctx.closed = blocks, size, closed
        ctx.save_for_backward(*inputs, *itertools.chain(*kept))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, num_inputs, num_kept = ctx.saved_tensors, len(Inputs._fields), len(Kept._fields)
        inputs = Inputs(*saved[:num_inputs])
        kept = [
            Kept(*saved[first : first + num_kept])
            for first in range(num_inputs, len(saved), num_kept)
        ]
        with torch.autocast(inputs.q.device.type, enabled=False):
            # Blocks overwrite the gradients of tokens and weights, and add to the others.
            found = Inputs(
                *map(_uninitialised, inputs[:4]),
                *map(torch.zeros_like, inputs[4:8]),
                *map(_uninitialised, inputs[8:]),
            )
            for block, part in zip(ctx.blocks, kept, strict=True):
                backward_block(inputs, block, part, grads, found, ctx.size, ctx.closed)
        return None, None, None, *found


def _uninitialised(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _forward(
    inputs: Inputs, blocks: list[Block], size: int, closed: int, kept: list[Kept] | None
) -> Tensors:
    """Output and last weights; ``kept``: where to put what backward needs."""
    out, ended = _uninitialised(inputs.q), tuple(map(_uninitialised, inputs[-4:]))
    for block in blocks:
        block_out = block.of_tokens(out)
        found = _forward_block(block.of(inputs), size, closed, block_out, kept)
        for tensor, part in zip(ended, found, strict=True):
            target = block.of_weights(tensor)
            target.copy_(part.view(target.shape))
    return out, *ended


def _forward_block(
    inputs: Inputs,
    size: int,
    closed: int,
    out_BTHD: torch.Tensor,
    kept: list[Kept] | None,
) -> Tensors:
    grouping = grouping_of(inputs.q, size)
    tokens = GroupTokens(inputs, grouping)
    w1_NEF = augmented(inputs)
    w2_NFD = inputs.w2.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    b2_N1D = inputs.b2.flatten(0, 1)[:, None].clone(memory_format=torch.contiguous_format)
    keep: Kept | None = None
    if kept is not None:
        keep = Kept.empty(inputs, grouping)
        kept.append(keep)
    step = _Step(inputs, grouping)
    for number, (first, last) in enumerate(grouping.spans()):
        tokens.load(first, last)
        if keep is not None:
            keep.w1_CNEF[number], keep.w2_CNFD[number] = w1_NEF, w2_NFD
            z2, out_z2 = keep.z2_MNbD[first:last], keep.out_z2_MNbD[first:last]
        else:
            z2, out_z2 = (torch.empty_like(tokens.shift_mNbD) for _ in range(2))
        # The inner loss's gradient by layer norm's normal values x̂, times lr: x̂ gain + offset.
        weight = tokens.gamma_N1D * tokens.lr_mNb1
        gain = weight * tokens.gamma_N1D
        offset = weight.mul_(tokens.shift_mNbD)
        parts = zip(
            tokens.x_mNcE.unbind(),
            tokens.scores_mNbb.unbind(),
            tokens.hidden_mNbb.unbind(),
            tokens.folding_mNbE.unbind(),
            tokens.unfold_mN11.unbind(),
            gain.unbind(),
            offset.unbind(),
            z2.unbind(),
            out_z2.unbind(),
            strict=True,
        )
        for index, part in enumerate(parts, first):
            step(w1_NEF, w2_NFD, b2_N1D, *part, folds=index < closed)
        out = normalise(out_z2)[0].mul_(tokens.gamma_N1D).add_(tokens.beta_N1D)
        out += tokens.x_mNcE[:, :, size:, :-1]
        grouping.store(out, first, last, out_BTHD)
    return w1_NEF[:, :-1], w1_NEF[:, -1], w2_NFD, b2_N1D


class _Step:
    """One mini-batch forward, in place; holds its scratch memory."""

    def __init__(self, inputs: Inputs, grouping: Grouping) -> None:
        pairs, size, hidden = grouping.num_programs, grouping.size, inputs.w1.shape[-1]
        like = inputs.w1
        self._size = size
        self._z1 = like.new_empty(pairs, 2 * size, hidden)
        self._x2, self._gate, self._rise, self._g1, self._back = (
            like.new_empty(pairs, size, hidden) for _ in range(5)
        )
        self._scores = like.new_empty(pairs, size, size)
        self._constant = gelu_constant(like)

    def __call__(
        self,
        w1_NEF: torch.Tensor,
        w2_NFD: torch.Tensor,
        b2_N1D: torch.Tensor,
        x_NcE: torch.Tensor,
        scores_Nbb: torch.Tensor,
        hidden_Nbb: torch.Tensor,
        folding_NbE: torch.Tensor,
        unfold_N11: torch.Tensor,
        gain_NbD: torch.Tensor,
        offset_NbD: torch.Tensor,
        z2_NbD: torch.Tensor,
        out_z2_NbD: torch.Tensor,
        *,
        folds: bool,
    ) -> None:
        """Writes ``z2`` and ``out_z2`` and, if it ``folds``, the weights."""
        z1_NbF, out_z1_NbF = self._z1[:, : self._size], self._z1[:, self._size :]
        x2_NbF, rise_NbF, gate_NbF, g1_NbF = self._x2, self._rise, self._gate, self._g1
        constant = self._constant
        torch.bmm(x_NcE, w1_NEF, out=self._z1)
        gelu(z1_NbF, constant, rise_NbF, gate_NbF, x2_NbF)
        torch.baddbmm(b2_N1D, x2_NbF, w2_NFD, out=z2_NbD)
        normal, mean, rstd = normalise(z2_NbD)
        upstream = torch.addcmul(offset_NbD, normal, gain_NbD, out=normal)
        g2_NbD = normalise_backward(upstream, z2_NbD, mean, rstd)
        gelu_slope(z1_NbF, constant, rise_NbF, gate_NbF, x2_NbF, g1_NbF)
        g1_NbF.mul_(torch.bmm(g2_NbD, w2_NFD.mT, out=self._back))
        out_z1_NbF.baddbmm_(scores_Nbb, g1_NbF)
        out_x2_NbF = self._back
        gelu(out_z1_NbF, constant, rise_NbF, gate_NbF, out_x2_NbF)
        scores = torch.bmm(out_x2_NbF, x2_NbF.mT, out=self._scores)
        torch.addcmul(hidden_Nbb, scores, hidden_Nbb, out=scores)
        torch.baddbmm(b2_N1D, out_x2_NbF, w2_NFD, out=out_z2_NbD).baddbmm_(scores, g2_NbD)
        if folds:
            w1_NEF.baddbmm_(folding_NbE.mT, g1_NbF)
            g2_NbD.mul_(unfold_N11)
            w2_NFD.baddbmm_(x2_NbF.mT, g2_NbD)
            b2_N1D += g2_NbD.sum(1, keepdim=True)
