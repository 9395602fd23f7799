"""The Vittt block: two inner loops over a sequence, one from each end, and a SwiGLU.

Kong et al. 2026, arXiv 2603.00518, section 4.3 and algorithm 1. Every part can be left out, which makes
the rows of the paper's design route (table 3).

Shape legend: B images, S sequence, D width, h w grid, F hidden width.
"""

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.vision.models.heads import DropPath
from ttt_adapt.vision.models.inner_learner import InitialState, InnerLearner
from ttt_adapt.vision.models.layout import TokenLayout
from ttt_adapt.vision.models.settings import VisionTTTSettings


class DepthwiseConvolution(nn.Module):
    """3×3 over the grid of image tokens, each dimension by itself, zero beyond the border, no bias.

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)

    def forward(self, tokens_BSD: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Tokens and, for image tokens, their surroundings: ``y + DWConv(y)``; class tokens stay."""
        found: torch.Tensor = self.conv(layout.grid(tokens_BSD)).permute(0, 2, 3, 1).flatten(1, 2)
        if not layout.class_positions:
            return tokens_BSD + found
        joined = layout.image_tokens(tokens_BSD) + found
        return layout.join(joined, layout.class_tokens(tokens_BSD).to(joined.dtype))


class SwiGLU(nn.Module):
    """``(silu(x W_gate) ∘ x W_up) W_down``, without biases (Shazeer 2020, arXiv 2002.05202).

    Args:
        dim: D.
        hidden: F.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(
            functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        )
        return found


class DualTTT(nn.Module):
    """Inner loops in both directions, gated, merged, projected; algorithm 1, lines 7 to 21.

    The sequence is turned round before projections and convolutions, so that these are causal in
    the direction's own order.

    Args:
        settings: of the model.
    """

    def __init__(self, settings: VisionTTTSettings) -> None:
        super().__init__()
        directions = ("forth", "back") if settings.dual else ("forth",)
        self.directions = nn.ModuleDict({name: InnerLearner(settings) for name in directions})
        shared = settings.initial_weights == "shared"
        learned = settings.initial_weights != "frozen"
        self.initial = nn.ModuleDict(
            {
                name: InitialState(
                    settings.num_heads, settings.dim // settings.num_heads, learned=learned
                )
                for name in (("both",) if shared else directions)
            }
        )
        self.gate_proj = (
            nn.Linear(settings.dim, settings.dim, bias=False) if settings.gate else None
        )
        self.gate_activation = settings.gate_activation
        self.merge_scale = 0.5 if settings.dual and settings.merge == "mean" else 1.0
        self.out_proj = nn.Linear(settings.dim, settings.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        merged = self._run("forth", x_BSD, layout)
        if "back" in self.directions:
            back = self._run("back", x_BSD.flip(1), layout.reversed())
            merged = merged + back.flip(1)
        if self.merge_scale != 1.0:
            merged = merged * self.merge_scale
        if self.gate_proj is not None:
            gate = self.gate_proj(x_BSD)
            if self.gate_activation == "gelu":
                gate = functional.gelu(gate, approximate="tanh")
            else:
                gate = torch.sigmoid(gate)
            merged = gate * merged
        found: torch.Tensor = self.out_proj(merged)
        return found

    def initial_of(self, direction: str) -> InitialState:
        """Where a direction's inner loop begins."""
        name = direction if direction in self.initial else "both"
        initial = self.initial[name]
        assert isinstance(initial, InitialState)
        return initial

    def _run(self, direction: str, x_BSD: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        found: torch.Tensor = self.directions[direction](x_BSD, self.initial_of(direction), layout)
        return found


class VitttBlock(nn.Module):
    """``y ← y + DWConv(y)``, then dual TTT and SwiGLU, each after a layer norm and on a residual.

    Args:
        settings: of the model.
        drop_path: stochastic depth of both residual branches.
    """

    def __init__(self, settings: VisionTTTSettings, drop_path: DropPath) -> None:
        super().__init__()
        dim, eps = settings.dim, settings.norm_eps
        self.dwconv = DepthwiseConvolution(dim) if settings.dwconv else None
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.mixer = DualTTT(settings)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        hidden = settings.mlp_hidden or round(dim * 8 / 3)
        self.mlp = SwiGLU(dim, hidden)
        self.drop_path = drop_path
        self.residual_is_normed = settings.residual == "normed"

    def forward(self, tokens_BSD: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """``[B, S, D]`` to ``[B, S, D]``."""
        if self.dwconv is not None:
            tokens_BSD = self.dwconv(tokens_BSD, layout)
        normed = self.norm1(tokens_BSD)
        carried = normed if self.residual_is_normed else tokens_BSD
        tokens_BSD = carried + self.drop_path(self.mixer(normed, layout))
        found: torch.Tensor = tokens_BSD + self.drop_path(self.mlp(self.norm2(tokens_BSD)))
        return found
