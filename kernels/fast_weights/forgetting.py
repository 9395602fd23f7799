"""How much of what token j wrote is left when token t reads: decay, momentum and token scale.

Within a chunk of C tokens that starts with weights W₀ and momentum S₀, and tokens writing Uⱼ,

    S_t = Θ_t0 S₀ + Σ_j≤t Θ_tj Uⱼ        Θ_tj = θ_(j+1) ⋯ θ_t
    W_t = A_t W₀ + B_t S₀ + Σ_j≤t M_tj Uⱼ

Λ_tj = decay_(j+1) ⋯ decay_t; A_t = Λ_t0, and without momentum M = Λ, with it M = Λ Θ and
B_t = Σ_m≥1 Λ_tm Θ_m0. Products are taken directly, never as differences of logarithms, so they
neither overflow nor lose digits, and a factor may be zero. With decay for each channel, Λ cannot be
one number: the products of readers and writers are found block by block, in blocks that double.

Shape legend: N chunks, B rows, H heads, C tokens in a chunk, D width of keys, E any width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch

When = Literal["after", "before", "start"]
"""Which weights a token reads: after its step, before it, or where its mini-batch starts."""


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Rows ``x [N, B, H, C, D]`` that read the weights, and when."""

    x: torch.Tensor
    when: When


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """What readers and writers have to do with each other, and with what the chunk starts with.

    Attributes:
        scores: ``scores[r][w] [N, B, H, C, C]``, what reader t gets of what writer j wrote.
        reads: for each reader the rows that get from W₀ what is left of it.
        momentum_reads: likewise from S₀; empty without momentum.
        carries: for each writer its keys as the chunk's last weights see them.
        momentum_carries: likewise for S; empty without momentum.
        kept: factor of W₀ in the last weights, ``[N, B, H, 1 or D, 1]``; ``None`` for one.
        momentum_to_weights: factor of S₀ in them, ``[N, B, H, 1, 1]``; ``None`` without momentum.
        momentum_kept: factor of S₀ in the last S, likewise.
    """

    scores: list[list[torch.Tensor]]
    reads: list[torch.Tensor]
    momentum_reads: list[torch.Tensor]
    carries: list[torch.Tensor]
    momentum_carries: list[torch.Tensor]
    kept: torch.Tensor | None = None
    momentum_to_weights: torch.Tensor | None = None
    momentum_kept: torch.Tensor | None = None


class Forgetting(ABC):
    """What becomes of weights and writes within chunks."""

    @abstractmethod
    def relate(self, readers: list[Readers], writers: list[torch.Tensor]) -> Relation:
        """All pairs of readers and writers' keys ``[N, B, H, C, D]``."""


