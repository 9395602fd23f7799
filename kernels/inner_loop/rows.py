"""Ragged batches as left-aligned rows: attention masks and packed sequences become lengths.

Shape legend: B rows, T tokens, N packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """How to move tokens ``[B, T, ...]`` to left-aligned rows ``[R, L, ...]`` and back.

    Attributes:
        index: int64 ``[R, L]`` positions in the flattened ``B · T`` tokens; 0 where there is none.
        lengths: int64 ``[R]`` tokens of each row.
        shape: ``(B, T)``.
    """

    index: torch.Tensor
    lengths: torch.Tensor
    shape: tuple[int, int]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[B, T, ...]`` to ``[R, L, ...]``; rows' ends are filled with some token's values."""
        return tensor.flatten(0, 1)[self.index]

    def scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[R, L, ...]`` back to ``[B, T, ...]``; zero where no row has a token."""
        batch, length = self.shape
        flat = tensor.new_zeros((batch * length, *tensor.shape[2:]))
        kept = self.valid()
        found = flat.index_copy(0, self.index[kept], tensor[kept])
        return found.view(batch, length, *tensor.shape[2:])

    def valid(self) -> torch.Tensor:
        """bool ``[R, L]``."""
        return valid_tokens(self.lengths, self.index.shape[1])


def valid_tokens(lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """bool ``[R, num_tokens]``: whether a row has a token there."""
    return torch.arange(num_tokens, device=lengths.device) < lengths[:, None]


def rows_of_mask(mask_BT: torch.Tensor) -> Rows | None:
    """Real tokens (non-zero in the mask) moved to the left, in order; ``None`` if all are real."""
    real = mask_BT.bool()
    if bool(real.all()):
        return None
    batch, length = real.shape
    lengths = real.sum(1)
    order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
    order = order[:, : max(1, int(lengths.max()))]
    index = order + torch.arange(batch, device=real.device)[:, None] * length
    return Rows(index, lengths, (batch, length))


def rows_of_packed(cu_seqlens: Sequence[int], num_tokens: int, device: torch.device) -> Rows:
    """Sequences packed one after the other into one row of ``num_tokens``: a row for each.

    ``cu_seqlens``: ``[0, end of the first, …, num_tokens]``.
    """
    bounds = torch.tensor(cu_seqlens, dtype=torch.int64, device=device)
    lengths = bounds[1:] - bounds[:-1]
    longest = max(1, int(lengths.max()))
    index = bounds[:-1, None] + torch.arange(longest, device=device)
    return Rows(index.clamp_(max=num_tokens - 1), lengths, (1, num_tokens))
