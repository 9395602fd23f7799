"""Softmax attention and linear attention over an image's tokens.

Shape legend: B images, T tokens, D width, N heads, d = D / N.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.vision.inner_loop.precision import full_precision
from ttt_adapt.vision.mixers.projections import into_heads, new_projection, out_of_heads

FeatureMap = Literal["identity", "elu"]


class Projected(nn.Module):
    """Queries, keys and values in heads, and the projection out of them."""

    def __init__(self, dim: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        self.query = new_projection(dim, num_heads, bias)
        self.key = new_projection(dim, num_heads, bias)
        self.value = new_projection(dim, num_heads, bias)
        self.out = new_projection(dim, num_heads, bias)

    def project(self, tokens_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v, ``[B, N, T, d]`` each."""
        return tuple(
            into_heads(project(tokens_BTD), self.num_heads)
            for project in (self.query, self.key, self.value)
        )


class Attention(Projected):
    """Multi-head self-attention, ``softmax(q kᵀ / √d) v``: a Nadaraya-Watson estimator whose kernel is
    ``exp(q · k / √d)`` (MTTT, section 4.2, has it without the √d).

    Args:
        dim: D; num_heads: N, a divisor of it.
        bias: of the four projections.
        scale: what ``q · k`` is multiplied by; ``None``: ``1 / √d``.

    Raises:
        ModelError: heads that do not divide the width.
    """

    def __init__(
        self, dim: int, num_heads: int, *, bias: bool = True, scale: float | None = None
    ) -> None:
        super().__init__(dim, num_heads, bias)
        self.scale = scale

    def forward(self, tokens_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        q, k, v = self.project(tokens_BTD)
        found = functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        mixed: torch.Tensor = self.out(out_of_heads(found))
        return mixed

    def extra_repr(self) -> str:
        return f"{self.dim}, num_heads={self.num_heads}"


class LinearAttention(Projected):
    """Linear attention ``φ(q) (φ(k)ᵀ v) / normalizer``, of linear time.

    Args:
        dim: D; num_heads: N, a divisor of it.
        feature_map: φ: ``identity`` (MTTT, equation 16), or ``elu``, elu + 1 (Katharopoulos et al.
            2020, arXiv 2006.16236).
        normalizer: ``n`` (the paper), ``n*d`` (the public JAX code's "constant") or ``adaptive``,
            ``φ(q) · Σ φ(k)``; ``None``: adaptive for elu, else that of the code.
        bias: of the four projections.

    Raises:
        ModelError: heads that do not divide the width, unknown options.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = "identity",
        normalizer: Literal["n", "n*d", "adaptive"] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, bias)
        if feature_map not in ("identity", "elu"):
            raise ModelError(f"expected a feature_map of identity or elu, found {feature_map!r}")
        if normalizer not in ("n", "n*d", "adaptive", None):
            raise ModelError(f"expected a normalizer of n, n*d or adaptive, found {normalizer!r}")
        self.feature_map = feature_map
        self.normalizer = normalizer or ("adaptive" if feature_map == "elu" else "n*d")

    def forward(self, tokens_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        q, k, v = self.project(tokens_BTD)
        dtype = torch.promote_types(q.dtype, torch.float32)
        with full_precision(q.device):
            # Sums over all tokens: in float32, whatever the model's dtype.
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            if self.feature_map == "elu":
                q, k = functional.elu(q) + 1.0, functional.elu(k) + 1.0
            if self.normalizer == "adaptive":
                found = q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
            else:
                count = k.shape[2] * (k.shape[3] if self.normalizer == "n*d" else 1)
                found = q @ (k.mT @ v / count)
        mixed: torch.Tensor = self.out(out_of_heads(found.to(tokens_BTD.dtype)))
        return mixed

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, num_heads={self.num_heads}, feature_map={self.feature_map!r}, "
            f"normalizer={self.normalizer!r}"
        )
