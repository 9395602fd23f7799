"""Effective receptive field: which pixels the centre of the feature map listens to.

Luo et al. 2016 (arXiv 1701.04128), measured as in Ding et al. 2022 (RepLKNet, arXiv 2203.06717,
appendix C) and figure 8 of Vision-TTT: the gradient of the central final feature, summed over its
dimensions, with respect to the input; absolute values, summed over channels, averaged over images. The
feature is taken before the last layer norm, whose outputs sum to the same whatever comes in.

Shape legend: B images, C channels, H W pixels, h w grid, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ttt_adapt.errors import ImageError, ModelError


@dataclass(frozen=True)
class ReceptiveField:
    """Contributions of input pixels to the central feature.

    Attributes:
        contributions_HW: float64, not negative.
        centre: row and column of the centre of the feature's patch.
        num_images: that they are averaged over.
    """

    contributions_HW: NDArray[np.float64]
    centre: tuple[float, float]
    num_images: int

    def side_share(self, fraction: float) -> float:
        """Side of the smallest square around the centre that holds ``fraction`` of all contributions,
        over the image's (clipped at its borders); RepLKNet's table of areas has its square.

        Raises:
            ImageError: ``fraction`` is no share.
        """
        if not 0.0 < fraction <= 1.0:
            raise ImageError(f"fraction: expected more than 0 and at most 1, found {fraction}")
        found = self.contributions_HW
        height, width = found.shape
        rows = np.abs(np.arange(height) + 0.5 - self.centre[0]) / (height / 2)
        columns = np.abs(np.arange(width) + 0.5 - self.centre[1]) / (width / 2)
        reach = np.maximum(rows[:, None], columns[None, :]).ravel()
        order = np.argsort(reach, kind="stable")
        held = np.cumsum(found.ravel()[order])
        place = int(np.searchsorted(held, fraction * held[-1] * (1 - 1e-12)))
        return float(min(1.0, reach[order[min(place, len(order) - 1)]]))

    def is_global(self) -> bool:
        """Whether every pixel contributes."""
        return bool((self.contributions_HW > 0).all())


def effective_receptive_field(
    model: nn.Module, images_BCHW: torch.Tensor, *, batch_size: int = 8
) -> ReceptiveField:
    """Measure it for a vision model; the model stays as it was.

    Args:
        model: with ``forward_intermediates``.
        images_BCHW: normalised, of any size.
        batch_size: images at once.

    Raises:
        ImageError: no images.
        ModelError: the model's gradients are not finite.
    """
    if not len(images_BCHW):
        raise ImageError("expected at least one image to measure a receptive field on, found none")
    was_training = model.training
    model.eval()
    total = torch.zeros(images_BCHW.shape[-2:], dtype=torch.float64)
    centre = (0.0, 0.0)
    try:
        for part in torch.split(images_BCHW, batch_size):
            inputs = part.detach().clone().requires_grad_()
            features = final_map(model, inputs)
            h, w = features.shape[-2:]
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(features[:, :, h // 2, w // 2].sum(), inputs)
            total += gradient.abs().sum((0, 1)).double().cpu()
            # Grids cover the padding at the lower and right border, too.
            patch = getattr(getattr(model, "settings", None), "patch_size", None)
            sides = (patch, patch) if patch else (part.shape[-2] / h, part.shape[-1] / w)
            centre = ((h // 2 + 0.5) * sides[0], (w // 2 + 0.5) * sides[1])
    finally:
        model.train(was_training)
    if not bool(total.isfinite().all()):
        raise ModelError("the gradient of the central feature is not finite: is the model trained?")
    return ReceptiveField((total / len(images_BCHW)).numpy(), centre, len(images_BCHW))


@torch.enable_grad()
def final_map(model: nn.Module, images_BCHW: torch.Tensor) -> torch.Tensor:
    """Features after the last block, before the last norm, ``[B, D, h, w]``."""
    maps = model.forward_intermediates(  # type: ignore[operator]
        images_BCHW, indices=1, norm=False, output_fmt="NCHW", intermediates_only=True
    )
    found: torch.Tensor = maps[-1]
    return found
