"""One direction of a Vittt block: projections, short convolutions, and TTT-Linear over the sequence.

Kong et al. 2026, arXiv 2603.00518, algorithm 1, lines 9 to 16, with the conventions of the TTT layers
it builds on (Sun et al. 2024, arXiv 2407.04620).

Shape legend: B images, S sequence, D width, N heads, d = D / N, b tokens in a mini-batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.layers.rotary import rotary_angles, rotate_pairs
from ttt_adapt.layers.short_convolution import ShortConvolution
from ttt_adapt.vision.models.layout import TokenLayout
from ttt_adapt.vision.models.settings import VisionTTTSettings

INITIAL_STD = 0.02
"""Of W₀ at the start, as in the TTT layers."""


class InnerTokens(NamedTuple):
    """What the inner loop learns from: ``q, k, v [B, S, N, d]``, ``lr [B, S, N]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lr: torch.Tensor


class InitialState(nn.Module):
    """W₀ ``[N, d, d]`` and its bias ``[N, d]``, where every sequence begins.

    Args:
        num_heads: N.
        head_width: d.
        learned: whether they are parameters, or drawn once and kept.
    """

    def __init__(self, num_heads: int, head_width: int, *, learned: bool) -> None:
        super().__init__()
        weight = torch.empty(num_heads, head_width, head_width)
        bias = torch.zeros(num_heads, head_width)
        nn.init.normal_(weight, std=INITIAL_STD)
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        if learned:
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        else:
            self.register_buffer("weight", weight)
            self.register_buffer("bias", bias)

    without_weight_decay = ("bias",)


Probe = Callable[["InnerLearner", InnerTokens, InitialState, TokenLayout], None]


class InnerLearner(nn.Module):
    """A sequence is a data set: learn to reconstruct values from keys, answer queries meanwhile.

    Args:
        settings: of the model.

    Attributes:
        probe: called with this module, the inner tokens, W₀ and the layout in this direction's
            order, if set; see :func:`ttt_adapt.vision.record_inner_loops`.
    """

    without_weight_decay = ("token_scale_offset", "norm_weight", "norm_bias")

    def __init__(self, settings: VisionTTTSettings) -> None:
        super().__init__()
        dim, heads = settings.dim, settings.num_heads
        self.num_heads, self.head_width = heads, dim // heads
        self.mini_batch_size, self.base_lr = settings.mini_batch_size, settings.base_lr
        self.scale_kind, self.backend = settings.token_scale, settings.backend
        self.rope_theta = settings.rope_theta if settings.rope else None
        self.probe: Probe | None = None

        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = None if settings.share_qk else nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.q_conv: ShortConvolution | None = None
        self.k_conv: ShortConvolution | None = None
        if settings.conv1d:
            self.q_conv = ShortConvolution(dim, settings.conv1d_taps)
            self.k_conv = ShortConvolution(dim, settings.conv1d_taps)
        self.lr_proj = nn.Linear(dim, heads)
        self.token_scale_offset: nn.Parameter | None = None
        if settings.token_scale == "learned":
            self.token_scale_offset = nn.Parameter(torch.zeros(settings.mini_batch_size))
        self.norm_weight = nn.Parameter(torch.ones(heads, self.head_width))
        self.norm_bias = nn.Parameter(torch.zeros(heads, self.head_width))
        self.post_norm = (
            nn.LayerNorm(dim, eps=settings.norm_eps) if settings.post_norm else nn.Identity()
        )

    def forward(
        self, x_BSD: torch.Tensor, initial: InitialState, layout: TokenLayout
    ) -> torch.Tensor:
        """``[B, S, D]`` to ``[B, S, D]``, causal; the caller turns the sequence round, if at all.

        Args:
            x_BSD: in this direction's order.
            initial: where the inner loop begins.
            layout: in this direction's order; for the probe alone.
        """
        tokens = self.inner_tokens(x_BSD)
        if self.probe is not None:
            self.probe(self, tokens, initial, layout)
        # States are float32 whatever the tokens are: autocast would round them.
        with torch.autocast(x_BSD.device.type, enabled=False):
            out, _ = ttt_linear(
                *tokens,
                token_scale=self.token_scale(),
                weight=initial.weight,
                bias=initial.bias,
                ln_weight=self.norm_weight,
                ln_bias=self.norm_bias,
                mini_batch_size=self.mini_batch_size,
                check_finite=False,
                backend=self.backend,
            )
        normed: torch.Tensor = self.post_norm(out.flatten(2))
        return normed

    def inner_tokens(self, x_BSD: torch.Tensor) -> InnerTokens:
        """The inner loop's training and test views, labels and learning rates."""
        q = self.q_proj(x_BSD)
        k = q if self.k_proj is None else self.k_proj(x_BSD)
        v = self.v_proj(x_BSD)
        if self.q_conv is not None and self.k_conv is not None:
            q, k = self.q_conv(q), self.k_conv(k)
        heads = (*x_BSD.shape[:2], self.num_heads, self.head_width)
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if self.rope_theta is not None:
            place = torch.arange(x_BSD.shape[1], device=x_BSD.device)[None] % self.mini_batch_size
            angles = rotary_angles(place, self.head_width, self.rope_theta)
            q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
        return InnerTokens(q, k, v, self.learning_rates(x_BSD))

    def learning_rates(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """``base_lr · σ(w·x + bias) / d``, ``[B, S, N]``: each key's learning rate."""
        gate = self.lr_proj(x_BSD)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return torch.sigmoid(gate) * (self.base_lr / self.head_width)

    def token_scale(self) -> torch.Tensor:
        """By position in the mini-batch, ``[b]``: see ``VisionTTTSettings.token_scale``."""
        like = self.norm_weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.scale_kind == "one":
            return torch.ones(self.mini_batch_size, device=like.device, dtype=dtype)
        place = torch.arange(1, self.mini_batch_size + 1, device=like.device, dtype=dtype)
        scale = place.reciprocal()
        if self.token_scale_offset is not None:
            scale = (scale + self.token_scale_offset.to(dtype)).clamp(min=0.0)
        return scale

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, mini_batch_size={self.mini_batch_size}"
