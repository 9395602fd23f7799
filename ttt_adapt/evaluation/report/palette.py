"""Colours of arms and stages, and how matplotlib's SVG becomes one that follows the page's theme.

Arms are drawn in the colours of Okabe and Ito (Color Universal Design, 2008), which people with
any common colour vision tell apart, without their yellow, which vanishes on white. Each colour has
a lighter twin for dark pages; charts refer to both by one CSS variable.
"""

import re
from dataclasses import dataclass

ARMS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a5a2b")
ARMS_DARK = ("#4fa8e0", "#f2853a", "#2fc79c", "#e3a1c8", "#f3bd4e", "#8fd0f5", "#c99a6b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "////", "xxxx", "....")
STAGES = ("#dbe7f1", "#a8c4dc", "#7299bf", "#456d9a", "#27456d", "#13263f")
STAGES_DARK = ("#e6eef6", "#b9cfe4", "#89abd0", "#5f85b5", "#45648e", "#334a6b")
INK, MUTED, GRID, PAPER, BASE = "#1b1f24", "#57606b", "#d9dee4", "#fefefe", "#6b7079"
INK_DARK, MUTED_DARK, GRID_DARK, PAPER_DARK, BASE_DARK = (
    "#e8eaed",
    "#a3abb5",
    "#363c45",
    "#15181c",
    "#a0a6b0",
)


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is drawn in every figure: colour, and what else tells arms apart: markers also
    in print without colour, dashes and hatches where there are more arms than colours."""

    color: str
    marker: str = ""
    dashes: str = "-"
    hatch: str = ""


def looks(is_base: list[bool]) -> list[Look]:
    """A look for each arm in order; arms that learn nothing are grey, as the base line is."""
    chosen = []
    number = 0
    for base in is_base:
        if base:
            chosen.append(Look(BASE, "_", "--"))
            continue
        place = number % len(ARMS)
        again = number // len(ARMS) % len(DASHES)
        chosen.append(Look(ARMS[place], MARKERS[place], DASHES[again], HATCHES[again]))
        number += 1
    return chosen


def _themed() -> dict[str, tuple[str, str]]:
    """Light colour → (CSS variable, dark colour)."""
    pairs = {
        INK: ("ink", INK_DARK),
        MUTED: ("muted", MUTED_DARK),
        GRID: ("grid", GRID_DARK),
        PAPER: ("paper", PAPER_DARK),
        BASE: ("base", BASE_DARK),
    }
    pairs |= {c: (f"arm{i}", ARMS_DARK[i]) for i, c in enumerate(ARMS)}
    pairs |= {c: (f"stage{i}", STAGES_DARK[i]) for i, c in enumerate(STAGES)}
    return pairs


def css_variables(*, dark: bool) -> str:
    """Declarations of every colour for one theme."""
    return "".join(
        f"--{name}:{dark_color if dark else light};"
        for light, (name, dark_color) in _themed().items()
    )


def css_color(color: str) -> str:
    """``color`` as the CSS variable that follows the theme."""
    return f"var(--{_themed()[color][0]})"


_COLOR = re.compile("#[0-9a-f]{6}")
_PROLOG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACE = re.compile(r'\s+xmlns(:xlink)?="[^"]*"')
_SIZE = re.compile(r'^<svg([^>]*?)\swidth="[^"]*"', re.DOTALL)
_HEIGHT = re.compile(r'^<svg([^>]*?)\sheight="[^"]*"', re.DOTALL)
_STYLE = re.compile(r'(?<=style=")[^"]*')
_FONT = re.compile(r"font-family:[^;\"]*;?|(font: (?:[a-z0-9]+ )*?[0-9.]+px)[^;\"]*")


def themed_svg(svg: str, name: str, description: str) -> str:
    """matplotlib's SVG made fit for the inside of an HTML page.

    Colours become variables, text takes the page's font, ids are told apart from those of other
    figures (``name`` is their prefix), nothing points outside, and readers of screens get
    ``description`` (already escaped).
    """
    svg = _PROLOG.sub("", svg, count=1)
    svg = _METADATA.sub("", svg)
    svg = _NAMESPACE.sub("", svg)
    svg = _HEIGHT.sub(r"<svg\1", _SIZE.sub(r"<svg\1", svg))
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'(?<=\bid=")', f"{name}-", svg)
    svg = re.sub(r'(?<=\bhref="#)', f"{name}-", svg)
    svg = re.sub(r"(?<=url\(#)", f"{name}-", svg)
    variables = {color: f"var(--{entry[0]})" for color, entry in _themed().items()}

    def themed(match: re.Match[str]) -> str:
        style = _COLOR.sub(lambda found: variables.get(found[0], found[0]), match[0])
        return _FONT.sub(lambda found: f"{found[1]} var(--font)" if found[1] else "", style)

    svg = _STYLE.sub(themed, svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1).strip()
