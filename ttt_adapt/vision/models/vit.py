"""Vision Transformers with exchangeable mixers: attention, linear attention, MTTT.

The ViT of MTTT (arXiv 2310.13807, section 5; Beyer et al. 2022, arXiv 2205.01580): pre-norm blocks,
fixed positions for patches and learned ones for pixels, mean pooling, a tanh layer, a classifier that
begins at zero.

Shape legend: B images, S sequence, D width, F hidden width.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.vision.mixers import MTTT, Attention, LinearAttention
from ttt_adapt.vision.models.base import VisionModel
from ttt_adapt.vision.models.heads import DropPath
from ttt_adapt.vision.models.layout import TokenLayout
from ttt_adapt.vision.models.settings import (
    AttentionSettings,
    LinearAttentionSettings,
    VisionModelSettings,
    ViTSettings,
)

_MLP_BIAS_STD = 1e-6


class Perceptron(nn.Module):
    """``gelu(x W1 + b1) W2 + b2``, GELU by its tanh form as in the public JAX code.

    Args:
        dim: D.
        hidden: F.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=_MLP_BIAS_STD)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc2(functional.gelu(self.fc1(x_BSD), approximate="tanh"))
        return found


class ViTBlock(nn.Module):
    """Layer norm, mixer, residual; layer norm, perceptron, residual.

    Args:
        settings: of the model.
        drop_path: stochastic depth of both residual branches.
    """

    def __init__(self, settings: ViTSettings, drop_path: DropPath) -> None:
        super().__init__()
        self.mixer = make_mixer(settings)
        self.norm1 = (
            None if self.mixer is None else nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        )
        self.norm2 = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.mlp = Perceptron(settings.dim, round(settings.dim * settings.mlp_ratio))
        self.drop_path = drop_path

    def forward(self, tokens_BSD: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """``[B, S, D]`` to ``[B, S, D]``; the layout does not matter."""
        if self.mixer is not None and self.norm1 is not None:
            tokens_BSD = tokens_BSD + self.drop_path(self.mixer(self.norm1(tokens_BSD)))
        found: torch.Tensor = tokens_BSD + self.drop_path(self.mlp(self.norm2(tokens_BSD)))
        return found


class VisionTransformer(VisionModel):
    """A plain ViT; see :class:`ViTSettings`.

    Args:
        settings: of the model.
        architecture: the registered name.
    """

    family: ClassVar[str] = "vit"
    settings_kind: ClassVar[type[VisionModelSettings]] = ViTSettings
    position_std: ClassVar[float | None] = None
    image_mean: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    image_std: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)

    def _make_block(self, drop_path: DropPath) -> nn.Module:
        assert isinstance(self.settings, ViTSettings)
        return ViTBlock(self.settings, drop_path)

    def _make_pre_logits(self) -> nn.Module | None:
        assert isinstance(self.settings, ViTSettings)
        if not self.settings.pre_logits:
            return None
        dim = self.settings.dim
        layer = nn.Linear(dim, dim)
        # LeCun's normal, flax's default.
        nn.init.normal_(layer.weight, std=dim**-0.5)
        nn.init.zeros_(layer.bias)
        return nn.Sequential(layer, nn.Tanh())

    def run_blocks(self, tokens_BSD: torch.Tensor, layout: TokenLayout) -> Iterator[torch.Tensor]:
        """Tokens after each block, one after the other."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            for place, module in self.named_modules():
                if isinstance(module, MTTT) and module.generator is not None:
                    raise ModelError(
                        f"{place}: expected no generator with gradient checkpointing, which would "
                        "draw another order the second time; seed torch itself instead"
                    )
        return super().run_blocks(tokens_BSD, layout)


def make_mixer(settings: ViTSettings) -> nn.Module | None:
    """The mixer of one block, with its own initialisation; ``None`` where there is none."""
    dim, heads = settings.dim, settings.num_heads
    if settings.mixer == "attention":
        options = settings.attention or AttentionSettings()
        return Attention(dim, heads, bias=options.bias, scale=options.scale)
    if settings.mixer == "linear_attention":
        linear = settings.linear_attention or LinearAttentionSettings()
        return LinearAttention(
            dim,
            heads,
            feature_map=linear.feature_map,
            normalizer=linear.normalizer,
            bias=linear.bias,
        )
    if settings.mixer == "mttt":
        return MTTT(dim, heads, **({} if settings.mttt is None else settings.mttt.model_dump()))
    return None
