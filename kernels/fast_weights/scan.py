"""A linear layer that reads and is written to, token by token, many tokens at once.

What token t writes is ``a_tᵀ u_t``. Where u is known, a chunk's outputs are two matrix products: one
with the weights it starts with, one with the writes visible to each token. Where it depends on the
weights at the start of the token's mini-batch, ``u_t = o_t − r_t W_start(t)``, it depends on the
writes of earlier mini-batches only, so that the writes of a chunk of several mini-batches solve a
unit lower triangular system: the WY representation of Yang et al. 2024 (arXiv 2406.06484), here for
mini-batches of any size, decay, momentum and token scale.

Loops unbind and stack, so that autograd's backward is linear in T too.

Shape legend: B rows, T tokens, H heads, N chunks, C tokens in a chunk, D and E widths of keys and
of values.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from ttt_adapt.kernels.fast_weights.forgetting import (
    ChannelForgetting,
    Forgetting,
    Readers,
    ScalarForgetting,
    When,
)
from ttt_adapt.kernels.fast_weights.learner import Tensors
from ttt_adapt.kernels.fast_weights.models import DependentWrite, Write

CHUNK_SIZE = 32
"""Tokens taken at once, at most; see README.md for how it was chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """What becomes of weights and writes: ``decay [B, H, T]`` or ``[B, H, T, D]``,
    ``momentum [B, H, T]``, ``token_scale [b]`` for mini-batches of b."""

    mini_batch_size: int
    decay: torch.Tensor | None = None
    momentum: torch.Tensor | None = None
    token_scale: torch.Tensor | None = None

    @property
    def by_channel(self) -> bool:
        return self.decay is not None and self.decay.ndim == 4

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Decay and momentum changed."""
        decay = None if self.decay is None else change(self.decay)
        momentum = None if self.momentum is None else change(self.momentum)
        return replace(self, decay=decay, momentum=momentum)

    def forgetting(self, like: torch.Tensor) -> Forgetting:
        """Of chunks ``like [B, H, N, C, ...]``, as decay and momentum are here."""
        if self.decay is not None and self.decay.ndim == like.ndim:
            return ChannelForgetting(self.decay)
        return ScalarForgetting(
            like.shape[3], self.mini_batch_size, like, self.decay, self.momentum, self.token_scale
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What reads and writes one matrix.

    Attributes:
        q: ``[B, H, T, D]``, what reads it, ``after`` or ``before`` its own token's step.
        known: writes; dependent: at most one, then a mini-batch has at most a chunk's tokens (one
            with decay for each channel).
    """

    q: torch.Tensor
    when: When
    known: list[Write]
    dependent: list[DependentWrite]
    gates: Gates

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Every tensor of tokens changed."""
        return replace(
            self,
            q=change(self.q),
            known=[(change(a), change(u)) for a, u in self.known],
            dependent=[
                DependentWrite(change(w.keys), change(w.reads), change(w.offset))
                for w in self.dependent
            ],
            gates=self.gates.map(change),
        )

    def part(self, first: int, last: int) -> Self:
        """Tokens ``first`` to ``last``."""
        return self.map(lambda tensor: tensor[:, :, first:last])


def scan(
    layer: Layer, weight: torch.Tensor, momentum: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What all tokens read ``[B, H, T, E]``, and weights and momentum ``[B, H, D, E]`` after them.

    Tokens begin at a mini-batch's first one.
    """
    num_tokens, size = layer.q.shape[2], CHUNK_SIZE
    if layer.dependent or layer.gates.token_scale is not None:
        # A chunk holds whole mini-batches.
        size = max(1, size // layer.gates.mini_batch_size) * layer.gates.mini_batch_size
    whole = num_tokens // size * size
    outputs = []
    for first, last, length in ((0, whole, size), (whole, num_tokens, num_tokens - whole)):
        if first < last:
            out, weight, momentum = _scan_chunks(layer.part(first, last), length, weight, momentum)
            outputs.append(out)
    if not outputs:
        return layer.q.new_zeros(*layer.q.shape[:3], weight.shape[-1]), weight, momentum
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0], weight, momentum


