"""What the chunked form of TTT-MLP does alike forward and backward.

Shape legend: B rows, T tokens, H heads, N inner models at once (pairs of a row and a head), M
mini-batches, m mini-batches of a group, b tokens in a mini-batch, D head width, F hidden width,
E = D + 1: a column of ones carries the first layer's bias.
"""

import itertools
from typing import NamedTuple

import torch

from ttt_adapt.kernels.inner_loop.checkpointing import Grouping
from ttt_adapt.kernels.inner_loop.models import EPSILON, Tensors

aten = torch.ops.aten

GROUP = 16
"""Mini-batches between two checkpoints, at most: what is recomputed from one stays in the caches."""

CACHED_BYTES = 2 << 20
"""Fast weights that go through time together on a CPU, for each thread: about what its nearer caches
hold."""

_SLOPE, _CUBIC = (2.0 / torch.pi) ** 0.5, 0.044715


class Inputs(NamedTuple):
    """Tensors of the whole call, or of a block of it.

    Attributes:
        q, k, v: ``[B, T, H, D]`` in any float dtype; all else has the weights' dtype.
        lr: ``[B, T, H]``, zero beyond a row's length.
        visible: ``[1, 1, b, b]``, or ``[M, N, 1, 1]`` when not causal; fold: ``[M, N, 1, 1]``, see
            :func:`~ttt_adapt.kernels.inner_loop.checkpointing.mini_batch_scales`.
        ln_weight, ln_bias: ``[H, D]``.
        w1: ``[B, H, D, F]``; b1: ``[B, H, F]``; w2: ``[B, H, F, D]``; b2: ``[B, H, D]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lr: torch.Tensor
    visible: torch.Tensor
    fold: torch.Tensor
    ln_weight: torch.Tensor
    ln_bias: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor


class Block(NamedTuple):
    """Rows and heads whose fast weights go through time together, of a call with ``batch`` rows."""

    rows: slice
    heads: slice
    batch: int

    def of_tokens(self, tensor_BTHX: torch.Tensor) -> torch.Tensor:
        return tensor_BTHX[self.rows, :, self.heads]

    def of_weights(self, tensor_BHX: torch.Tensor) -> torch.Tensor:
        return tensor_BHX[self.rows, self.heads]

    def of_scales(self, scale_MN11: torch.Tensor) -> torch.Tensor:
        """A block's part of N, as ``[M, rows, heads, 1, 1]``; a view."""
        return torch.unflatten(scale_MN11, 1, (self.batch, -1))[:, self.rows, self.heads]

    def of(self, inputs: Inputs) -> Inputs:
        parts = [
            *map(self.of_tokens, inputs[:4]),
            *(
                scale if one_for_all(scale) else self.of_scales(scale).flatten(1, 2)
                for scale in (inputs.visible, inputs.fold)
            ),
            *(tensor[self.heads] for tensor in (inputs.ln_weight, inputs.ln_bias)),
            *map(self.of_weights, inputs[-4:]),
        ]
        return Inputs(*parts)

    def add_to_scales(self, scale: torch.Tensor, found_mNXX: torch.Tensor, first: int) -> None:
        """Add a block's gradients of mini-batches from ``first`` on."""
        if one_for_all(scale):
            scale += found_mNXX.sum_to_size(scale.shape)
            return
        target = self.of_scales(scale)[first : first + found_mNXX.shape[0]]
        target += found_mNXX.sum((2, 3)).view(target.shape)


def one_for_all(scale: torch.Tensor) -> bool:
    """Whether it is the causal mask, the same for all mini-batches and inner models."""
    return scale.shape[:2] == (1, 1)


