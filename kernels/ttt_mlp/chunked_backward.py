"""The dual form of TTT-MLP in PyTorch, backward by hand; see README.md for the equations.

From a group's first weights its mini-batches are computed again, with all of their gradients that
later mini-batches have no part in; then time runs backwards through the group.

Shape legend: B rows, T tokens, H heads, N inner models at once (pairs of a row and a head), m
mini-batches of a group, b tokens in a mini-batch, D head width, F hidden width, E = D + 1. A name
``d_x`` is the gradient of the loss with respect to ``x``; ``out_x`` belongs to the queries.
"""

import torch

from ttt_adapt.kernels.inner_loop.models import Tensors, Tokens
from ttt_adapt.kernels.ttt_mlp.chunked_group import (
    Block,
    GroupTokens,
    Inputs,
    Kept,
    gelu,
    gelu_constant,
    gelu_curvature,
    gelu_slope,
    grouping_of,
    normalise,
    normalise_backward,
)


def backward_block(
    inputs: Inputs,
    block: Block,
    kept: Kept,
    grads: Tensors,
    found: Inputs,
    size: int,
    closed: int,
) -> None:
    """Write (add, where blocks share a tensor) one block's part of all gradients to ``found``.

    Args:
        grads: of the output ``[B, T, H, D]`` and of the last weights ``[B, H, ...]``.
        found: gradients like ``inputs``, contiguous; those of scales and layer norm zero before the
            first block.
        closed: mini-batches after which weights are folded.
    """
    run = _Backward(block.of(inputs), kept, block.of_tokens(grads[0]), size, closed)
    run.take_up(tuple(map(block.of_weights, grads[1:])))
    spans = list(enumerate(run.grouping.spans()))
    tokens = Tokens(*map(block.of_tokens, found[:4]))
    for number, (first, last) in reversed(spans):
        run.load(number, first, last)
        for index in range(last - first):
            run.again(index)
        run.between()
        for index in reversed(range(last - first)):
            run.backwards(index)
        run.finish(tokens)
        block.add_to_scales(found.fold, -run.d_unfold_mN11, first)
        block.add_to_scales(found.visible, -run.d_hidden, first)
    batch = run.grouping.batch
    for tensor, part in ((found.ln_weight, run.d_gamma_ND), (found.ln_bias, run.d_beta_ND)):
        tensor[block.heads] += torch.unflatten(part, 0, (batch, -1)).sum(0)
    last_parts = (run.d_w1_NEF[:, :-1], run.d_w1_NEF[:, -1], run.d_w2_NFD, run.d_b2_N1D)
    for tensor, part in zip(found[-4:], last_parts, strict=True):
        target = block.of_weights(tensor)
        target.copy_(part.view(target.shape))