def _scan_chunks(
    layer: Layer, size: int, weight: torch.Tensor, momentum: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`scan` of tokens that are whole chunks."""
    layer = layer.map(lambda tensor: _to_chunks(tensor, size))
    known_values = [u for _, u in layer.known]
    keys = [a for a, _ in layer.known] + [write.keys for write in layer.dependent]
    readers = [Readers(layer.q, layer.when)]
    readers += [Readers(write.reads, "start") for write in layer.dependent]
    relation = layer.gates.forgetting(layer.q).relate(readers, keys)
    reads, speed_reads = relation.reads, relation.momentum_reads
    offsets: Tensors = ()
    if layer.dependent:
        seen = _sum_of_products(relation.scores[1], known_values)
        offset = layer.dependent[0].offset
        columns = [offset if seen is None else offset - seen, reads[1], *speed_reads[1:]]
        # Within one mini-batch nothing is read that it has written.
        if size > layer.gates.mini_batch_size:
            columns = _solved(relation.scores[1][-1], columns)
        reads, speed_reads = [reads[0], columns[1]], [*speed_reads[:1], *columns[2:]]
        offsets = columns[0].unbind()
    rows = torch.cat(reads, dim=-2).unbind()
    speed_rows = torch.cat(speed_reads, dim=-2).unbind() if speed_reads else ()
    carries = [carry.transpose(-1, -2) for carry in relation.carries]
    speed_carries = [carry.transpose(-1, -2) for carry in relation.momentum_carries]
    gains = _unbound(_sum_of_products(carries, known_values))
    speed_gains = _unbound(_sum_of_products(speed_carries, known_values))
    carry = carries[-1].unbind()
    speed_carry = speed_carries[-1].unbind() if speed_carries else ()
    kept, swept, slowed = map(
        _unbound, (relation.kept, relation.momentum_to_weights, relation.momentum_kept)
    )
    outputs, values = [], []
    for n in range(len(rows)):
        read = rows[n] @ weight
        weight = kept[n] * weight if kept else weight
        if momentum is not None:
            read = read + speed_rows[n] @ momentum
            weight, momentum = weight + swept[n] * momentum, slowed[n] * momentum
        if gains:
            weight = weight + gains[n]
        if momentum is not None and speed_gains:
            momentum = momentum + speed_gains[n]
        if offsets:
            read, dependent = torch.split(read, size, dim=-2)
            value = offsets[n] - dependent
            values.append(value)
            weight = weight + carry[n] @ value
            if momentum is not None:
                momentum = momentum + speed_carry[n] @ value
        outputs.append(read)
    if values:
        known_values = [*known_values, torch.stack(values)]
    out = torch.stack(outputs)
    inside = _sum_of_products(relation.scores[0], known_values)
    out = out if inside is None else out + inside
    return out.movedim(0, 2).flatten(2, 3), weight, momentum


def _to_chunks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """``[B, H, T, ...]`` to ``[N, B, H, C, ...]``, chunk after chunk in memory."""
    chunks = tensor.reshape(*tensor.shape[:2], -1, size, *tensor.shape[3:])
    return chunks.movedim(2, 0).contiguous()


def _solved(below: torch.Tensor, columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """``X`` of ``(I + below) X = columns`` with ``below [..., C, C]`` strictly lower triangular."""
    found: torch.Tensor = torch.linalg.solve_triangular(
        below, torch.cat(columns, dim=-1), upper=False, unitriangular=True
    )
    return list(torch.split(found, [column.shape[-1] for column in columns], dim=-1))


def _sum_of_products(lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> torch.Tensor | None:
    """Of as many as there are rights."""
    products = [left @ right for left, right in zip(lefts, rights, strict=False)]
    return sum(products[1:], products[0]) if products else None


def _unbound(chunks: torch.Tensor | None) -> Tensors:
    return () if chunks is None else chunks.unbind()
