"""Pictures of what is inside: small PNGs, the same bytes for the same numbers.

Shape legend: B images, H W pixels, h w grid of patches.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ttt_adapt.evaluation.report.drawing import drawing, require_matplotlib
from ttt_adapt.evaluation.report.palette import ARMS, INK, PAPER
from ttt_adapt.storage import atomic_path
from ttt_adapt.vision.explaining.inner_loops import InnerLosses, top_share
from ttt_adapt.vision.explaining.receptive_field import ReceptiveField

DOTS_PER_INCH = 100
PANEL = 1.75
"""Inches of a square panel."""
DIMMED = 0.18
"""What is left of the light of a patch outside the top share."""
HEAT = "inferno"


def receptive_field_picture(fields: Mapping[str, ReceptiveField], path: Path) -> Path:
    """One panel for each field, its title the key; brightness is the fourth root of a pixel's share of
    the largest contribution, so that faint reach shows.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with _canvas(1, len(fields), PANEL * 1.3) as (figure, axes):
        for place, (title, field) in zip(axes[0], fields.items(), strict=True):
            found = field.contributions_HW
            place.imshow((found / max(found.max(), 1e-300)) ** 0.25, cmap=HEAT, vmin=0, vmax=1)
            side = 100 * field.side_share(0.5)
            place.set_title(f"{title}\nhalf of it within {side:.0f} % of the side", fontsize=7)
        return _write(figure, path)


def gradient_map_picture(
    images_BHWC: NDArray[np.uint8],
    maps: Mapping[str, NDArray[np.float64]],
    path: Path,
    *,
    share: float = 0.3,
) -> Path:
    """For each image a row: the image, then by key of ``maps [B, h, w]`` the ranks of its
    patches as heat, and its top share.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with _canvas(len(images_BHWC), 1 + 2 * len(maps), PANEL) as (figure, axes):
        for row, image in zip(range(len(images_BHWC)), images_BHWC, strict=True):
            picture = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
            axes[row][0].imshow(picture)
            for number, (title, maps_Bhw) in enumerate(maps.items()):
                heat, marked = axes[row][1 + number], axes[row][1 + len(maps) + number]
                values = maps_Bhw[row]
                # Ranks: the first mini-batches' gradients would outshine all others.
                ranks = values.ravel().argsort(kind="stable").argsort().reshape(values.shape)
                heat.imshow(ranks, cmap=HEAT, extent=(0, picture.shape[1], picture.shape[0], 0))
                marked.imshow(overlay(picture, top_share(values, share)))
                if row == 0:
                    heat.set_title(f"rank of ‖G‖, {title}", fontsize=7)
                    marked.set_title(f"top {100 * share:.0f} %, {title}", fontsize=7)
        return _write(figure, path)


def overlay(image_HWC: NDArray[np.uint8], chosen_hw: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The image with all but the chosen patches dimmed; patches may reach over the lower and right
    border, as padding does."""
    height, width = image_HWC.shape[:2]
    h, w = chosen_hw.shape
    rows = np.repeat(np.arange(h), -(-height // h))[:height]
    columns = np.repeat(np.arange(w), -(-width // w))[:width]
    light = np.where(chosen_hw[rows][:, columns], 1.0, DIMMED)
    return np.rint(image_HWC * light[:, :, None]).astype(np.uint8)


def inner_loss_picture(curves: Mapping[str, Sequence[InnerLosses]], path: Path) -> Path:
    """A panel for each key: losses by token, or by inner step, a line for each block.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with _canvas(1, len(curves), 2.6, axes_off=False) as (figure, axes):
        for place, (title, lines) in zip(axes[0], curves.items(), strict=True):
            shown = [line for line in lines if line.direction in {"", "forth"}]
            for line in shown:
                color = _shade(line.block, max(other.block for other in shown))
                marker = "o" if line.kind == "steps" else ""
                label = f"block {line.block + 1}"
                place.plot(line.losses, color=color, lw=1.0, marker=marker, ms=3, label=label)
            by_step = bool(shown) and shown[0].kind == "steps"
            if by_step:
                place.set_xticks(range(len(shown[0].losses)))
            place.set_title(title, fontsize=7)
            place.set_xlabel("inner step" if by_step else "token", fontsize=7)
            place.tick_params(labelsize=6)
        axes[0][0].set_ylabel("inner loss", fontsize=7)
        axes[0][0].legend(fontsize=5, ncols=2, handlelength=1.0)
        return _write(figure, path)


def history_picture(history: Sequence[dict[str, Any]], path: Path) -> Path:
    """MTTT's figures 1 (right) and 3: a panel for each block, loss over outer steps, a line for each
    inner step; ``history`` as ``inner_losses.json`` of a training run has it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    steps = [row["step"] for row in history]
    num_blocks = len(history[0]["layers"])
    with _canvas(1, num_blocks, 2.4, axes_off=False) as (figure, axes):
        for block, place in enumerate(axes[0]):
            losses = np.array([row["layers"][block] for row in history])
            for inner in range(losses.shape[1]):
                color = ARMS[inner % len(ARMS)]
                place.plot(steps, losses[:, inner], color=color, lw=1.2, label=f"t = {inner}")
            place.set_title(f"block {block + 1}", fontsize=7)
            place.set_xlabel("outer step", fontsize=7)
            place.tick_params(labelsize=6, which="both")
        axes[0][0].set_ylabel("inner loss", fontsize=7)
        axes[0][0].legend(fontsize=5)
        return _write(figure, path)


@contextmanager
def _canvas(
    rows: int, columns: int, panel: float, *, axes_off: bool = True
) -> Iterator[tuple[Any, Any]]:
    """A figure with a grid of axes, in the style of the reports, while inside."""
    require_matplotlib()
    with drawing():
        from matplotlib.figure import Figure

        size = (columns * panel, rows * panel + (0.35 if axes_off else 0.1))
        figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
        axes = figure.subplots(rows, columns, squeeze=False)
        if axes_off:
            for place in axes.flat:
                place.set_axis_off()
                place.title.set_color(INK)
        yield figure, axes


def _write(figure: Any, path: Path) -> Path:
    """The figure as a PNG of 256 colours, which is small; atomically."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH, facecolor=PAPER)
    drawn.seek(0)
    with Image.open(drawn) as picture:
        small = picture.convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
    with atomic_path(path) as temporary:
        small.save(temporary, format="PNG", optimize=True)
    return path


def _shade(block: int, last: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](0.9 * block / max(1, last))