def blocks_of(inputs: Inputs) -> list[Block]:
    """As few as have fast weights that fit into a CPU's caches, of like size; one on a GPU."""
    batch, heads = inputs.w1.shape[:2]
    pairs = batch * heads
    if inputs.q.device.type == "cpu":
        each = (inputs.w1[0, 0].numel() + inputs.w2[0, 0].numel()) * inputs.w1.element_size()
        pairs = max(1, CACHED_BYTES * torch.get_num_threads() // each)
    num_rows, num_heads = max(1, pairs // heads), min(heads, pairs)
    return [
        Block(rows, some, batch)
        for rows in _cut(batch, num_rows)
        for some in _cut(heads, num_heads)
    ]


def _cut(total: int, most: int) -> list[slice]:
    count = -(-total // most)
    bounds = [total * part // count for part in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


def grouping_of(q_BTHD: torch.Tensor, size: int) -> Grouping:
    """Groups of √M mini-batches, of ``GROUP`` at most."""
    return Grouping.of(q_BTHD, size, min(GROUP, Grouping.of(q_BTHD, size).group))


class Kept(NamedTuple):
    """What a block's backward pass needs of its forward pass, beside the inputs.

    Attributes:
        z2_MNbD: ``f(k_j; P)``; out_z2_MNbD: ``f(q_i; P_i)``, both before layer norm.
        w1_CNEF, w2_CNFD: the weights at the start of each group.
    """

    z2_MNbD: torch.Tensor
    out_z2_MNbD: torch.Tensor
    w1_CNEF: torch.Tensor
    w2_CNFD: torch.Tensor

    @classmethod
    def empty(cls, inputs: Inputs, grouping: Grouping) -> "Kept":
        pairs, (width, hidden) = grouping.num_programs, inputs.w1.shape[-2:]
        new, num_groups = inputs.w1.new_empty, len(list(grouping.spans()))
        shape = (grouping.num_mini_batches, pairs, grouping.size, width)
        return cls(
            new(shape),
            new(shape),
            new(num_groups, pairs, width + 1, hidden),
            new(num_groups, pairs, hidden, width),
        )


class GroupTokens:
    """A group's tokens by mini-batch, and what of them needs no fast weights.

    The tensors lie in scratch memory that the next :meth:`load` overwrites.

    Attributes:
        x_mNcE: keys above queries (c = 2b), with a column of ones.
        folding_mNbE: keys and their ones, times ``unfold_mN11``, which is −fold.
        raw_mNbb: ``q_i · k_j + 1``; scores_mNbb: the same times ``hidden_mNbb``, which is −visible.
        lr_mNb1: learning rates; shift_mNbD: layer norm's bias less the target, ``β − (v − k)``.
        gamma_N1D, beta_N1D: layer norm's weight and bias.
    """

    def __init__(self, inputs: Inputs, grouping: Grouping) -> None:
        self.inputs, self.grouping = inputs, grouping
        size, width = grouping.size, inputs.q.shape[-1]
        self.gamma_N1D, self.beta_N1D = (
            tensor.repeat(grouping.batch, 1)[:, None]
            for tensor in (inputs.ln_weight, inputs.ln_bias)
        )
        self._x = self.scratch(2 * size, width + 1)
        self._x[..., width] = 1.0
        self._folding = self.scratch(size, width + 1)
        self._raw, self._scores = self.scratch(size, size), self.scratch(size, size)
        self._shift, self._lr = self.scratch(size, width), self.scratch(size, 1)

    def scratch(self, *shape: int) -> torch.Tensor:
        """Uninitialised memory for a group, ``[m, N, ...]``."""
        grouping = self.grouping
        return self.inputs.w1.new_empty(grouping.group, grouping.num_programs, *shape)

    def load(self, first: int, last: int) -> None:
        """Take up mini-batches ``first`` to ``last``, the latter excluded."""
        inputs, grouping, count = self.inputs, self.grouping, last - first
        size = grouping.size
        self.x_mNcE = self._x[:count]
        keys, queries = self.x_mNcE[:, :, :size], self.x_mNcE[:, :, size:]
        self.shift_mNbD, self.lr_mNb1 = self._shift[:count], self._lr[:count]
        grouping.load(inputs.k, first, last, keys[..., :-1])
        grouping.load(inputs.q, first, last, queries[..., :-1])
        grouping.load(inputs.v, first, last, self.shift_mNbD)
        grouping.load(inputs.lr[..., None], first, last, self.lr_mNb1)
        torch.sub(keys[..., :-1], self.shift_mNbD, out=self.shift_mNbD).add_(self.beta_N1D)
        self.unfold_mN11 = -inputs.fold[first:last]
        self.folding_mNbE = torch.mul(keys, self.unfold_mN11, out=self._folding[:count])
        self.raw_mNbb, self.scores_mNbb = self._raw[:count], self._scores[:count]
        both = self.x_mNcE.flatten(0, 1)
        torch.bmm(both[:, size:], both[:, :size].mT, out=self.raw_mNbb.flatten(0, 1))
        visible = inputs.visible
        visible = visible if one_for_all(visible) else visible[first:last]
        self.hidden_mNbb = (-visible).expand_as(self.raw_mNbb)
        torch.mul(self.raw_mNbb, self.hidden_mNbb, out=self.scores_mNbb)


def augmented(inputs: Inputs) -> torch.Tensor:
    """W1 with b1 as last row, ``[N, E, F]``, a copy."""
    return torch.cat([inputs.w1, inputs.b1[:, :, None]], dim=2).flatten(0, 1)


def gelu(
    x: torch.Tensor,
    constant: torch.Tensor,
    rise: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """GELU's tanh approximation as ``x σ(2u)``, ``2u = x (2a + 2ac x²)``, into ``out``.

    σ is several times cheaper than tanh, and serves the derivatives too. ``constant`` is that of
    :func:`gelu_constant`; 2u is left in ``rise``, σ(2u) in ``gate``.
    """
    torch.addcmul(constant, x, x, value=2 * _SLOPE * _CUBIC, out=rise)
    torch.sigmoid(rise.mul_(x), out=gate)
    torch.mul(x, gate, out=out)


def gelu_slope(
    x: torch.Tensor,
    constant: torch.Tensor,
    rise: torch.Tensor,
    gate: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """GELU's derivative ``p + x p (1 − p) r`` into ``out``, given what :func:`gelu` left.

    ``r = d(2u)/dx`` is left in ``rise``; p is ``gate``, x p is ``value``.
    """
    # 1 − σ(2u) would lose digits where σ is near one.
    torch.sigmoid(rise.neg_(), out=out)
    out.mul_(value)
    torch.addcmul(constant, x, x, value=6 * _SLOPE * _CUBIC, out=rise)
    torch.addcmul(gate, out, rise, out=out)


def gelu_curvature(
    rise: torch.Tensor, gate: torch.Tensor, slope: torch.Tensor, out: torch.Tensor
) -> None:
    """GELU's second derivative, ``p (1 − p) (4r − 4a) + (s − p) r (1 − 2p)`` with s the first, into
    ``out``, given what :func:`gelu_slope` left; ``rise`` and ``gate`` are overwritten."""
    torch.sub(slope, gate, out=out)
    out.mul_(rise)
    out.addcmul_(out, gate, value=-2)
    rise.sub_(_SLOPE)
    gate.addcmul_(gate, gate, value=-1)
    out.addcmul_(gate, rise, value=4)


def gelu_constant(like: torch.Tensor) -> torch.Tensor:
    """``d(2u)/dx`` at zero, 0-dim: what the polynomials of GELU start from."""
    return torch.full((), 2 * _SLOPE, dtype=like.dtype, device=like.device)


def normalise(z: torch.Tensor) -> Tensors:
    """Layer norm without weights over the last axis: normal values, means, inverse deviations."""
    found: Tensors = aten.native_layer_norm(z, z.shape[-1:], None, None, EPSILON)
    return found


def normalise_backward(
    grad: torch.Tensor, z: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """∂/∂z for ∂/∂(normal values): ``(g − mean(g) − x̂ mean(g x̂)) rstd``, linear and symmetric in g."""
    found: torch.Tensor = aten.native_layer_norm_backward(
        grad, z, z.shape[-1:], mean, rstd, None, None, [True, False, False]
    )[0]
    return found
