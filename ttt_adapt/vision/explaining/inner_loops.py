"""What the inner loops saw in an image: losses by layer and step or token, gradients by token.

Shape legend: B images, N heads, S sequence, T image tokens, h w grid, J inner steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ttt_adapt.errors import ImageError, ModelError
from ttt_adapt.vision.models import record_inner_loops
from ttt_adapt.vision.models.recording import TokenLosses

TOP_SHARE = 0.3


@dataclass(frozen=True)
class InnerLosses:
    """One inner loop's losses over a batch of images.

    Attributes:
        block: number of the block, from 0.
        direction: of a Vision-TTT block, ``forth`` or ``back``; empty for MTTT.
        kind: ``steps``: before each inner step and after the last, ``[J + 1]``, summed over heads
            and averaged over images (MTTT's figures 1 and 3); ``tokens``: of each image token under
            the weights that its mini-batch began with, ``[T]``, averaged over heads and images
            (Vision-TTT's figure 11).
        losses: float64.
    """

    block: int
    direction: str
    kind: str
    losses: NDArray[np.float64]


@dataclass(frozen=True)
class GradientMap:
    """How much each patch changes the inner model of one block (equation 6 of Vision-TTT).

    Attributes:
        block: number of the block, from 0.
        magnitudes_Bhw: ``‖G_t‖_F`` over all heads, mean of the directions; float64.
    """

    block: int
    magnitudes_Bhw: NDArray[np.float64]

    def top(self, share: float = TOP_SHARE) -> NDArray[np.bool_]:
        """The ``share`` of each image's patches with the largest magnitudes, ``[B, h, w]``; see
        :func:`top_share`."""
        return np.stack([top_share(image, share) for image in self.magnitudes_Bhw])


def inner_losses(model: nn.Module, images_BCHW: torch.Tensor) -> list[InnerLosses]:
    """Losses of every inner loop while the model reads ``images``, in the blocks' order.

    Raises:
        ModelError: the model has no inner loops.
    """
    found = []
    for record in _recorded(model, images_BCHW):
        if isinstance(record, TokenLosses):
            losses = record.layout.image_tokens(record.losses.mean((0, 1))[None, :, None])
            found.append(
                InnerLosses(record.block, record.direction, "tokens", _array(losses.flatten()))
            )
        else:
            by_step = record.mean_losses
            kind = "tokens" if _is_causal(model) else "steps"
            found.append(InnerLosses(record.block, "", kind, _array(by_step)))
    return found


def gradient_maps(model: nn.Module, images_BCHW: torch.Tensor) -> list[GradientMap]:
    """Gradient magnitude maps of a Vision-TTT model, one for each block.

    The norm is that of the inner loss's gradient before learning rates, at the weights that the
    token's mini-batch began with.

    Raises:
        ModelError: the model is no Vision-TTT.
    """
    by_block: dict[int, list[torch.Tensor]] = {}
    for record in _recorded(model, images_BCHW):
        if not isinstance(record, TokenLosses):
            raise ModelError(
                "expected a Vision-TTT model for maps of each token's gradient, found inner loops "
                "that learn from all tokens at once"
            )
        # Heads have weights of their own: the norm of all is that of their norms.
        whole = record.gradient_norms.double().square().sum(1).sqrt()
        tokens = record.layout.image_tokens(whole[:, :, None])
        grid = tokens.reshape(len(tokens), record.layout.height, record.layout.width)
        by_block.setdefault(record.block, []).append(grid)
    return [
        GradientMap(block, torch.stack(grids).mean(0).cpu().numpy())
        for block, grids in sorted(by_block.items())
    ]


def top_share(values_hw: NDArray[np.float64], share: float = TOP_SHARE) -> NDArray[np.bool_]:
    """The largest ``share`` of the values, at least one; of equal ones the first.

    Raises:
        ImageError: ``share`` is no share.
    """
    if not 0.0 < share <= 1.0:
        raise ImageError(f"share: expected more than 0 and at most 1, found {share}")
    count = max(1, math.floor(share * values_hw.size + 0.5))
    order = np.argsort(-values_hw.ravel(), kind="stable")
    chosen = np.zeros(values_hw.size, dtype=bool)
    chosen[order[:count]] = True
    return chosen.reshape(values_hw.shape)


def _recorded(model: Any, images_BCHW: torch.Tensor) -> list[Any]:
    if not hasattr(model, "blocks"):
        raise ModelError(f"expected a vision model, found {type(model).__name__}")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), record_inner_loops(model) as recording:
            model.forward_features(images_BCHW)
            return list(recording.layers)
    finally:
        model.train(was_training)


def _is_causal(model: Any) -> bool:
    inner = getattr(model.settings, "mttt", None)
    return inner is not None and inner.strategy not in {"full", "sgd"}


def _array(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().cpu().numpy()
