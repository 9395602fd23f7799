"""What an inner loop learns: to reconstruct each token's target from its key.

The features are ``f(x; W) = [x +] [LN](learner(x; W))``, the decoder is ``g(u) = [LN](u G + c)``,
and token j's loss is ``ℓ_j = ½‖g(f(k_j; W)) − target_j‖²``. MTTT (equation 1, figure 2) has a decoder
back to the token's whole width and no residual; TTT layers and Vision-TTT have no decoder, a residual
and a norm of the features, and values as targets. Gradients are written out, so that the outer
loop differentiates them like any other layer.

Shape legend: B images, N heads, n tokens, d head width, D width, E width of the target (D or d).
"""

from typing import NamedTuple

import torch

from ttt_adapt.vision.inner_loop.second_order import layer_norm_backward

EPSILON = 1e-6
"""Of the inner layer norms (flax's default, and the TTT layers' public reference)."""


class Norm(NamedTuple):
    """Layer norm with ``weight [N, E]`` and ``bias [N, E]`` for each head."""

    weight: torch.Tensor
    bias: torch.Tensor


class Decoder(NamedTuple):
    """g: ``weight [N, d, D]``, ``bias [D]`` shared by the heads, and a norm over D (Decoder LN)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    norm: Norm | None = None


class Reconstruction(NamedTuple):
    """The inner loss, and what the learner's output becomes."""

    residual: bool = False
    feature_norm: Norm | None = None
    decoder: Decoder | None = None

    @property
    def quadratic(self) -> bool:
        """Whether the loss is a quadratic function of the learner's output."""
        return self.feature_norm is None and (self.decoder is None or self.decoder.norm is None)

    def features(self, x_BNnd: torch.Tensor, z_BNnd: torch.Tensor) -> torch.Tensor:
        """f(x; W) from the learner's output z, ``[B, N, n, d]``."""
        found = z_BNnd if self.feature_norm is None else _Normed(z_BNnd, self.feature_norm).out
        return x_BNnd + found if self.residual else found

    def losses(
        self, x_BNnd: torch.Tensor, z_BNnd: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Each token's loss ``[B, N, n]``; target ``[B, N or 1, n, E]``."""
        found = self.features(x_BNnd, z_BNnd)
        if self.decoder is not None:
            found = _decode(self.decoder, found)
            if self.decoder.norm is not None:
                found = _Normed(found, self.decoder.norm).out
        return 0.5 * (found - target).square().sum(-1)

    def gradient(
        self, x_BNnd: torch.Tensor, z_BNnd: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """∂ℓ/∂z of each token, ``[B, N, n, d]``."""
        normed = None if self.feature_norm is None else _Normed(z_BNnd, self.feature_norm)
        found = z_BNnd if normed is None else normed.out
        if self.residual:
            found = x_BNnd + found
        if self.decoder is None:
            upstream = found - target
        else:
            decoded = _decode(self.decoder, found)
            if self.decoder.norm is None:
                upstream = decoded - target
            else:
                decoder_norm = _Normed(decoded, self.decoder.norm)
                upstream = decoder_norm.backward(decoder_norm.out - target)
            upstream = upstream @ self.decoder.weight.mT
        return upstream if normed is None else normed.backward(upstream)


class _Normed:
    """A layer norm's output, and its derivative; both differentiable themselves."""

    def __init__(self, z: torch.Tensor, norm: Norm) -> None:
        self.z, self.shape = z, [z.shape[-1]]
        self.weight = norm.weight[:, None]
        normal, mean, rstd = torch.native_layer_norm(z, self.shape, None, None, EPSILON)
        # The backward's own derivative by z counts what z does to its statistics.
        self.mean, self.rstd = mean.detach(), rstd.detach()
        self.out = torch.addcmul(norm.bias[:, None], normal, self.weight)

    def backward(self, upstream: torch.Tensor) -> torch.Tensor:
        return layer_norm_backward(upstream * self.weight, self.z, self.mean, self.rstd)


def _decode(decoder: Decoder, features_BNnd: torch.Tensor) -> torch.Tensor:
    found = features_BNnd @ decoder.weight
    return found if decoder.bias is None else found + decoder.bias
