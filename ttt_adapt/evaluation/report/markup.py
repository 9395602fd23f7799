"""HTML as values: text is escaped unless it was built here, so nothing can be forgotten."""

import html
import re

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = {"br", "hr", "meta"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | Markup | None


def clean(text: str) -> str:
    """``text`` with characters that neither HTML nor UTF-8 may hold replaced by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(child: Child) -> str:
    """``child`` as HTML: markup as it is, ``None`` as nothing, everything else escaped."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    return html.escape(clean(str(child)), quote=True)


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """An element. ``class_`` becomes ``class``, ``aria_label`` ``aria-label``; an attribute that
    is ``True`` stands alone, one that is ``None`` or ``False`` is left out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {attribute}")
        elif value not in (None, False):
            parts.append(f' {attribute}="{escape(str(value))}"')
    parts.append(">")
    if name in _VOID:
        return Markup("".join(parts))
    return Markup("".join(parts) + "".join(escape(child) for child in children) + f"</{name}>")


def join(*children: Child, separator: str = "") -> Markup:
    """Children one after another, without an element around them."""
    return Markup(escape(separator).join(escape(child) for child in children))


def shorten(text: str, length: int) -> str:
    """``text`` on one line, at most ``length`` characters, an ellipsis where it was cut."""
    line = " ".join(clean(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"