class _Backward:
    """One block's way back; holds a group's scratch memory."""

    def __init__(
        self, inputs: Inputs, kept: Kept, grad_BTHD: torch.Tensor, size: int, closed: int
    ) -> None:
        self.grouping = grouping_of(inputs.q, size)
        self._tokens = GroupTokens(inputs, self.grouping)
        self._kept, self._grad, self._closed, self._size = kept, grad_BTHD, closed, size
        width, hidden = inputs.w1.shape[-2:]
        scratch, new, pairs = self._tokens.scratch, inputs.w1.new_empty, self.grouping.num_programs
        self._w1, self._w2 = scratch(width + 1, hidden), scratch(hidden, width)
        # Stacked to be one product: [x2; out_x2; d_back]ᵀ [d_z2; d_out_z2; g2] is added to d_w2.
        self._left, self._right = scratch(3 * size, hidden), scratch(3 * size, width)
        self._d_z1 = scratch(2 * size, hidden)
        self._slope, self._bend, self._g1, self._d_g1, self._d_x2 = (
            scratch(size, hidden) for _ in range(5)
        )
        self._d_x, self._fold_d_x = scratch(2 * size, width), scratch(size, width + 1)
        self._fold_d_g2, self._d_upstream = scratch(size, width), scratch(size, width)
        self._d_out = scratch(size, width)
        self._raw2, self._d_scores1, self._d_scores2 = (scratch(size, size) for _ in range(3))
        self._z1, self._back = new(pairs, 2 * size, hidden), new(pairs, 2 * size, hidden)
        self._gate, self._rise, self._out_slope = (new(pairs, size, hidden) for _ in range(3))
        self._constant = gelu_constant(inputs.w1)
        self.d_gamma_ND, self.d_beta_ND = (inputs.w1.new_zeros(pairs, width) for _ in range(2))

    def take_up(self, grads: Tensors) -> None:
        """Begin with the gradients of the last weights ``[B, H, ...]``."""
        d_w1, d_b1, d_w2, d_b2 = grads
        self.d_w1_NEF = torch.cat([d_w1, d_b1[:, :, None]], dim=2).flatten(0, 1)
        self.d_w2_NFD = d_w2.flatten(0, 1).clone(memory_format=torch.contiguous_format)
        self.d_b2_N1D = d_b2.flatten(0, 1)[:, None].clone(memory_format=torch.contiguous_format)

    def load(self, number: int, first: int, last: int) -> None:
        """Take up a group: its tokens, first weights, and both layer norms at once."""
        tokens, size, count = self._tokens, self._size, last - first
        tokens.load(first, last)
        self._first, self._count = first, count
        self._w1[0], self._w2[0] = self._kept.w1_CNEF[number], self._kept.w2_CNFD[number]
        gamma, right = tokens.gamma_N1D, self._right[:count]
        d_out_z2, self._g2 = right[:, :, size : 2 * size], right[:, :, 2 * size :]
        self._z2 = self._kept.z2_MNbD[first:last]
        self._normal, self._mean, self._rstd = normalise(self._z2)
        self._error = torch.addcmul(tokens.shift_mNbD, self._normal, gamma)
        weight = gamma * tokens.lr_mNb1
        upstream = self._error * weight
        self._gain = weight.mul_(gamma)
        self._g2.copy_(normalise_backward(upstream, self._z2, self._mean, self._rstd))
        self._folding_g2 = self._g2 * tokens.unfold_mN11
        # What the gradient of g2 adds to that of x̂ and of z2, besides through upstream.
        along = self._rstd * (upstream * self._normal).mean(-1, keepdim=True)
        self._by_g2 = along.neg_()
        each = self._rstd / -self._z2.shape[-1]
        self._by_normal, self._by_length = upstream.mul_(each), self._normal * each
        d_out, out_z2 = self._d_out[:count], self._kept.out_z2_MNbD[first:last]
        self.grouping.load(self._grad, first, last, d_out)
        normal, mean, rstd = normalise(out_z2)
        d_out_z2.copy_(normalise_backward(d_out * gamma, out_z2, mean, rstd))
        self.d_gamma_ND += normal.mul_(d_out).sum((0, 2))
        self.d_beta_ND += d_out.sum((0, 2))
        d_scores2 = self._d_scores2[:count]
        flat = right.flatten(0, 1)
        torch.bmm(flat[:, size : 2 * size], flat[:, 2 * size :].mT, out=d_scores2.flatten(0, 1))
        self._d_raw2 = d_scores2 * tokens.hidden_mNbb

    def again(self, index: int) -> None:
        """A mini-batch forward, and its gradients that do not depend on later mini-batches."""
        tokens, size, constant = self._tokens, self._size, self._constant
        w1_NEF, w2_NFD, left = self._w1[index], self._w2[index], self._left[index]
        x2_NbF, out_x2_NbF = left[:, :size], left[:, size : 2 * size]
        slope_NbF, bend_NbF, g1_NbF = self._slope[index], self._bend[index], self._g1[index]
        z1_NbF, out_z1_NbF = self._z1[:, :size], self._z1[:, size:]
        torch.bmm(tokens.x_mNcE[index], w1_NEF, out=self._z1)
        rise_NbF, gate_NbF, out_slope_NbF = self._rise, self._gate, self._out_slope
        gelu(z1_NbF, constant, rise_NbF, gate_NbF, x2_NbF)
        gelu_slope(z1_NbF, constant, rise_NbF, gate_NbF, x2_NbF, slope_NbF)
        gelu_curvature(rise_NbF, gate_NbF, slope_NbF, bend_NbF)
        torch.bmm(self._right[index, :, size:], w2_NFD.mT, out=self._back)
        d_out_x2_NbF, back_NbF = self._back[:, :size], self._back[:, size:]
        torch.mul(back_NbF, slope_NbF, out=g1_NbF)
        bend_NbF.mul_(back_NbF)
        scores_Nbb, d_raw2_Nbb = tokens.scores_mNbb[index], self._d_raw2[index]
        out_z1_NbF.baddbmm_(scores_Nbb, g1_NbF)
        gelu(out_z1_NbF, constant, rise_NbF, gate_NbF, out_x2_NbF)
        gelu_slope(out_z1_NbF, constant, rise_NbF, gate_NbF, out_x2_NbF, out_slope_NbF)
        torch.bmm(out_x2_NbF, x2_NbF.mT, out=self._raw2[index])
        torch.bmm(d_raw2_Nbb.mT, out_x2_NbF, out=self._d_x2[index])
        d_out_x2_NbF.baddbmm_(d_raw2_Nbb, x2_NbF)
        d_out_z1_NbF = self._d_z1[index, :, size:]
        torch.mul(d_out_x2_NbF, out_slope_NbF, out=d_out_z1_NbF)
        torch.bmm(d_out_z1_NbF, g1_NbF.mT, out=self._d_scores1[index])
        torch.bmm(scores_Nbb.mT, d_out_z1_NbF, out=self._d_g1[index])
        if index + 1 < self._count:
            folding_NbE, folding_g2_NbD = tokens.folding_mNbE[index], self._folding_g2[index]
            torch.baddbmm(w1_NEF, folding_NbE.mT, g1_NbF, out=self._w1[index + 1])
            torch.baddbmm(w2_NFD, x2_NbF.mT, folding_g2_NbD, out=self._w2[index + 1])

    def between(self) -> None:
        """Of the group at once: g2's gradient through the queries' second layer."""
        size, count = self._size, self._count
        hidden = self._tokens.hidden_mNbb
        scores2 = torch.addcmul(hidden, self._raw2[:count], hidden)
        d_out_z2 = self._right[:count].flatten(0, 1)[:, size : 2 * size]
        self._d_g2 = torch.bmm(scores2.flatten(0, 1).mT, d_out_z2).view_as(self._z2)

    def backwards(self, index: int) -> None:
        """A mini-batch's remaining gradients, from those of the weights after it to those before."""
        tokens, size = self._tokens, self._size
        w1_NEF, w2_NFD = self._w1[index], self._w2[index]
        d_w1_NEF, d_w2_NFD, d_b2_N1D = self.d_w1_NEF, self.d_w2_NFD, self.d_b2_N1D
        left, right, d_z1 = self._left[index], self._right[index], self._d_z1[index]
        d_g1_NbF, d_g2_NbD, d_x2_NbF = self._d_g1[index], self._d_g2[index], self._d_x2[index]
        x_NcE, slope_NbF = tokens.x_mNcE[index], self._slope[index]
        fold_d_x_NbE, fold_d_g2_NbD = self._fold_d_x[index], self._fold_d_g2[index]
        if self._first + index < self._closed:
            torch.baddbmm(d_b2_N1D, left[:, :size], d_w2_NFD, out=fold_d_g2_NbD)
            d_g2_NbD.addcmul_(fold_d_g2_NbD, tokens.unfold_mN11[index])
            torch.bmm(self._g1[index], d_w1_NEF.mT, out=fold_d_x_NbE)
            d_g1_NbF.baddbmm_(tokens.folding_mNbE[index], d_w1_NEF)
            d_x2_NbF.baddbmm_(self._folding_g2[index], d_w2_NFD.mT)
        else:
            fold_d_g2_NbD.zero_()
            fold_d_x_NbE.zero_()
        d_back_NbF = torch.mul(d_g1_NbF, slope_NbF, out=left[:, 2 * size :])
        d_g2_NbD.baddbmm_(d_back_NbF, w2_NFD)
        # Through the inner loss's gradient by z2, a function of upstream, x̂ and rstd.
        norm = self._z2[index], self._mean[index], self._rstd[index]
        d_upstream_NbD = normalise_backward(d_g2_NbD, *norm)
        self._d_upstream[index] = d_upstream_NbD
        d_normal_NbD = d_upstream_NbD.mul_(self._gain[index])
        d_normal_NbD.addcmul_(d_g2_NbD, self._by_g2[index])
        along_normal = (d_g2_NbD * self._normal[index]).sum(-1, keepdim=True)
        d_normal_NbD.addcmul_(along_normal, self._by_normal[index])
        along_g2 = (d_g2_NbD * right[:, 2 * size :]).sum(-1, keepdim=True)
        through = normalise_backward(d_normal_NbD, *norm)
        d_z2_NbD = right[:, :size]
        torch.addcmul(through, along_g2, self._by_length[index], out=d_z2_NbD)
        d_x2_NbF.baddbmm_(d_z2_NbD, w2_NFD.mT)
        d_z1_NbF = torch.mul(d_g1_NbF, self._bend[index], out=d_z1[:, :size])
        d_z1_NbF.addcmul_(d_x2_NbF, slope_NbF)
        torch.bmm(d_z1, w1_NEF[:, :-1].mT, out=self._d_x[index])
        d_w1_NEF.baddbmm_(x_NcE.mT, d_z1)
        d_w2_NFD.baddbmm_(left.mT, right)
        d_b2_N1D += right[:, : 2 * size].sum(1, keepdim=True)

    def finish(self, found: Tokens) -> None:
        """Of the group at once: the gradients of tokens and of what all tokens share.

        Leaves those of −fold and −visible in ``d_unfold_mN11`` and ``d_hidden``.
        """
        tokens, size, count = self._tokens, self._size, self._count
        span = self._first, self._first + count
        d_scores1, d_scores2 = self._d_scores1[:count], self._d_scores2[:count]
        hidden = tokens.hidden_mNbb
        d_hidden = torch.addcmul(d_scores2, d_scores2, self._raw2[:count])
        self.d_hidden = d_hidden.addcmul_(d_scores1, tokens.raw_mNbb)
        d_raw1 = (d_scores1 * hidden).flatten(0, 1)
        x_mNcE, d_x_mNcD = tokens.x_mNcE, self._d_x[:count]
        fold_d_x, fold_d_g2 = self._fold_d_x[:count], self._fold_d_g2[:count]
        d_keys, d_queries = d_x_mNcD[:, :, :size], d_x_mNcD[:, :, size:]
        x = x_mNcE[..., :-1].flatten(0, 1)
        d_queries += torch.bmm(d_raw1, x[:, :size]).view_as(d_queries)
        d_keys += torch.bmm(d_raw1.mT, x[:, size:]).view_as(d_keys)
        d_keys.addcmul_(fold_d_x[..., :-1], tokens.unfold_mN11)
        by_keys = fold_d_x.mul_(x_mNcE[:, :, :size]).sum((2, 3), keepdim=True)
        by_g2 = fold_d_g2.mul_(self._g2).sum((2, 3), keepdim=True)
        self.d_unfold_mN11 = by_keys.add_(by_g2)
        # upstream = error γ lr, error = x̂ γ + shift, shift = β − v + k.
        gamma, d_upstream = tokens.gamma_N1D, self._d_upstream[:count]
        d_lr = (d_upstream * self._error).mul_(gamma).sum(-1, keepdim=True)
        d_upstream.mul_(tokens.lr_mNb1)
        error_twice = self._error.addcmul_(self._normal, gamma)
        self.d_gamma_ND += error_twice.mul_(d_upstream).sum((0, 2))
        d_shift = d_upstream.mul_(gamma)
        self.d_beta_ND += d_shift.sum((0, 2))
        d_queries += self._d_out[:count]
        d_keys += d_shift
        store = self.grouping.store
        store(d_queries, *span, found.q)
        store(d_keys, *span, found.k)
        store(d_shift.neg_(), *span, found.v)
        store(d_lr, *span, found.lr[..., None])
