"""Causal depthwise convolution over a few tokens, which goes on where it stopped.

Shape legend: B rows, T tokens, C width, K taps.
"""

import math

import torch
from torch import nn


class ShortConvolution(nn.Module):
    """``y_t = bias + Σ_j weight[:, j] · x_(t − K + 1 + j)`` for each dimension by itself.

    Args:
        width: C.
        num_taps: K; the last tap is the present token.
    """

    def __init__(self, width: int, num_taps: int = 4) -> None:
        super().__init__()
        self.num_taps = num_taps
        self.weight = nn.Parameter(torch.empty(width, num_taps))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Conv1d`` begins: uniform within ``1 / √K``."""
        bound = 1 / math.sqrt(self.num_taps)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x_BTC: torch.Tensor, tail: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, T, C]`` to ``[B, T, C]``; rows begin at their first token (padding behind is fine).

        Args:
            x_BTC: inputs.
            tail: ``[B, K - 1, C]`` the inputs before, of :func:`convolution_tail`; ``None``: none.
        """
        reached = with_tail(x_BTC, tail, self.num_taps)
        num_tokens = x_BTC.shape[1]
        found = self.bias.to(x_BTC.dtype)
        for tap in range(self.num_taps):
            weight = self.weight[:, tap].to(x_BTC.dtype)
            found = torch.addcmul(found, reached[:, tap : tap + num_tokens], weight)
        return found

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, num_taps={self.num_taps}"


def with_tail(x_BTC: torch.Tensor, tail: torch.Tensor | None, num_taps: int) -> torch.Tensor:
    """``[B, K - 1 + T, C]``: the inputs before, zero where there are none, and these."""
    if tail is None:
        return nn.functional.pad(x_BTC, (0, 0, num_taps - 1, 0))
    return torch.cat([tail.to(x_BTC.dtype), x_BTC], dim=1)


def convolution_tail(
    x_BTC: torch.Tensor, tail: torch.Tensor | None, num_taps: int, lengths: torch.Tensor | None
) -> torch.Tensor:
    """The last ``K - 1`` inputs of each row, ``[B, K - 1, C]``, for the call that goes on.

    Args:
        x_BTC: inputs, left-aligned.
        tail: of the call before.
        lengths: int64 ``[B]``, tokens of each row; ``None``: T.
    """
    reached = with_tail(x_BTC, tail, num_taps)
    if lengths is None:
        return reached[:, reached.shape[1] - (num_taps - 1) :].clone()
    index = lengths[:, None] + torch.arange(num_taps - 1, device=x_BTC.device)
    return reached.gather(1, index[..., None].expand(-1, -1, x_BTC.shape[2]))
