"""Feature maps of a plain vision model: after chosen blocks, and as a pyramid of strides.

Shape legend: B images, C channels, H W pixels, h w grid, S sequence (image and class tokens),
T image tokens, D width.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError

if TYPE_CHECKING:
    from ttt_adapt.vision.models.base import VisionModel

FORMATS = ("NCHW", "NLC")


def forward_intermediates(
    model: "VisionModel",
    images_BCHW: torch.Tensor,
    indices: int | Sequence[int] | None = None,
    *,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: str = "NCHW",
    intermediates_only: bool = False,
) -> Any:
    """Image tokens after some of the blocks, with timm's arguments.

    Args:
        model: any vision model.
        images_BCHW: of any height and width.
        indices: which blocks, negative from the end; a number n: the last n; ``None``: all.
        return_prefix_tokens: with each map its class tokens, ``(map, [B, n, D])``.
        norm: whether the model's last layer norm is applied to each.
        stop_early: leave out blocks after the last one asked for; the final tokens are then those
            after that one.
        output_fmt: ``NCHW``: ``[B, D, h, w]``; ``NLC``: ``[B, T, D]``.
        intermediates_only: the list alone.

    Returns:
        The final tokens as ``forward_features`` has them and the list; or the list.

    Raises:
        ModelError: blocks that the model does not have, or another format.
    """
    if output_fmt not in FORMATS:
        raise ModelError(f"expected output_fmt of {', '.join(FORMATS)}, found {output_fmt!r}")
    wanted = block_indices(len(model.blocks), indices)
    tokens, layout = model.embed(images_BCHW)
    found: dict[int, Any] = {}
    for index, after in enumerate(model.run_blocks(tokens, layout)):
        tokens = after
        if index in wanted:
            part = model.norm(tokens) if norm else tokens
            shaped = layout.grid(part) if output_fmt == "NCHW" else layout.image_tokens(part)
            if output_fmt == "NCHW":
                shaped = shaped.contiguous()
            found[index] = (shaped, layout.class_tokens(part)) if return_prefix_tokens else shaped
        if stop_early and index == max(wanted):
            break
    intermediates = [found[index] for index in wanted]
    return intermediates if intermediates_only else (model.norm(tokens), intermediates)


def forward_pyramid(
    model: "VisionModel",
    images_BCHW: torch.Tensor,
    indices: Sequence[int] | None = None,
    strides: Sequence[int] = (4, 8, 16, 32),
) -> tuple[torch.Tensor, ...]:
    """Maps ``[B, D, ⌈H / stride⌉, ⌈W / stride⌉]``, finest first, for detection and segmentation heads.

    A plain model has one stride, its patch size. Each map is taken after another block, normed, and
    resized bilinearly (antialiased where it shrinks), as Vision-RWKV's detectors have it; nothing is
    learned here, that is the head's part.

    Args:
        model: any vision model.
        images_BCHW: of any height and width.
        indices: a block for each stride; ``None``: the ends of as many equal parts of the depth.
        strides: in pixels.

    Raises:
        ModelError: not one block for each stride, or a stride below 1.
    """
    if not strides or min(strides) < 1:
        raise ModelError(f"expected strides of at least 1 pixel, found {list(strides)}")
    if indices is None:
        depth = len(model.blocks)
        indices = [
            max(0, math.ceil(depth * (part + 1) / len(strides)) - 1) for part in range(len(strides))
        ]
    if len(indices) != len(strides):
        raise ModelError(
            f"expected a block for each of the {len(strides)} strides, found {len(indices)} indices"
        )
    places = [block_indices(len(model.blocks), [index])[0] for index in indices]
    unique = sorted(set(places))
    maps = forward_intermediates(
        model, images_BCHW, unique, norm=True, stop_early=True, intermediates_only=True
    )
    of_block = dict(zip(unique, maps, strict=True))
    height, width = images_BCHW.shape[-2:]
    patch = model.settings.patch_size
    return tuple(
        resized_map(of_block[place], height, width, patch, stride)
        for place, stride in zip(places, strides, strict=True)
    )


def block_indices(depth: int, indices: int | Sequence[int] | None) -> list[int]:
    """Blocks from the first on, in the order asked for.

    Raises:
        ModelError: blocks that the model does not have.
    """
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 1 <= indices <= depth:
            raise ModelError(f"expected 1 to {depth} last blocks, found {indices}")
        return list(range(depth - indices, depth))
    for index in indices:
        if not -depth <= index < depth:
            raise ModelError(
                f"expected blocks of -{depth} to {depth - 1}, found {index}; the model has {depth}"
            )
    if not indices:
        raise ModelError("expected at least one block, found none")
    return [index % depth for index in indices]


def resized_map(
    map_BDhw: torch.Tensor, height: int, width: int, patch: int, stride: int
) -> torch.Tensor:
    """The map at another stride; the grid covers the padding, too, and so does what comes out, until
    it is cut to the image."""
    if stride == patch:
        return map_BDhw
    # Whole cells of the stride: else all of them would be stretched a little.
    cells = stride // math.gcd(patch, stride)
    rows, columns = map_BDhw.shape[2:]
    more = (-rows % cells, -columns % cells)
    if any(more):
        map_BDhw = functional.pad(map_BDhw, (0, more[1], 0, more[0]), mode="replicate")
    size = [side * patch // stride for side in map_BDhw.shape[2:]]
    resized = functional.interpolate(
        map_BDhw, size=size, mode="bilinear", align_corners=False, antialias=stride > patch
    )
    return resized[:, :, : -(-height // stride), : -(-width // stride)]