class ScalarForgetting(Forgetting):
    """Decay, momentum and token scale that are one number a token and head.

    Args:
        size: C; mini_batch_size: b, by which C divides unless it is smaller.
        decay: ``[N, B, H, C]``; momentum alike. token_scale: ``[b]``, without the other two.
    """

    def __init__(
        self,
        size: int,
        mini_batch_size: int,
        like: torch.Tensor,
        decay: torch.Tensor | None = None,
        momentum: torch.Tensor | None = None,
        token_scale: torch.Tensor | None = None,
    ) -> None:
        self.size, self.mini_batch_size = size, mini_batch_size
        # Row t and column j are times: 0 is the chunk's start, t is after token t.
        left = _products(decay, size, like)
        self.kept = None if decay is None else left[..., :1]
        # Writes are at times 1 to C, so there is none at time 0.
        self.weight = left[..., 1:]
        self.speed: torch.Tensor | None = None
        self.from_speed: torch.Tensor | None = None
        if momentum is not None:
            speed = _products(momentum, size, like)
            both = self.weight @ speed[..., 1:, :]
            self.from_speed, self.weight = both[..., :1], both[..., 1:]
            self.speed = speed[..., -1, :, None]
        if token_scale is not None:
            self.weight = _scaled(token_scale, size)

    def relate(self, readers: list[Readers], writers: list[torch.Tensor]) -> Relation:
        weights = [self._at(self.weight, reader.when) for reader in readers]
        found = Relation(
            scores=[
                [(reader.x @ y.transpose(-1, -2)) * weight for y in writers]
                for reader, weight in zip(readers, weights, strict=True)
            ],
            reads=self._read(self.kept, readers) or [reader.x for reader in readers],
            momentum_reads=self._read(self.from_speed, readers),
            carries=[y * self.weight[..., -1, :, None] for y in writers],
            momentum_carries=[],
        )
        if self.kept is not None:
            found = replace(found, kept=self.kept[..., -1:, :])
        if self.speed is not None and self.from_speed is not None:
            found = replace(
                found,
                momentum_carries=[y * self.speed[..., 1:, :] for y in writers],
                momentum_to_weights=self.from_speed[..., -1:, :],
                momentum_kept=self.speed[..., :1, :],
            )
        return found

    def _read(self, table: torch.Tensor | None, readers: list[Readers]) -> list[torch.Tensor]:
        if table is None:
            return []
        return [reader.x * self._at(table, reader.when) for reader in readers]

    def _at(self, table: torch.Tensor, when: When) -> torch.Tensor:
        """The rows of a table ``[..., C + 1, E]`` that tokens 1 to C read at."""
        if when == "after":
            return table[..., 1:, :]
        if when == "before":
            return table[..., :-1, :]
        token = torch.arange(self.size, device=table.device)
        return table.index_select(-2, token // self.mini_batch_size * self.mini_batch_size)


class ChannelForgetting(Forgetting):
    """Decay for each channel of the keys, ``decay [N, B, H, C, D]``.

    Readers read ``after`` or ``before`` their step. Blocks of one token, two, four, …: within
    each, readers have absorbed the decay since its beginning and writers the decay until its end,
    so that the second of two blocks reads the first by one matrix product.
    """

    def __init__(self, decay: torch.Tensor) -> None:
        self.size = decay.shape[-2]
        padding = (1 << max(0, self.size - 1).bit_length()) - self.size
        self.decay = torch.nn.functional.pad(decay, (0, 0, 0, padding), value=1.0)
        self.padding = padding

    def relate(self, readers: list[Readers], writers: list[torch.Tensor]) -> Relation:
        # [N, B, H, blocks, tokens in a block, D]
        xs = [self._blocks(r.x) for r in readers]
        ys = [self._blocks(y) for y in writers]
        total = self._blocks_of(self.decay)
        scores = [
            [_own(x, y) if r.when == "after" else torch.zeros_like(_own(x, y)) for y in ys]
            for r, x in zip(readers, xs, strict=True)
        ]
        xs = [x * total if r.when == "after" else x for r, x in zip(readers, xs, strict=True)]
        while total.shape[-3] > 1:
            first_total, second_total = _pairs(total)
            first_ys, second_ys = zip(*map(_pairs, ys), strict=True)
            for i, x in enumerate(xs):
                first, second = _pairs(x)
                scores[i] = [
                    _joined(block, second @ y.transpose(-1, -2))
                    for block, y in zip(scores[i], first_ys, strict=True)
                ]
                xs[i] = torch.cat([first, second * first_total], dim=-2)
            ys = [
                torch.cat([first * second_total, second], dim=-2)
                for first, second in zip(first_ys, second_ys, strict=True)
            ]
            total = first_total * second_total
        end = self.size
        return Relation(
            scores=[[block[..., 0, :end, :end] for block in row] for row in scores],
            reads=[x[..., 0, :end, :] for x in xs],
            momentum_reads=[],
            carries=[y[..., 0, :end, :] for y in ys],
            momentum_carries=[],
            kept=total[..., 0, :, :].transpose(-1, -2),
        )

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        return self._blocks_of(torch.nn.functional.pad(rows, (0, 0, 0, self.padding)))

    @staticmethod
    def _blocks_of(rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(-2)


def _products(factors: torch.Tensor | None, size: int, like: torch.Tensor) -> torch.Tensor:
    """``[..., C + 1, C + 1]``: at times t >= j the product of factors j + 1 to t, else 0."""
    times = torch.arange(size + 1, device=like.device)
    reached = times[:, None] >= times
    if factors is None:
        return reached.to(like.dtype)
    padded = torch.nn.functional.pad(factors, (1, 0), value=1.0)[..., None]
    steps = torch.where(times[:, None] > times, padded, 1.0)
    return steps.cumprod(-2) * reached


def _scaled(token_scale: torch.Tensor, size: int) -> torch.Tensor:
    """``[C + 1, C]``: a write weighs its reader's scale, once its mini-batch is over the last one."""
    mini_batch_size = token_scale.shape[0]
    token = torch.arange(size, device=token_scale.device)
    mini_batch, position = token // mini_batch_size, token % mini_batch_size
    same = mini_batch[:, None] == mini_batch
    weight = torch.where(same, token_scale[position][:, None], token_scale[-1])
    return torch.nn.functional.pad(weight.tril(), (0, 0, 1, 0))


def _own(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each token's own score as blocks of one: ``[..., C, 1, 1]``."""
    return (x * y).sum(-1, keepdim=True)


def _pairs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second of each two blocks of ``[..., blocks, tokens, E]``."""
    first, second = blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:]).unbind(-3)
    return first, second


def _joined(blocks: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Two diagonal blocks and the one below them as one block, zero above."""
    first, second = _pairs(blocks)
    upper = torch.cat([first, torch.zeros_like(below)], dim=-1)
    return torch.cat([upper, torch.cat([below, second], dim=-1)], dim=-2)
