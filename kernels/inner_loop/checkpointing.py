"""Time cut into mini-batches, mini-batches into groups: what the chunked cores share.

A core walks the sequence group by group and keeps the weights only where a group begins; the
backward pass goes through the groups from the last to the first and computes each one's mini-batches
again. With groups of √M of the M mini-batches, both the weights kept and those of the group at hand
number √M (Chen et al. 2016, arXiv 1604.06174), and all scratch memory is a group's.

Shape legend: B rows, T tokens, H heads, N = B·H programs, M mini-batches, m mini-batches of a group,
b tokens in a mini-batch, D head width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from ttt_adapt.errors import OperatorInputError


@dataclass(frozen=True, slots=True)
class Grouping:
    """How ``[B, T, H, ...]`` becomes groups ``[m, N, b, ...]`` and back."""

    batch: int
    num_tokens: int
    heads: int
    size: int
    group: int

    @classmethod
    def of(cls, q: torch.Tensor, size: int, group: int | None = None) -> "Grouping":
        """For ``q [B, T, H, D]`` and mini-batches of ``size``; ``group`` mini-batches, or √M."""
        batch, num_tokens, heads = q.shape[:3]
        total = -(-num_tokens // size)
        return cls(batch, num_tokens, heads, size, min(total, group or math.isqrt(total - 1) + 1))

    @property
    def num_mini_batches(self) -> int:
        """M, a last open one included."""
        return -(-self.num_tokens // self.size)

    @property
    def num_programs(self) -> int:
        return self.batch * self.heads

    def spans(self) -> Iterator[tuple[int, int]]:
        """The groups' ``(first, last)`` mini-batches, last excluded, in order of time."""
        for first in range(0, self.num_mini_batches, self.group):
            yield first, min(first + self.group, self.num_mini_batches)

    def part(self, tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Mini-batches of ``[B, T, H, ...]`` as ``[m, B, H, b, ...]``; zeros where there is no token.

        A view wherever all tokens are there.
        """
        begin, end = first * self.size, last * self.size
        tokens = tensor[:, begin:end]
        missing = end - begin - tokens.shape[1]
        if missing:
            tokens = functional.pad(tokens, (0, 0) * (tensor.ndim - 2) + (0, missing))
        parted = tokens.view(self.batch, last - first, self.size, *tensor.shape[2:])
        return parted.movedim(1, 0).movedim(3, 2)

    def load(self, tensor: torch.Tensor, first: int, last: int, into: torch.Tensor) -> None:
        """Copy mini-batches of ``[B, T, H, ...]`` to ``[m, N, b, ...]``, of any dtype and strides."""
        self.by_head(into).copy_(self.part(tensor, first, last))

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[m, N, ...]`` as ``[m, B, H, ...]``, a view."""
        return tensor.view(tensor.shape[0], self.batch, self.heads, *tensor.shape[2:])

    def store(self, values: torch.Tensor, first: int, last: int, into: torch.Tensor) -> None:
        """Copy ``[m, N, b, ...]`` to mini-batches of ``[B, T, H, ...]``; the way back of ``load``."""
        parted = self.by_head(values).movedim(2, 3).movedim(0, 1)
        begin, end = first * self.size, min(last * self.size, self.num_tokens)
        tokens = into[:, begin:end]
        if end == last * self.size:
            tokens.view(parted.shape).copy_(parted)
        else:
            tokens.copy_(parted.flatten(1, 2)[:, : end - begin])


def mini_batch_scales(
    token_scale: torch.Tensor, lengths: torch.Tensor | None, grouping: Grouping, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``visible`` and ``fold``: how a mini-batch's gradients reach its queries, and the next weights.

    Causal, query i sees the keys j ≤ i, scaled by ``token_scale[i]``, and a full mini-batch folds its
    gradients into the weights by ``token_scale[b - 1]``, an open one not at all. When not causal,
    queries see all keys and every mini-batch folds, by the scale of its last token.

    Args:
        token_scale: ``[b]``.
        lengths: int64 ``[B]``, or ``None`` for T.

    Returns:
        ``visible``, causal ``[1, 1, b, b]``, else ``[M, N, 1, 1]``; ``fold [M, N, 1, 1]``; both
        differentiable functions of ``token_scale``.
    """
    size, device = grouping.size, token_scale.device
    if lengths is None:
        lengths = torch.full((1,), grouping.num_tokens, device=device)
    begins = torch.arange(grouping.num_mini_batches, device=device) * size
    num_real_MB = (lengths - begins[:, None]).clamp(0, size)
    if causal:
        fold_MB = token_scale[-1] * (num_real_MB == size)
    else:
        fold_MB = token_scale[(num_real_MB - 1).clamp(min=0)] * (num_real_MB > 0)
    fold = fold_MB.expand(-1, grouping.batch).repeat_interleave(grouping.heads, dim=1)
    fold = fold[:, :, None, None]
    if not causal:
        return fold, fold
    return token_scale[:, None].expand(size, size).tril()[None, None], fold


def without_padding(lr: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Learning rates ``[B, T, H]`` with zeros beyond each row's length: such tokens teach nothing."""
    if lengths is None:
        return lr
    beyond_BT = torch.arange(lr.shape[1], device=lr.device) >= lengths[:, None]
    return lr.masked_fill(beyond_BT[..., None], 0.0)


def refuse_second_derivatives(name: str) -> None:
    """For a backward pass written by hand, which autograd cannot go through.

    Raises:
        OperatorInputError: it is being recorded (``create_graph=True``).
    """
    if torch.is_grad_enabled():
        raise OperatorInputError(
            f"{name}: expected create_graph=False, for the chunked form has no second derivatives; "
            "use backend='reference'"
        )
