"""Images of any height and width to tokens.

Shape legend: B images, C channels, H W pixels, P patch size, h w grid, D width.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class PatchEmbedding(nn.Module):
    """A linear map of each ``P × P`` patch; images are padded with zeros at the right and bottom.

    Args:
        in_channels: C.
        dim: D.
        patch_size: P; with 1, every pixel is a token.
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """LeCun's normal weights (flax's default, truncated at two deviations), biases zero."""
        # 0.8796: the deviation of a unit normal cut off at 2.
        std = math.sqrt(1.0 / self.proj.weight[0].numel()) / 0.87962566103423978
        nn.init.trunc_normal_(self.proj.weight, std=std, a=-2 * std, b=2 * std)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)

    def grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches that cover so many pixels."""
        return -(-height // self.patch_size), -(-width // self.patch_size)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """``[B, C, H, W]`` to ``[B, h · w, D]``, row by row."""
        height, width = images_BCHW.shape[-2:]
        rows, columns = self.grid_size(height, width)
        missing = (columns * self.patch_size - width, rows * self.patch_size - height)
        if any(missing):
            images_BCHW = functional.pad(images_BCHW, (0, missing[0], 0, missing[1]))
        tokens: torch.Tensor = self.proj(images_BCHW).flatten(2).transpose(1, 2)
        return tokens
