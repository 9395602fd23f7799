"""One place that talks to matplotlib: its style, and files that are the same for the same input."""

import contextlib
import html
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.errors import MissingDependencyError
from ttt_adapt.evaluation.report.markup import Markup
from ttt_adapt.evaluation.report.palette import GRID, INK, MUTED, PAPER, themed_svg
from ttt_adapt.storage import atomic_write

WIDTH = 7.4
"""Inches; at 72 points an inch the width of a chart's SVG in CSS pixels before scaling."""
DOTS_PER_INCH = 160
# Fonts with glyphs that matplotlib's own lacks; those that are installed help it draw PNGs.
_FALLBACK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Arial Unicode MS",
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A finished figure.

    Attributes:
        name: of its PNG, and prefix of the ids in its SVG.
        svg: for the inside of an HTML page.
    """

    name: str
    svg: Markup
    png: bytes

    def write_png(self, path: Path) -> Path:
        """Write the PNG, atomically."""
        with atomic_write(path) as stream:
            stream.write(self.png)
        return path


def require_matplotlib() -> None:
    """Raise at once, and with the remedy, when charts cannot be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"reports need matplotlib, which cannot be imported ({error}); install it with: "
            "pip install 'ttt-adapt[report]'"
        ) from error


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Within it figures have the report's style; matplotlib's own settings come back after."""
    import matplotlib
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    style: Any = {
        "font.family": ["DejaVu Sans", *(name for name in _FALLBACK_FONTS if name in installed)],
        "font.size": 10.5,
        # Names of arms and subsets may hold dollar signs.
        "text.parse_math": False,
        "text.usetex": False,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "legend.frameon": False,
        "legend.fontsize": 10,
        "figure.facecolor": "none",
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",
        "svg.hashsalt": "ttt-adapt",
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        # A browser draws these from its own fonts; in a PNG they become boxes.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def new_figure(height: float) -> Any:
    """An empty figure of the report's width; belongs to no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def finish(figure: Any, name: str, description: str) -> Chart:
    """Render a figure twice: as themed SVG and as PNG on white."""
    vector = io.StringIO()
    figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    raster = io.BytesIO()
    figure.savefig(
        raster,
        format="png",
        dpi=DOTS_PER_INCH,
        metadata={"Software": None},
        facecolor=PAPER,
    )
    svg = themed_svg(vector.getvalue(), name, html.escape(description, quote=True))
    return Chart(name, Markup(svg), raster.getvalue())
