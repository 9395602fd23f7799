"""Positions of tokens on a grid: learned or sine and cosine, at any height and width.

Shape legend: h w grid, T = h · w tokens, D width.
"""

import torch
from torch import nn
from torch.nn import functional


def sincos2d(
    height: int,
    width: int,
    dim: int,
    *,
    native: tuple[int, int] | None = None,
    temperature: float = 10_000.0,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Fixed positions ``[h · w, D]``, float32: sin x, cos x, sin y, cos y, a quarter of D each.

    As in big_vision and MTTT's code: frequencies ``temperature^(−i / (D/4 − 1))``.

    Args:
        height: h; width: w.
        dim: D, a multiple of 4, at least 8.
        native: the grid that coordinates are measured on, if another: coordinates are interpolated
            between its cells' centres, so that an image at another resolution keeps its extent.
        temperature: ratio of the longest to the shortest wave length.
        device: where.
    """
    quarter = dim // 4
    rate = torch.arange(quarter, device=device, dtype=torch.float32) / (quarter - 1)
    omega = temperature**-rate
    rows, columns = native or (height, width)
    y = _coordinates(height, rows, device)[:, None, None] * omega
    x = _coordinates(width, columns, device)[None, :, None] * omega
    x, y = (waves.expand(height, width, quarter).flatten(0, 1) for waves in (x, y))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def resize_table(
    table_TD: torch.Tensor, native: tuple[int, int], size: tuple[int, int]
) -> torch.Tensor:
    """Learned positions ``[T, D]`` of one grid for another: bicubic, antialiased where it shrinks."""
    if native == size:
        return table_TD
    grid = table_TD.float().view(1, *native, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(
        grid, size=size, mode="bicubic", align_corners=False, antialias=True
    )
    return resized.flatten(2)[0].transpose(0, 1).to(table_TD.dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each place of the native grid, interpolated for any other.

    Args:
        native: rows and columns of the grid.
        dim: D.
        std: of the normal start.
    """

    def __init__(self, native: tuple[int, int], dim: int, *, std: float) -> None:
        super().__init__()
        self.native = native
        self.table = nn.Parameter(torch.empty(native[0] * native[1], dim))
        nn.init.trunc_normal_(self.table, std=std, a=-2 * std, b=2 * std)

    def forward(self, height: int, width: int, device: torch.device) -> torch.Tensor:
        """``[h · w, D]``, on the table's device."""
        return resize_table(self.table, self.native, (height, width))

    @torch.no_grad()
    def set_native(self, native: tuple[int, int]) -> None:
        """Tie the table to another grid, interpolating it."""
        resized = resize_table(self.table, self.native, native)
        if native != self.native:
            self.table = nn.Parameter(resized.contiguous(), requires_grad=self.table.requires_grad)
            self.native = native


class SincosPositions(nn.Module):
    """Fixed positions, made anew for each call; nothing is stored.

    Args:
        native: rows and columns of the grid that coordinates are measured on.
        dim: D.
    """

    def __init__(self, native: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.native, self.dim = native, dim

    def forward(self, height: int, width: int, device: torch.device) -> torch.Tensor:
        """``[h · w, D]``, float32."""
        return sincos2d(height, width, self.dim, native=self.native, device=device)


def _coordinates(count: int, native: int, device: torch.device | None) -> torch.Tensor:
    """Of ``count`` cells' centres, in units of ``native`` cells of the same extent."""
    cell = torch.arange(count, device=device, dtype=torch.float32)
    return cell if count == native else (cell + 0.5) * (native / count) - 0.5
